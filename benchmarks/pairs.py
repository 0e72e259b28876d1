"""Two ways of doing the same, measured in turns, so that what disturbs the machine disturbs both."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Medians of both, and the median of the differences within pairs; seconds."""

    base: float
    ours: float
    difference: float
    pairs: int

    @property
    def percent(self) -> float:
        """The median difference in percent of the base."""
        return 100 * self.difference / self.base


def compare(base: Callable[[], float], ours: Callable[[], float], pairs: int) -> Comparison:
    """Run both ``pairs`` times, the first of each pair changing every time. Each returns seconds."""
    measured = []
    for pair in range(pairs):
        if pair % 2:
            second, first = ours(), base()
            measured.append((first, second))
        else:
            measured.append((base(), ours()))
    return summarize(measured)


def summarize(measured: list[tuple[float, float]]) -> Comparison:
    """From ``(base, ours)`` pairs to medians."""
    return Comparison(
        base=statistics.median(base for base, _ in measured),
        ours=statistics.median(ours for _, ours in measured),
        difference=statistics.median(ours - base for base, ours in measured),
        pairs=len(measured),
    )
