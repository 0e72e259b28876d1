"""``hvdtrain checkpoint``: a run's checkpoints, and the model out of one of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain import contract
from hvdtrain.cli import options
from hvdtrain.errors import ExitStatus, UsageError

if TYPE_CHECKING:
    from hvdtrain.train.export import Checkpoint


@click.group()
def command() -> None:
    """List a run's checkpoints, or take the model out of one."""


@command.command()
@options.run
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    callback=options.expanded,
    help="The file to write; of a Keras model its name ends with .keras.",
)
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="Of this step. Default: the newest whole one.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def export(wanted: str | None, runs: Path, output: Path, step: int | None, force: bool) -> int:
    """Write the model of a checkpoint of RUN as one file that loads without hvdtrain.

    A PyTorch model becomes a state dict, put together from the parts of all ranks; a Keras model becomes a .keras file.
    RUN is a job's name (its newest run), NAME/ID, the beginning of an ID, or a run directory; or a checkpoint's folder.
    Default: the newest run.

    Exit status: 0; 1 the checkpoint is damaged; 2 there is no such run or checkpoint, or no such file can be made of
    it; 3 the file can't be written; 130 Ctrl-C.
    """
    from hvdtrain.supervise.runs import find
    from hvdtrain.train.export import choose, is_checkpoint, require_whole, require_writable
    from hvdtrain.train.export import export as write

    options.end_tidily()
    require_writable(output, force=force)
    if wanted and is_checkpoint(Path(wanted)):
        checkpoint = Path(wanted)
        if step is not None:
            raise UsageError(f"--step {step} chooses among a run's checkpoints, and this is one", where=wanted)
        require_whole(checkpoint)
    else:
        folder = find(wanted, runs).path / contract.CHECKPOINTS
        checkpoint = choose(folder, step, lambda text: click.echo(f"warning: {text}", err=True))
    written = write(checkpoint, output)
    click.echo(f"{output}: {written}, {_size(output.stat().st_size)}, from {checkpoint}")
    return ExitStatus.DONE


@command.command("list")
@options.run
@options.output_format
def list_(wanted: str | None, runs: Path, output_format: str) -> int:
    """List the checkpoints of RUN, the oldest first, and say which are whole. Reads all their files.

    RUN is a job's name (its newest run), NAME/ID, the beginning of an ID, or a run directory. Default: the newest run.

    Exit status: 0, also where there is none or one is damaged; 2 there is no such run.
    """
    from hvdtrain.supervise.runs import find
    from hvdtrain.train.export import checkpoints_of

    run = find(wanted, runs)
    found = checkpoints_of(run.path / contract.CHECKPOINTS)
    if output_format == "json":
        click.echo(json.dumps([asdict(each) | {"folder": str(each.folder)} for each in found]))
    elif found:
        from hvdtrain.cli.tables import show, table

        headings = ["step", "epochs", "saved", "size", "parts", "files"]
        show(table(headings, [_row(each) for each in found], right=["step", "epochs", "size", "parts"]))
    else:
        click.echo(f"{run} has no checkpoints", err=True)
    return ExitStatus.DONE


def _row(each: Checkpoint) -> list[str]:
    from hvdtrain.cli.tables import moment

    return [
        f"{each.step:,}",
        "" if each.epochs is None else f"{each.epochs:.2f}",
        moment(each.saved),
        _size(each.bytes),
        str(each.parts),
        f"damaged: {each.fault}" if each.fault else "whole",
    ]


def _size(count: int) -> str:
    """Bytes in decimal units, as disks are sold."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
