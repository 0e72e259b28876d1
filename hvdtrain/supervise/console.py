"""What the person at the terminal sees: whole lines, each with its rank."""

from __future__ import annotations

import os
import sys
from typing import TextIO

import click

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


def rank_prefix(rank: int, width: int) -> str:
    """How a rank's lines begin. ``width``: digits of the highest rank."""
    return click.style(f"[{rank:>{width}}]", fg=_COLOURS[rank % len(_COLOURS)])


class Console:
    """Writes ranks' lines to the stream that they came from, and the launcher's own messages to standard error."""

    def __init__(self, size: int) -> None:
        self._width = len(str(size - 1))
        self._gone: set[TextIO] = set()

    def rank_line(self, rank: int, line: str, *, error: bool) -> None:
        """One whole line of a rank."""
        self._write(sys.stderr if error else sys.stdout, f"{rank_prefix(rank, self._width)} {line}")

    def message(self, text: str) -> None:
        """Something that the launcher itself has to say."""
        self._write(sys.stderr, f"{click.style('hvdtrain', bold=True)}: {text}")

    def _write(self, stream: TextIO, text: str) -> None:
        if stream in self._gone:
            return
        try:
            # click drops colours where the stream is no terminal, and flushes, so that the streams keep their order.
            click.echo(text, file=stream)
        except OSError:
            # `hvdtrain launch … | head`, a closed terminal, a full disk: the reader has left, but the job has not; its
            # logs are in files.
            self._gone.add(stream)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
