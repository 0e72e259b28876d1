"""What a validation says while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing(_: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Progress:
    """Who is told.

    Attributes:
        tell: a sentence when something new begins.
        tick: how far it is, many times; the next replaces it.
    """

    tell: Callable[[str], None] = _nothing
    tick: Callable[[str], None] = _nothing


SILENT = Progress()
