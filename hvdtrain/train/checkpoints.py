"""Checkpoints on disk: a folder is there whole or not at all, torn or altered ones are noticed, the newest are kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
_UNFINISHED = ".tmp-"
_CHUNK = 2**20

Stamp = tuple[tuple[str, int, int], ...]


class Checkpoints:
    """The folder ``checkpoints/`` of a run. Rank 0 alone uses it, one thread at a time.

    Args:
        folder: it is made when the first checkpoint is.
        keep: how many of the newest whole ones stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        # Those that were read as a whole, and how their files looked then: reading them all at each save is too slow.
        self._verified: dict[Path, Stamp] = {}

    def write(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> Path:
        """Add the checkpoint of a step; remove those of later steps and those that ``keep`` newer whole ones follow.

        Returns its folder.

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
            # The manifest is the last file: without it a folder counts for nothing.
            (temporary / MANIFEST_FILE).write_text(json.dumps(_manifest(temporary), indent=2) + "\n")
            for path in (*temporary.rglob("*"), temporary):
                _flush(path)
            self._discard(final)
            temporary.rename(final)
            _flush(self._folder)
            self._verified[final] = _stamp(final)
            self._remove_old(final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise HvdtrainError(
                f"can't write the checkpoint of step {step}: {error.strerror or error}",
                where=str(final),
                fix="free some space, keep fewer (checkpoint.keep) or choose another folder with --runs DIRECTORY",
            ) from error
        return final

    def all(self) -> list[Path]:
        """Folders of all checkpoints, whole or not, the oldest first."""
        return sorted(path for path in self._folder.glob("step-*") if path.is_dir())

    def newest_whole(self, tell: Callable[[str], None]) -> Path | None:
        """The newest checkpoint whose files are all as they were written; None where there is none.

        Args:
            tell: is given a sentence for each newer one that was passed over.
        """
        for checkpoint in reversed(self.all()):
            fault = self._fault(checkpoint)
            if fault is None:
                return checkpoint
            tell(f"checkpoint {checkpoint.name} is passed over: {fault}")
        return None

    def _fault(self, checkpoint: Path) -> str | None:
        """What is wrong with a checkpoint. Reads its files, unless it did so before and they haven't changed since."""
        try:
            stamp = _stamp(checkpoint)
            if self._verified.get(checkpoint) == stamp:
                return None
            fault = fault_of(checkpoint)
        except OSError as error:
            return f"it can't be read ({error.strerror})"
        if fault is None:
            self._verified[checkpoint] = stamp
        return fault

    def _remove_old(self, newest: Path) -> None:
        """Keep the newest whole ones.

        A damaged one doesn't count, so that it never pushes out a whole one. One of a later step was passed over when
        the run was resumed, and the run has gone another way since.
        """
        whole = 0
        for checkpoint in reversed(self.all()):
            if whole >= self._keep or checkpoint.name > newest.name:
                self._discard(checkpoint)
            elif self._fault(checkpoint) is None:
                whole += 1

    def _discard(self, checkpoint: Path) -> None:
        """Remove a checkpoint; renamed first, so that a half-removed one is never taken for a whole one."""
        self._verified.pop(checkpoint, None)
        if checkpoint.exists():
            doomed = checkpoint.with_name(f"{_UNFINISHED}old-{checkpoint.name}")
            checkpoint.rename(doomed)
            shutil.rmtree(doomed)

    def _remove_unfinished(self) -> None:
        """What a rank that was killed in the middle of writing has left."""
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)


def fault_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's folder, by its manifest; None where it is whole. Reads every file.

    Raises:
        OSError: a file can't be read.
    """
    try:
        files = json.loads((checkpoint / MANIFEST_FILE).read_text())["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST_FILE}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST_FILE} can't be read"
    if STATE_FILE not in expected:
        return f"its {MANIFEST_FILE} has no {STATE_FILE}"
    for name, (size, digest) in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes, not {size:,}"
        if _sha256(path) != digest:
            return f"{name} isn't what was written (SHA-256 differs)"
    return None


def _manifest(folder: Path) -> dict[str, Any]:
    return {
        "files": {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    }


def _stamp(folder: Path) -> Stamp:
    """Names, sizes and times of change: what differs once a file was written to."""
    found = [(path, path.stat()) for path in sorted(folder.rglob("*"))]
    return tuple((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns) for path, status in found)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Make a file or a folder's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
