"""``hvdtrain diagnose``: why a run failed."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from hvdtrain.errors import ExitStatus


@click.command()
@click.argument("path", metavar="PATH", default="-")
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--known", is_flag=True, help="List the failures that are known, and read nothing.")
def command(path: str, output_format: str, known: bool) -> int:
    """Say which rank failed first, why, and what to do.

    PATH is a run directory, any saved output of horovodrun or mpirun, or - for standard input.

    Exit status: 0 the cause is known, 1 it isn't (the most telling lines are shown), 2 PATH can't be read.
    """
    from hvdtrain.diagnosis.saved import read
    from hvdtrain.diagnosis.text import known as known_failures
    from hvdtrain.diagnosis.text import render

    if known:
        click.echo(known_failures())
        return ExitStatus.DONE
    saved = read(path)
    if output_format == "json":
        found = asdict(saved.diagnosis) if saved.diagnosis else None
        click.echo(json.dumps({"source": saved.source, "diagnosis": found, "lines": saved.telling}))
    else:
        click.echo(render(saved))
    return ExitStatus.DONE if saved.diagnosis and saved.diagnosis.cause else ExitStatus.CHECK_FAILED
