"""Checkpoints on disk: a folder is there whole or not at all, torn or altered ones are noticed, the newest are kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
_UNFINISHED = ".tmp-"
_UNFINISHED_PART = ".tmp"
_FAILED_PART = ".failed"
# Parts of a checkpoint come over a shared folder.
_LOOK_AGAIN_S = 0.02
_PART_PATIENCE_S = 600.0
_CHUNK = 2**20

Stamp = tuple[tuple[str, int, int], ...]


class Checkpoints:
    """The folder ``checkpoints/`` of a run. One thread at a time uses it, and rank 0 alone but for `write_part`.

    Args:
        folder: it is made when the first checkpoint is.
        keep: how many of the newest whole ones stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = self._folder = folder
        self._keep = keep
        # Those that were read as a whole, and how their files looked then: reading them all at each save is too slow.
        self._verified: dict[Path, Stamp] = {}

    def begin(self, step: int) -> None:
        """Make the folder that the parts of a step's checkpoint go into, and remove what a killed rank has left.

        Raises:
            HvdtrainError: it can't be made.
        """
        with _write_errors(step, self._folder):
            for path in self._folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(path)
            self._unfinished(step).mkdir(parents=True)

    def write_part(self, step: int, rank: int, save: Callable[[Path], None]) -> None:
        """Write one rank's part of a checkpoint that was begun, into a folder of its own.

        Args:
            step: number of steps done.
            rank: whose part.
            save: writes its files into the folder that it's given.

        Raises:
            HvdtrainError: it can't be written; whoever waits in `write` is told.
        """
        part = self._unfinished(step) / part_name(rank)
        try:
            with _write_errors(step, part):
                unfinished = part.with_name(f"{part.name}{_UNFINISHED_PART}")
                unfinished.mkdir()
                save(unfinished)
                unfinished.rename(part)
        except HvdtrainError as error:
            with contextlib.suppress(OSError):
                part.with_name(f"{part.name}{_FAILED_PART}").write_text(error.what)
            raise

    def write(self, step: int, state: dict[str, Any], save: Callable[[Path], None], parts: Sequence[int] = ()) -> Path:
        """Add the checkpoint of a step; remove those of later steps and those that ``keep`` newer whole ones follow.

        Returns its folder.

        Args:
            step: number of steps done.
            state: counters and whatever else a resumed run needs, as JSON (``state.json``).
            save: writes the framework's own files into the folder that it's given.
            parts: ranks that `write_part` after `begin`; their parts are waited for. Empty: ``save`` writes it all.

        Raises:
            HvdtrainError: it can't be written. Older checkpoints are untouched.
        """
        final = self._folder / contract.checkpoint_name(step)
        temporary = self._unfinished(step)
        try:
            if not parts:
                self.begin(step)
            with _write_errors(step, final):
                save(temporary)
                _wait_for_parts(temporary, parts)
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
        except HvdtrainError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _unfinished(self, step: int) -> Path:
        return self._folder / f"{_UNFINISHED}{contract.checkpoint_name(step)}"

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


def part_name(rank: int) -> str:
    """Folder of a rank's part in a checkpoint that several ranks have written."""
    return f"part-{rank:05d}"


def _wait_for_parts(folder: Path, parts: Sequence[int]) -> None:
    """Until all parts are there.

    Raises:
        OSError: a rank couldn't write its part, or nothing has come for a long time.
    """
    missing = [folder / part_name(rank) for rank in parts]
    since = time.monotonic()
    while missing:
        for part in missing:
            failed = part.with_name(f"{part.name}{_FAILED_PART}")
            if failed.exists():
                raise OSError(f"{part.name}: {failed.read_text()}")
        left = [part for part in missing if not part.exists()]
        if len(left) < len(missing):
            since = time.monotonic()
        elif time.monotonic() - since > _PART_PATIENCE_S:
            raise OSError(f"{left[0].name} didn't come for {_PART_PATIENCE_S:.0f} s")
        missing = left
        if missing:
            time.sleep(_LOOK_AGAIN_S)


@contextlib.contextmanager
def _write_errors(step: int, where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HvdtrainError(
            f"can't write the checkpoint of step {step}: {error.strerror or error}",
            where=str(where),
            fix="free some space, keep fewer (checkpoint.keep) or choose another folder with --runs DIRECTORY",
        ) from error


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
