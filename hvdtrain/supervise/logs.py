"""Log files of a run, which must not end a job when their disk is full."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class LogFile:
    """A log that is on disk line by line.

    Args:
        path: the file; lines are added to what is there.
        on_error: told of each line that can't be written, and why.
    """

    def __init__(self, path: Path, on_error: Callable[[OSError], None]) -> None:
        self._on_error = on_error
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            on_error(error)

    def write(self, line: str) -> None:
        """Add a line."""
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, line.encode(errors="replace") + b"\n")
        except OSError as error:
            self._on_error(error)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
