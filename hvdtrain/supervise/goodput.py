"""How much of a run's time was of use: not lost to starts, failures, waiting and steps that were trained twice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Training:
    """The training of one attempt, from its first known step to its last: times in s, steps since the job's start."""

    begun: float
    first: int
    last_at: float
    last: int


class Goodput:
    """Useful time over all time, as the training that still counts at the end.

    The steps of an attempt that its successor doesn't go on from were lost, and their share of its time with them.
    """

    def __init__(self) -> None:
        self._begun: float | None = None
        self._trainings: list[_Training] = []
        self._current: _Training | None = None

    def begin(self, now: float) -> None:
        """An attempt begins."""
        self._begun = now if self._begun is None else self._begun
        self._current = None

    def step(self, now: float, step: int) -> None:
        """So many steps are done."""
        if self._current is None:
            if step:
                self._current = _Training(now, step, now, step)
        elif step > self._current.last:
            self._current.last_at, self._current.last = now, step

    def end(self, now: float) -> None:
        """The attempt has ended."""
        if self._current is not None:
            self._trainings.append(self._current)
        self._current = None

    def fraction(self, now: float) -> float | None:
        """Between 0 and 1; None where no step is known, as for a command without heartbeats."""
        if self._begun is None or not self._trainings:
            return None
        useful = 0.0
        for training, following in zip(self._trainings, [*self._trainings[1:], None], strict=True):
            kept_to = training.last if following is None else min(training.last, following.first)
            steps = training.last - training.first
            if steps:
                useful += (training.last_at - training.begun) * max(0, kept_to - training.first) / steps
        return useful / (now - self._begun)
