"""``hvdtrain status``: where a run stands."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain.cli import options
from hvdtrain.errors import ExitStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hvdtrain.supervise.records import RankStatus, Status
    from hvdtrain.supervise.runs import Run, Sight

_WATCH_S = 1.0


@click.command()
@options.run
@options.output_format
@click.option("--watch", is_flag=True, help="Show it again every second until the run has ended.")
def command(wanted: str | None, runs: Path, output_format: str, watch: bool) -> int:
    """Show where RUN stands, and each of its ranks.

    RUN is a job's name (its newest run), NAME/ID, the beginning of an ID, or a run directory. Default: the newest run.

    Exit status: 0, whatever the run's state; 2 there is no such run, or its status can't be read.
    """
    from hvdtrain.supervise.runs import find

    if watch and output_format == "json":
        raise click.UsageError("--watch is for people: it doesn't go with --format json")
    run = find(wanted, runs)
    if watch:
        _watch(run)
        return ExitStatus.DONE
    sight = _look(run)
    if output_format == "json":
        from hvdtrain.cli.tables import as_json

        click.echo(json.dumps(as_json(sight)))
    else:
        from hvdtrain.cli.tables import show

        show(*_render(sight))
    return ExitStatus.DONE


def _look(run: Run) -> Sight:
    """Where it stands; what can't be read is an error here, where somebody asks for just this run."""
    from hvdtrain.supervise.runs import UNKNOWN, look, read_status

    sight = look(run)
    if sight.state == UNKNOWN:
        read_status(run)
    return sight


def _watch(run: Run) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    sight = _look(run)
    with Live(Group(*_render(sight)), console=Console(highlight=False), auto_refresh=False) as screen:
        while sight.is_live:
            time.sleep(_WATCH_S)
            sight = _look(run)
            screen.update(Group(*_render(sight)), refresh=True)


def _render(sight: Sight) -> list[RenderableType]:
    from rich.text import Text

    from hvdtrain.cli.tables import facts, state_text, table

    title = Text.assemble((str(sight.run), "bold"), "  ", state_text(sight.state))
    if sight.note:
        title.append(f": {sight.note}")
    if sight.status is None:
        return [title, facts([("directory", str(sight.run.path.absolute()))])]
    headings = ["rank", "host", "pid", "state", "step", "doing", "last heartbeat", "slower by"]
    rows = [_rank_row(sight, rank) for rank in sight.status.ranks]
    ranks = table(headings, rows, right=["rank", "pid", "step", "last heartbeat", "slower by"])
    return [title, facts(_facts(sight, sight.status)), Text(), ranks]


def _facts(sight: Sight, status: Status) -> list[tuple[str, str]]:
    from hvdtrain.cli.tables import duration, moment, progress, speed, time_left

    running = sight.state == "running"
    supervisor = status.supervisor
    lasted = duration((status.ended or (time.time() if sight.is_live else status.updated)) - status.started)
    step = progress(status.step, status.steps)
    if status.steps:
        step += f" ({100 * status.step / status.steps:.0f}%)"
    if status.epoch:
        step += f", epoch {status.epoch}"
    return [
        ("summary", status.summary),
        ("exit status", "" if status.exit_status is None else str(status.exit_status)),
        ("attempt", f"{status.attempt} (the first is 0)" if status.attempt else ""),
        ("step", step),
        ("throughput", speed(status.samples_per_s) if running else ""),
        ("time left", time_left(status.eta_s) if running else ""),
        ("started", f"{moment(status.started)}, {f'{lasted} ago' if sight.is_live else f'ran for {lasted}'}"),
        ("supervisor", f"process {supervisor.pid} on {supervisor.host}, controller {status.controller}"),
        ("directory", str(sight.run.path.absolute())),
    ]


def _rank_row(sight: Sight, rank: RankStatus) -> list[str]:
    from hvdtrain.cli.tables import duration, progress

    alive = sight.is_live and rank.state in ("running", "hung")
    state = f"{rank.state} ({rank.exit_code})" if rank.exit_code else rank.state
    if not sight.is_live and rank.state == "starting":
        state = "not started"
    return [
        str(rank.rank),
        rank.host,
        "" if rank.pid is None else str(rank.pid),
        f"was {state}" if sight.state == "lost" and rank.state in ("running", "hung") else state,
        progress(rank.step, None),
        rank.activity if alive else "",
        f"{duration(time.time() - rank.heartbeat)} ago" if rank.heartbeat and alive else "",
        f"{rank.lag_s:.2f} s" if rank.lag_s is not None and alive else "",
    ]
