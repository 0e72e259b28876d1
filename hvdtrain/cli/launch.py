"""``hvdtrain launch``: run a training job from its spec."""

from __future__ import annotations

from pathlib import Path

import click

from hvdtrain.cli import options
from hvdtrain.cli.planning import PlacedJob, show
from hvdtrain.spec.loader import load_spec
from hvdtrain.supervise.run_directory import RunDirectory


@click.command()
@options.job
@options.subset
@options.new_runs
@options.detach
@options.dry_run
def command(
    job: Path,
    overrides: tuple[str, ...],
    hosts: str | None,
    hostfile: Path | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    processes: int | None,
    runs: Path,
    detach: bool,
    dry_run: bool,
    output_format: str,
) -> int:
    """Run the training job that JOB, a YAML file, describes.

    Exit status: 0 done, 2 spec or hostfile, 3 can't start, 4 training failed, 5 processes lost, 6 hung,
    130/143 stopped by SIGINT/SIGTERM. With --detach 0 says that it has begun.
    """
    options.check_dry_run(dry_run, detach, output_format)
    spec = load_spec(job, options.with_processes(overrides, processes))
    placed = PlacedJob.of(spec, hosts, hostfile, include, exclude)
    plan = placed.plan(RunDirectory.choose(runs, spec.name).path, to_start=not dry_run)
    if dry_run:
        show(plan, output_format)
        return 0

    if detach:
        from hvdtrain.supervise.detach import launch_detached

        status = launch_detached(placed.spec, plan)
        if status == 0:
            options.show_detached(Path(plan.run_directory))
        return status

    from hvdtrain.supervise.launch import launch

    return launch(placed.spec, plan)
