"""``hvdtrain drill``: how a job copes with faults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain.cli import options
from hvdtrain.drill.faults import FAULTS
from hvdtrain.drill.models import Limits
from hvdtrain.errors import CheckFailedError

if TYPE_CHECKING:
    from hvdtrain.drill.models import Report, Result, Subject
    from hvdtrain.spec.models import JobSpec

_NAMES = tuple(FAULTS)
_RATE = re.compile(r"\d+(\.\d+)?[kmg]?bit")
# The longest hang_timeout_s that is kept while a rank is stopped.
_HANG_TIMEOUT_S = 15.0


def _limits(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    """From ``SECONDS`` and ``FAULT=SECONDS`` to seconds by fault, with the empty name for all others."""
    limits = {}
    for value in values:
        fault, _, seconds = value.rpartition("=")
        if fault and fault not in _NAMES:
            raise click.BadParameter(f"there is no fault '{fault}'; there are {', '.join(_NAMES)}", context, parameter)
        try:
            limits[fault] = float(seconds)
        except ValueError:
            limits[fault] = -1.0
        if not limits[fault] >= 0:
            raise click.BadParameter(f"'{seconds}' isn't a number of seconds", context, parameter)
    return limits


def _rate(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not _RATE.fullmatch(value) or float(value.rstrip("kmgbit")) == 0:
        raise click.BadParameter(f"'{value}' isn't a rate such as 50mbit, 500kbit or 1gbit", context, parameter)
    return value


@click.command()
@options.job
@options.new_runs
@click.option("--fault", "faults", type=click.Choice(_NAMES), multiple=True, help="Do this; default: all that apply.")
@click.option("--rank", type=click.IntRange(min=0), help="The rank that is hit; default: the last.")
@click.option(
    "--max-notice-s",
    metavar="[FAULT=]SECONDS",
    multiple=True,
    callback=_limits,
    help="Fail if a fault is noticed later than that.",
)
@click.option(
    "--max-recover-s",
    metavar="[FAULT=]SECONDS",
    multiple=True,
    callback=_limits,
    help="Fail if it is recovered from later than that.",
)
@click.option(
    "--hang-timeout-s",
    type=click.FloatRange(min=1),
    help=f"The job's hang_timeout_s for stop-rank; default: its own, at most {_HANG_TIMEOUT_S:g}.",
)
@click.option(
    "--rate",
    metavar="RATE",
    default="50mbit",
    show_default=True,
    callback=_rate,
    help="What slow-link lets the host send in a second, such as 500kbit or 1gbit.",
)
@click.option(
    "--after-s",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="Seconds from the job's first step to the fault; from its start for a command, which tells no steps.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds for each fault."
)
@options.output_format
def command(
    job: Path,
    overrides: tuple[str, ...],
    hosts: str | None,
    hostfile: Path | None,
    processes: int | None,
    runs: Path,
    faults: tuple[str, ...],
    rank: int | None,
    max_notice_s: dict[str, float],
    max_recover_s: dict[str, float],
    hang_timeout_s: float | None,
    rate: str,
    after_s: float,
    timeout: float,
    output_format: str,
) -> int:
    """Launch the job of JOB once for each fault, do the fault while it trains, and measure what follows.

    Exit status: 0 all is as it has to be, and within the limits; 1 it isn't, or a fault that was asked for couldn't be
    done; 2 spec, hostfile or options; 3 the job doesn't come to train; 130/143 stopped by SIGINT/SIGTERM.
    """
    overrides = options.with_processes(overrides, processes)
    spec, subject = _subject(job, overrides, hosts, hostfile, rank, hang_timeout_s, rate)

    from hvdtrain.drill.drill import Drill
    from hvdtrain.drill.exercise import Times
    from hvdtrain.supervise.run_directory import new_id

    arguments = [str(job), *(part for override in overrides for part in ("--set", override))]
    arguments += ["--hosts", hosts] if hosts else []
    arguments += ["--hostfile", str(hostfile)] if hostfile else []
    report = Drill(
        subject,
        arguments,
        runs.absolute() / "drills" / f"{spec.name}-{new_id()}",
        limits=Limits(max_notice_s, max_recover_s),
        times=Times(after_s, timeout),
        say=lambda text: click.echo(f"{click.style('drill', bold=True)}: {text}", err=True),
    ).run(spec, tuple(dict.fromkeys(faults)) or _NAMES)
    if output_format == "json":
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show(report)
    return _status(report, asked_for=faults)


def _subject(
    job: Path,
    overrides: tuple[str, ...],
    hosts: str | None,
    hostfile: Path | None,
    rank: int | None,
    hang_timeout_s: float | None,
    rate: str,
) -> tuple[JobSpec, Subject]:
    from hvdtrain.drill.models import Subject
    from hvdtrain.hosts.resolve import default_slots, resolve_hosts
    from hvdtrain.plan.plan import make_plan
    from hvdtrain.spec.loader import load_spec
    from hvdtrain.supervise.facts import gather_facts

    spec = load_spec(job, overrides)
    where = resolve_hosts(
        spec.hosts, hosts_option=hosts, hostfile_option=hostfile, include=(), exclude=(), default_slots=default_slots()
    )
    # Who runs where; each launch finds out the rest for itself.
    plan = make_plan(spec, where, gather_facts(where), Path())
    size = len(plan.placements)
    if rank is not None and rank >= size:
        raise click.UsageError(f"--rank {rank}: the job has ranks 0 to {size - 1}")
    longest = min(plan.hang_timeout_s or _HANG_TIMEOUT_S, _HANG_TIMEOUT_S)
    return spec, Subject(
        plan=plan,
        tells_steps=spec.task is not None,
        rank=size - 1 if rank is None else rank,
        hang_timeout_s=hang_timeout_s or longest,
        rate=rate,
    )


def _status(report: Report, *, asked_for: tuple[str, ...]) -> int:
    from hvdtrain.drill.models import FAIL, SKIPPED

    if report.signal is not None:
        return 128 + report.signal
    if report.error is not None:
        raise report.error
    failed = [result.fault for result in report.results if result.verdict == FAIL]
    if failed:
        raise CheckFailedError(f"the job doesn't cope as it has to with {', '.join(failed)}")
    skipped = [result.fault for result in report.results if result.verdict == SKIPPED]
    if len(skipped) == len(report.results) or set(skipped) & set(asked_for):
        raise CheckFailedError(f"not done: {', '.join(skipped)}")
    return 0


def _show(report: Report) -> None:
    from hvdtrain.cli.tables import facts, show, table

    if report.results:
        headings = ["fault", "hit", "noticed", "limit", "recovered", "limit", "verdict"]
        rows = [_row(result) for result in report.results]
        show(table(headings, rows, right=headings[1:-1]), "", facts((r.fault, _words(r)) for r in report.results))


def _row(result: Result) -> list[str]:
    seen = result.seen
    return [
        result.fault,
        "" if seen is None else seen.host or ("" if seen.rank is None else f"rank {seen.rank}"),
        _seconds(seen.noticed_s) if seen else "",
        _seconds(result.max_notice_s, missing="") if seen else "",
        _seconds(seen.recovered_s) if seen else "",
        _seconds(result.max_recover_s, missing="") if seen else "",
        result.verdict,
    ]


def _seconds(value: float | None, *, missing: str = "never") -> str:
    return missing if value is None else f"{value:.1f} s"


def _words(result: Result) -> str:
    """What the run itself said, how it recovered, what was wrong, and what was changed for the drill."""
    seen = result.seen
    parts = list(result.reasons)
    if seen is not None:
        blame = seen.blame
        if blame is not None:
            who = "no rank" if blame.rank is None else f"rank {blame.rank}"
            parts.append(f"named: {f'{blame.host}, {who}' if seen.host else who}, {blame.kind}")
        parts += [part for part in (seen.summary, seen.recovery) if part]
    parts += [f"launched with {setting}" for setting in result.settings]
    return "; ".join(dict.fromkeys(parts))
