"""``hvdtrain resume``: go on with a run that has ended."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from hvdtrain import contract
from hvdtrain.cli import options
from hvdtrain.errors import UsageError


@click.command()
@options.run
@options.changes
@options.subset
@click.option("--replan", is_flag=True, help="Plan anew, though nothing of the job has changed.")
@options.detach
@options.dry_run
def command(
    wanted: str | None,
    runs: Path,
    overrides: tuple[str, ...],
    hosts: str | None,
    hostfile: Path | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    processes: int | None,
    replan: bool,
    detach: bool,
    dry_run: bool,
    output_format: str,
) -> int:
    """Go on with RUN, which was stopped, failed or is lost, from its newest whole checkpoint.

    It runs as another attempt in the same run directory, and by its plan; with other options, hosts or workers it is
    planned anew: resume -n 4 --set parallelism.tensor=2. The same where its job.yaml was edited. A run that has
    finished goes on if its job has changed: resume --set options.epochs=20. RUN is a job's name (its newest run),
    NAME/ID, the beginning of an ID, or a run directory. Default: the newest run.

    Exit status: as of 'hvdtrain launch'; 2 also if the run still lives, or has finished.
    """
    options.check_dry_run(dry_run, detach, output_format)

    from hvdtrain.cli.planning import PlacedJob, show
    from hvdtrain.plan.plan import spec_digest
    from hvdtrain.spec.loader import load_spec
    from hvdtrain.supervise import launch
    from hvdtrain.supervise.detach import detached
    from hvdtrain.supervise.runs import find, require_ended, taken

    run = find(wanted, runs)
    require_ended(run)
    with taken(run) as held:
        # Somebody else may have been faster.
        state = require_ended(run).state
        asked = replan or any(
            value not in (None, ()) for value in (overrides, hosts, hostfile, include, exclude, processes)
        )
        spec = load_spec(run.path / contract.JOB_FILE, options.with_processes(overrides, processes))
        # Whoever goes on by the plan needs no hostfile any more, and whoever wants another one no plan.
        placed = PlacedJob.of(spec, hosts, hostfile, include, exclude) if asked else None
        spec = placed.spec if placed else spec
        if spec.name != run.name:
            raise UsageError(
                f"a run keeps its job's name, and this is '{spec.name}'", where=str(run), fix=f"name: {run.name}"
            )
        plan = None
        with suppress(*([UsageError] if asked else [])):
            plan = launch.read_plan(run.path)
        has_changed = plan is None or plan.spec_sha256 != spec_digest(spec)
        if state == "finished" and not has_changed:
            raise UsageError(
                "the run has finished, and nothing of its job has changed",
                where=str(run),
                fix="to train on, say what is to change: 'hvdtrain resume --set options.epochs=20'",
            )
        if plan is None or asked or has_changed:
            placed = placed or PlacedJob.of(spec, None, None, (), ())
            plan = placed.plan(run.path, to_start=not dry_run)
            if not dry_run:
                launch.replan(run.path, spec, plan)
        if dry_run:
            show(plan, output_format)
            return 0
        if not detach:
            return launch.resume(run.path)
        status = detached(run.path, lambda: launch.resume(run.path), keep=(held,))
    if status == 0:
        options.show_detached(run.path)
    return status
