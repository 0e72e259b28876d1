"""Reading the kernel's small files, where what can't be read is None."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_LIMIT_BYTES = 4 << 20
# The kernel refuses to read its settings (/proc/sys) into a buffer of megabytes.
_PIECE_BYTES = 64 << 10


def text(path: Path) -> str | None:
    """What a file says, without white space at its ends; None if it can't be read."""
    try:
        with path.open("rb", buffering=0) as file:
            pieces, size = [], 0
            while size < _LIMIT_BYTES and (piece := file.read(_PIECE_BYTES)):
                pieces.append(piece)
                size += len(piece)
    except OSError:
        return None
    return b"".join(pieces).decode("utf-8", "replace").strip()


def integer(path: Path) -> int | None:
    """The number that a file holds; None if it holds none."""
    return to_integer(text(path))


def to_integer(words: str | None) -> int | None:
    """The number that a text is; None if it is none."""
    try:
        return int(words) if words else None
    except ValueError:
        return None


def to_float(words: str | None) -> float | None:
    """The number that a text is; None if it is none."""
    try:
        return float(words) if words else None
    except ValueError:
        return None


def which(program: str) -> str | None:
    """Path of a program, as a shell would find it; `shutil` does the same and takes milliseconds to load."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, program)  # noqa: PTH118
        if os.access(path, os.X_OK) and os.path.isfile(path):  # noqa: PTH113
            return path
    return None


def output(argv: list[str], timeout_s: float) -> tuple[str | None, str | None]:
    """What a program prints, and None; or None and why there is nothing. It never takes longer than its time."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        return None, f"there is no {argv[0]}"
    except subprocess.TimeoutExpired:
        return None, f"{argv[0]} did not answer within {timeout_s:g} s"
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    said = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode:
        complaint = done.stderr.decode("utf-8", "replace").strip() or said
        return None, (complaint or f"{argv[0]} ended with status {done.returncode}")[:1000]
    return said, None
