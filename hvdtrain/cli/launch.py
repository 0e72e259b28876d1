"""``hvdtrain launch``: run a training job from its spec."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from hvdtrain.cli import options
from hvdtrain.errors import StartError
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.resolve import default_slots, resolve_hosts
from hvdtrain.plan.facts import Facts
from hvdtrain.plan.plan import make_plan
from hvdtrain.plan.render import render
from hvdtrain.spec.loader import load_spec
from hvdtrain.spec.models import JobSpec
from hvdtrain.supervise.facts import gather_facts, read_tuned
from hvdtrain.supervise.run_directory import RunDirectory


@click.command()
@options.job
@options.subset
@options.new_runs
@options.detach
@click.option("--dry-run", is_flag=True, help="Show the plan and the exact command, and start nothing.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", help="Format of --dry-run."
)
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
    if output_format == "json" and not dry_run:
        raise click.UsageError("--format json shows a plan: it goes with --dry-run")
    if detach and dry_run:
        raise click.UsageError("--dry-run starts nothing that could be detached")
    if processes is not None:
        overrides = (*overrides, f"processes={processes}")
    spec = load_spec(job, overrides)
    # Of an elastic job's hosts that come later too, and of those of a run that is resumed.
    chosen = {"include": (*spec.hosts.include, *include), "exclude": (*spec.hosts.exclude, *exclude)}
    spec = spec.model_copy(update={"hosts": spec.hosts.model_copy(update=chosen)})
    where = resolve_hosts(
        spec.hosts,
        hosts_option=hosts,
        hostfile_option=hostfile,
        include=(),
        exclude=(),
        default_slots=default_slots(),
    )
    watched = None if hosts else hostfile or spec.hosts.file
    facts = gather_facts(where)
    if facts.remote:
        where, facts = _with_hosts(spec, where, facts, required=not dry_run)
    run_directory = RunDirectory.choose(runs, spec.name).path
    plan = make_plan(spec, where, facts, run_directory, watched, read_tuned(spec))
    if dry_run:
        click.echo(render(plan) if output_format == "text" else json.dumps(plan.to_json(), indent=2))
        return 0

    if detach:
        from hvdtrain.supervise.detach import launch_detached

        status = launch_detached(spec, plan)
        if status == 0:
            options.show_detached(Path(plan.run_directory))
        return status

    from hvdtrain.supervise.launch import launch

    return launch(spec, plan)


def _with_hosts(
    spec: JobSpec, hosts: tuple[Host, ...], facts: Facts, *, required: bool
) -> tuple[tuple[Host, ...], Facts]:
    """The hosts that the job may use, and the facts with their network; without it where it isn't required."""
    from hvdtrain.cluster.survey import survey

    def tell(text: str) -> None:
        click.echo(f"{click.style('hvdtrain', bold=True)}: {text}", err=True)

    try:
        found = survey(spec, hosts, check=required, tell=tell)
    except StartError as error:
        if required:
            raise
        tell(f"without the network's settings: {error}")
        return hosts, facts
    for host, faults in found.dropped.items():
        tell(f"left out {host}: {'; '.join(faults)}")
    return found.hosts, replace(facts, network=found.network, dropped=found.dropped, host_order=found.order)
