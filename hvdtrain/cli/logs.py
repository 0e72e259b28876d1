"""``hvdtrain logs``: what a run's ranks have written."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hvdtrain.cli import options
from hvdtrain.errors import ExitStatus


@click.command()
@options.run
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--rank", "ranks", metavar="N", type=click.IntRange(min=0), multiple=True, help="Only this rank's lines.")
@click.option(
    "--attempt", metavar="N", type=click.IntRange(min=0), help="Of this start of the job. Default: the newest."
)
@click.option(
    "-n", "--lines", "last", metavar="N", type=click.IntRange(min=0), help="Only the last lines of each rank."
)
@click.option("--launcher", is_flag=True, help="horovodrun's own words in place of the ranks'.")
@options.output_format
def command(
    wanted: str | None,
    runs: Path,
    follow: bool,
    ranks: tuple[int, ...],
    attempt: int | None,
    last: int | None,
    launcher: bool,
    output_format: str,
) -> int:
    """Show what the ranks of RUN have written, rank after rank, each line with its rank; of a single --rank without.

    RUN is a job's name (its newest run), NAME/ID, the beginning of an ID, or a run directory. Default: the newest run.
    Attempts count from 0. With --format json each line is an object with rank, attempt and line.

    Exit status: 0; 2 there is no such run, attempt or log; 130 Ctrl-C.
    """
    from hvdtrain.supervise.console import rank_prefix
    from hvdtrain.supervise.follow import Choice, lines
    from hvdtrain.supervise.runs import LOST, find, look

    if launcher and ranks:
        raise click.UsageError("--launcher shows horovodrun's words: it doesn't go with --rank")
    run = find(wanted, runs)
    before = look(run)
    size = len(before.status.ranks) if before.status else max(ranks, default=0) + 1
    if before.status and max(ranks, default=0) >= size:
        raise click.BadParameter(f"the run has ranks 0 to {size - 1}", param_hint="--rank")
    bare, width = launcher or len(set(ranks)) == 1, len(str(size - 1))
    for line in lines(run, Choice(ranks, attempt, last, launcher), follow=follow):
        if output_format == "json":
            click.echo(json.dumps({"rank": line.rank, "attempt": line.attempt, "line": line.text}))
        else:
            click.echo(line.text if bare else f"{rank_prefix(line.rank or 0, width)} {line.text}")
    if follow and (after := look(run)).state == LOST:
        click.echo(f"{run} is lost: {after.note}", err=True)
    return ExitStatus.DONE
