"""From a job spec and the hosts of a command line to the plan of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import click

from hvdtrain.errors import StartError
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.resolve import default_slots, resolve_hosts
from hvdtrain.plan.facts import Facts
from hvdtrain.plan.plan import LaunchPlan, make_plan
from hvdtrain.plan.render import render
from hvdtrain.spec.models import JobSpec
from hvdtrain.supervise.facts import gather_facts, read_tuned


@dataclass(frozen=True)
class PlacedJob:
    """A job and the hosts that it may run on.

    Attributes:
        spec: the job, with the hosts that the command line has said: a run that is resumed, and hosts that come later,
            go by them too.
        hosts: of the spec.
    """

    spec: JobSpec
    hosts: tuple[Host, ...]

    @classmethod
    def of(
        cls, spec: JobSpec, hosts: str | None, hostfile: Path | None, include: tuple[str, ...], exclude: tuple[str, ...]
    ) -> PlacedJob:
        """The job of a spec, on the command line's hosts or else on its own.

        Raises:
            UsageError: both ``hosts`` and ``hostfile`` are given.
            InputError: they have faults, or nothing is left of them.
        """
        found = resolve_hosts(
            spec.hosts,
            hosts_option=hosts,
            hostfile_option=hostfile,
            include=include,
            exclude=exclude,
            default_slots=default_slots(),
        )
        update: dict[str, object] = {
            "include": (*spec.hosts.include, *include),
            "exclude": (*spec.hosts.exclude, *exclude),
        }
        if hosts is not None:
            update |= {"file": None, "list": (hosts,)}
        elif hostfile is not None:
            update |= {"file": hostfile.absolute(), "list": ()}
        return cls(spec.model_copy(update={"hosts": spec.hosts.model_copy(update=update)}), found)

    def plan(self, run_directory: Path, *, to_start: bool) -> LaunchPlan:
        """The plan of a run; its hosts are looked at for it.

        Args:
            run_directory: of the run.
            to_start: whether it will be started, for which its hosts have to be reached, or only shown.

        Raises:
            HvdtrainError: there is no such plan.
        """
        hosts, facts = self.hosts, gather_facts(self.hosts)
        if facts.remote:
            hosts, facts = _surveyed(self.spec, hosts, facts, required=to_start)
        return make_plan(self.spec, hosts, facts, run_directory, self.spec.hosts.file, read_tuned(self.spec))


def show(plan: LaunchPlan, output_format: str) -> None:
    """Print what ``--dry-run`` shows."""
    click.echo(render(plan) if output_format == "text" else json.dumps(plan.to_json(), indent=2))


def _surveyed(
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
