"""``hvdtrain ps``: the runs there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain.cli import options
from hvdtrain.errors import ExitStatus

if TYPE_CHECKING:
    from hvdtrain.supervise.runs import Sight

# Ended runs that are shown unasked.
_NEWEST = 5


@click.command()
@click.option("-a", "--all", "show_all", is_flag=True, help=f"All ended runs, not only the newest {_NEWEST}.")
@options.runs
@options.output_format
def command(show_all: bool, runs: Path, output_format: str) -> int:
    """List runs: the ones that live, then the newest that have ended.

    Exit status: 0, also where there is none; 2 there is no such folder.
    """
    from hvdtrain.supervise.runs import all_runs, look

    sights = [look(run) for run in all_runs(runs)]
    live = [sight for sight in sights if sight.is_live]
    ended = [sight for sight in sights if not sight.is_live]
    hidden = 0 if show_all else max(0, len(ended) - _NEWEST)
    shown = live + ended[: len(ended) - hidden]
    if output_format == "json":
        from hvdtrain.cli.tables import as_json

        click.echo(json.dumps([as_json(sight) for sight in shown]))
    elif shown:
        _show(shown)
    else:
        click.echo(f"there are no runs in {runs.absolute()}", err=True)
    if hidden:
        click.echo(f"{hidden} more ended {'run' if hidden == 1 else 'runs'}: --all shows them", err=True)
    return ExitStatus.DONE


def _show(sights: list[Sight]) -> None:
    from hvdtrain.cli.tables import show, table

    headings = ["name", "id", "state", "step", "throughput", "time left", "started", "host"]
    show(table(headings, [_row(sight) for sight in sights], right=["step", "throughput", "time left"]))


def _row(sight: Sight) -> list[str]:
    from hvdtrain.cli.tables import moment, progress, speed, time_left

    known = [sight.run.name, sight.run.id, sight.state]
    status = sight.status
    if status is None:
        return [*known, "", "", "", "", ""]
    running = status if sight.state == "running" else None
    return [
        *known,
        progress(status.step, status.steps),
        speed(running.samples_per_s) if running else "",
        time_left(running.eta_s) if running else "",
        moment(status.started),
        status.supervisor.host,
    ]
