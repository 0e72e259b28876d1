"""``hvdtrain diagnose``: why a run failed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from hvdtrain.cli import options
from hvdtrain.errors import ExitStatus


@click.command()
@options.run
@options.output_format
@click.option("--known", is_flag=True, help="List the failures that are known, and read nothing.")
def command(wanted: str | None, runs: Path, output_format: str, known: bool) -> int:
    """Say which rank failed first, why, and what to do.

    RUN is a job's name (its newest run), NAME/ID, the beginning of an ID, or a run directory; or any saved output of
    horovodrun or mpirun, or - for standard input. Default: the newest run.

    Exit status: 0 the cause is known, or the run has finished; 1 it isn't (the most telling lines are shown); 2 there
    is nothing to read.
    """
    from hvdtrain.diagnosis.saved import read
    from hvdtrain.diagnosis.text import known as known_failures
    from hvdtrain.diagnosis.text import render
    from hvdtrain.supervise.runs import find, look

    if known:
        click.echo(known_failures())
        return ExitStatus.DONE
    if wanted is not None and (wanted == "-" or Path(wanted).is_file()):
        saved = read(wanted)
    else:
        run = find(wanted, runs)
        saved = read(str(run.path))
        if look(run).state == "finished" and output_format == "text":
            click.echo(f"{run} has finished well" + ("; this was on its way:" if saved.diagnosis else ""))
            if saved.diagnosis is None:
                return ExitStatus.DONE
    if output_format == "json":
        found = asdict(saved.diagnosis) if saved.diagnosis else None
        click.echo(json.dumps({"source": saved.source, "diagnosis": found, "lines": saved.telling}))
    else:
        click.echo(render(saved))
    return ExitStatus.DONE if saved.diagnosis and saved.diagnosis.cause else ExitStatus.CHECK_FAILED
