"""Wheels that were built, kept under everything that they were compiled against."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORD_FILE = "build.json"
PROVED_FILE = "proved"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/hvdtrain/horovod``, or below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hvdtrain" / "horovod"


def log_file(key: str) -> Path:
    """Log of the newest build of an entry."""
    return cache_folder() / f"{key}.log"


def cache_key(record: dict[str, Any]) -> str:
    """The name of a build's entry: a hash of its record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:24]


@contextlib.contextmanager
def locked(key: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an entry's lock: of two builds of the same, one waits, says so, and then finds the wheel."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{key}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached_wheel(key: str) -> Path | None:
    """The wheel of an entry, or None."""
    return next((cache_folder() / key).glob("*.whl"), None)


def is_proved(key: str) -> bool:
    """Whether an entry's wheel has passed its proof."""
    return (cache_folder() / key / PROVED_FILE).is_file()


def mark_proved(key: str) -> None:
    """Note that an entry's wheel has passed its proof."""
    entry = cache_folder() / key
    entry.mkdir(exist_ok=True)
    (entry / PROVED_FILE).touch()


def store(key: str, wheel: Path, record: dict[str, Any]) -> Path:
    """Put a wheel into the cache in one step, in place of what was there. Returns its path there.

    The caller holds the entry's lock, so partial entries of this key are what a killed build left.
    """
    folder = cache_folder()
    for leftover in folder.glob(f".{key}-*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=folder))
    shutil.copy2(wheel, partial)
    (partial / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
    final = folder / key
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    return final / wheel.name
