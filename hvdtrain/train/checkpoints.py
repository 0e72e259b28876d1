"""Checkpoints on disk: a folder is there whole or not at all, and only the newest are kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError

STATE_FILE = "state.json"
_UNFINISHED = ".tmp-"


class Checkpoints:
    """The folder ``checkpoints/`` of a run. Rank 0 alone uses it.

    Args:
        folder: it is made when the first checkpoint is.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def write(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> Path:
        """Add the checkpoint of a step and remove the oldest beyond ``keep``. Returns its folder.

        Args:
            step: number of steps done.
            state: counters and whatever else a resumed run needs, as JSON (``state.json``).
            save: writes the framework's own files into the folder that it's given.

        Raises:
            HvdtrainError: it can't be written. Older checkpoints are untouched.
        """
        final = self._folder / contract.checkpoint_name(step)
        temporary = self._folder / f"{_UNFINISHED}{final.name}"
        try:
            self._remove_unfinished()
            temporary.mkdir(parents=True)
            save(temporary)
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
            for path in (*temporary.rglob("*"), temporary):
                _flush(path)
            self._discard(final)
            temporary.rename(final)
            _flush(self._folder)
            for old in self.all()[: -self._keep]:
                self._discard(old)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise HvdtrainError(
                f"can't write the checkpoint of step {step}: {error.strerror or error}",
                where=str(final),
                fix="free some space, keep fewer (checkpoint.keep) or choose another folder with --runs DIRECTORY",
            ) from error
        return final

    def all(self) -> list[Path]:
        """Folders of all whole checkpoints, the oldest first."""
        return sorted(path for path in self._folder.glob("step-*") if path.is_dir())

    def _discard(self, checkpoint: Path) -> None:
        """Remove a checkpoint; renamed first, so that a half-removed one is never taken for a whole one."""
        if checkpoint.exists():
            doomed = checkpoint.with_name(f"{_UNFINISHED}old-{checkpoint.name}")
            checkpoint.rename(doomed)
            shutil.rmtree(doomed)

    def _remove_unfinished(self) -> None:
        """What a rank that was killed in the middle of writing has left."""
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)


def _flush(path: Path) -> None:
    """Make a file or a folder's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
