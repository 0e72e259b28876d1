"""Taking a model out of a run's checkpoints: which there are, and one of them as a file that needs no hvdtrain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import CheckFailedError, HvdtrainError, StartError, UsageError
from hvdtrain.train.checkpoints import MANIFEST_FILE, STATE_FILE, Checkpoints, fault_of

# As in `hvdtrain.train.keras.backend`, which can't be imported without TensorFlow.
KERAS_FILE = "model.keras"
_NAME = re.compile(r"step-(\d{10})")
_LIST = "'hvdtrain checkpoint list' shows which are whole, and --step takes one of them"


@dataclass(frozen=True)
class Checkpoint:
    """What can be seen of a checkpoint.

    Attributes:
        folder: where it is.
        step: number of steps done.
        epochs: passes over the training data done; None where that can't be read.
        saved: when it was whole, in Unix seconds.
        bytes: of all its files.
        parts: how many ranks have written it, as its manifest says.
        fault: what is wrong with it; None: it is whole.
    """

    folder: Path
    step: int
    epochs: float | None
    saved: float
    bytes: int
    parts: int
    fault: str | None


def checkpoints_of(folder: Path) -> list[Checkpoint]:
    """All checkpoints of a run, the oldest first. Reads every file, to tell the whole ones.

    Args:
        folder: the run's ``checkpoints/``; it needn't be there.
    """
    found = []
    for step, path in _by_step(folder).items():
        # A run that lives removes its oldest one at any time.
        with contextlib.suppress(FileNotFoundError):
            found.append(_look(step, path))
    return found


def _by_step(folder: Path) -> dict[int, Path]:
    """Checkpoints whole or not, the oldest first; copies that somebody has made beside them are none."""
    named = [(_NAME.fullmatch(path.name), path) for path in Checkpoints(folder, keep=1).all()]
    return {int(match[1]): path for match, path in named if match}


def _look(step: int, folder: Path) -> Checkpoint:
    fault = _fault(folder)
    last = folder / MANIFEST_FILE
    return Checkpoint(
        folder=folder,
        step=step,
        epochs=_epochs(folder),
        saved=(last if last.is_file() else folder).stat().st_mtime,
        bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        parts=_parts(folder),
        fault=fault,
    )


def _fault(folder: Path) -> str | None:
    try:
        return fault_of(folder)
    except OSError as error:
        return f"it can't be read ({error.strerror})"


def _epochs(folder: Path) -> float | None:
    try:
        state = json.loads((folder / STATE_FILE).read_text())
        return float(state["epoch"] + state["epoch_samples"] / state["train_samples"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def _parts(folder: Path) -> int:
    """Number of ranks' parts, those that are lost too; 1 where rank 0 has written everything."""
    names = {path.name for path in folder.iterdir()}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        names |= {name.partition("/")[0] for name in json.loads((folder / MANIFEST_FILE).read_text())["files"]}
    return sum(name.startswith("part-") for name in names) or 1


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, be it damaged, and not a run."""
    files = (path / MANIFEST_FILE, path / STATE_FILE)
    return path.is_dir() and (any(file.is_file() for file in files) or bool(_NAME.fullmatch(path.name)))


def choose(folder: Path, step: int | None, tell: Callable[[str], None]) -> Path:
    """The folder of a run's newest whole checkpoint, or of that of a step.

    Args:
        folder: the run's ``checkpoints/``.
        step: which; None: the newest whole one.
        tell: is given a sentence for each newer one that is damaged.

    Raises:
        UsageError: there is none.
        CheckFailedError: it is damaged, or all are.
    """
    there = _by_step(folder)
    if not there:
        raise UsageError(
            "the run has no checkpoint",
            where=str(folder),
            fix="a task writes its first after checkpoint.every_steps steps, on the host of rank 0; "
            "what a command saves is where it has put it",
        )
    if step is None:
        if newest := Checkpoints(folder, keep=1).newest_whole(tell):
            return newest
        raise CheckFailedError(
            "no checkpoint is whole", where=str(folder), fix="'hvdtrain checkpoint list' says what is wrong with each"
        )
    if step not in there:
        steps = ", ".join(map(str, there))
        raise UsageError(f"there is no checkpoint of step {step}", where=str(folder), fix=f"choose one of {steps}")
    require_whole(there[step])
    return there[step]


def require_whole(checkpoint: Path) -> None:
    """Read all files of a checkpoint and compare them with its manifest.

    Raises:
        CheckFailedError: it is damaged.
    """
    if fault := _fault(checkpoint):
        raise CheckFailedError(f"the checkpoint is damaged: {fault}", where=str(checkpoint), fix=_LIST)


def require_writable(output: Path, *, force: bool) -> None:
    """Before anything is read: whether the file may be written.

    Raises:
        UsageError: it is there, or its folder isn't.
    """
    if output.is_dir():
        raise UsageError("this is a folder", where=str(output), fix="add the file's name")
    if not output.parent.is_dir():
        raise UsageError("the folder of the output doesn't exist", where=str(output.parent), fix="make it first")
    if output.exists() and not force:
        raise UsageError("the file is there already", where=str(output), fix="name another one, or add --force")


def export(checkpoint: Path, output: Path) -> str:
    """Write the model of a checkpoint as one ordinary file, which is there whole or not at all.

    PyTorch: a state dict, name to tensor, put together from all ranks' parts. Keras: the model with its optimizer.

    Args:
        checkpoint: its folder; it is whole.
        output: the file; one that is there is replaced.

    Returns:
        What was written, in a few words.

    Raises:
        UsageError: the name doesn't fit what is in it.
        StartError: it can't be written, or PyTorch or Horovod isn't installed here.
        HvdtrainError: the checkpoint was removed meanwhile.
    """
    is_keras = (checkpoint / KERAS_FILE).is_file()
    if is_keras != (output.suffix == ".keras"):
        kind, suffix = ("Keras", "ends with .keras") if is_keras else ("PyTorch", "doesn't end with .keras")
        raise UsageError(
            f"the checkpoint is of a {kind} model, whose file {suffix}", where=str(output), fix="change --output"
        )
    try:
        return (_export_keras if is_keras else _export_torch)(checkpoint, output)
    except FileNotFoundError as error:
        raise HvdtrainError(
            f"the checkpoint was removed while it was read: {error.filename} is gone",
            where=str(checkpoint),
            fix="try again; checkpoint.keep says how many a run keeps",
        ) from error


def _export_keras(checkpoint: Path, output: Path) -> str:
    with (checkpoint / KERAS_FILE).open("rb") as source, _new_file(output) as path, path.open("wb") as file:
        shutil.copyfileobj(source, file)
    return "Keras model"


def _export_torch(checkpoint: Path, output: Path) -> str:
    try:
        from hvdtrain.train.torch import files
        from hvdtrain.train.torch.parts import Saved
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "horovod"):
            raise
        raise StartError(
            f"there is no module '{error.name}' here",
            where=sys.executable,
            fix="run 'python -m hvdtrain checkpoint export' with the job's Python",
        ) from error
    state = Saved(checkpoint).state_dict()
    with _new_file(output) as path:
        files.save(state, path)
    return f"PyTorch state dict of {len(state)} tensors"


@contextlib.contextmanager
def _new_file(output: Path) -> Iterator[Path]:
    """A path to write to, which gets its true name at the end; if anything fails, nothing is left.

    Raises:
        StartError: it can't be written.
    """
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(output)
    except OSError as error:
        raise StartError(
            f"can't write the file: {error.strerror or error}",
            where=str(output),
            fix="free some space there, or choose another folder with --output",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
