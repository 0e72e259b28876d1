"""Keeps secrets out of logs, records and the terminal, also where the job itself prints one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

MASK = "***"
# A shorter value would be found in words that have nothing to do with it.
_SHORTEST = 4


def masker(values: Iterable[str]) -> Callable[[str], str]:
    """Returns what replaces the values in a line; of a value with several lines, each of its lines."""
    parts = {part for value in values for part in value.splitlines() if len(part) >= _SHORTEST}
    if not parts:
        return lambda line: line
    # The longest first: one secret may contain another.
    pattern = re.compile("|".join(re.escape(part) for part in sorted(parts, key=len, reverse=True)))
    return lambda line: pattern.sub(MASK, line)
