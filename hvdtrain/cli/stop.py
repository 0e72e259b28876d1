"""``hvdtrain stop``: end a run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hvdtrain.cli import options
from hvdtrain.errors import ExitStatus


@click.command()
@options.run
@click.option("--kill", is_flag=True, help="Don't let the ranks save their state: as a second Ctrl-C.")
@click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(min=0), help="Wait only so long. Default: on."
)
@options.output_format
def command(wanted: str | None, runs: Path, kill: bool, timeout_s: float | None, output_format: str) -> int:
    """End RUN as Ctrl-C at its terminal does, and wait until nothing of it is left.

    RUN is a job's name (its newest run), NAME/ID, the beginning of an ID, or a run directory. Default: the newest run.

    Exit status: 0 it has ended, now or before; 1 not within the time; 2 there is no such run, or it is on another host.
    """
    from hvdtrain.supervise.runs import LOST, find, look
    from hvdtrain.supervise.stop import stop

    run = find(wanted, runs)
    was_live = look(run).is_live
    sight = stop(run, kill=kill, timeout_s=timeout_s, tell=lambda text: click.echo(text, err=True))
    if output_format == "json":
        from hvdtrain.cli.tables import as_json

        click.echo(json.dumps(as_json(sight)))
    elif sight.state == LOST:
        click.echo(f"{run} is lost, there is nothing to stop: {sight.note}")
    else:
        status = f", exit status {sight.status.exit_status}" if sight.status else ""
        click.echo(f"{run} {'has ended' if was_live else 'had ended before'}: {sight.state}{status}")
    return ExitStatus.DONE
