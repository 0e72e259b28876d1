"""Whether to compress, by trial in a job's first steps."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.compression import BFloat16, Nothing, Plain, Reducer, Reduction

# fp16 is no candidate: it moves the bytes that bf16 does, and gradients beyond its range would become infinite.
_CANDIDATES = ("none", "bf16")
_ROUNDS = 6  # of one step with each candidate; the first isn't counted: Horovod agrees on the names, memory is fetched
_TRIAL_STEPS = _ROUNDS * len(_CANDIDATES)
# Rounding has to be worth it, and times of equal ways differ by some percent.
_CLEARLY = 0.9


class Auto:
    """``auto``: bf16 where it's clearly faster than none, found out for each group in its first steps.

    What counts is a step's time from the start of its first bucket to the end of its last, the median over five steps
    for each kind, taken in turn, and the mean over the group's ranks. A later attempt of the job measures anew.
    """

    def __init__(self) -> None:
        self._trials: dict[str, _Trial] = {}

    @property
    def chosen(self) -> dict[str, str]:
        """The kind, by the group's name; a group that is still on trial isn't in it."""
        return {name: trial.chosen for name, trial in self._trials.items() if trial.chosen}

    @property
    def why(self) -> dict[str, str]:
        """One line for a log on each choice, by the group's name."""
        return {name: trial.why for name, trial in self._trials.items() if trial.chosen}

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """As `Reducer.start`."""
        if group.size == 1 or bucket.numel() == 0:
            return Nothing()
        trial = self._trials.setdefault(group.name, _Trial(group))
        step, kind = trial.next(name)
        reducer = trial.reducers[kind]
        if step >= _TRIAL_STEPS:
            return reducer.start(bucket, group, name)
        trial.begins(step)
        return _Timed(reducer.start(bucket, group, name), lambda: trial.ends(step))


class _Trial:
    """One group's trial: which kind each bucket takes, and what that told.

    A bucket's step is how often its name was used, so that all ranks take the same kind for it, in whatever order
    buckets start. The choice is begun in the step after the trial, and taken in the step after that one: by then each
    rank has begun it, and none waits for a rank that waits for another group.
    """

    def __init__(self, group: Group) -> None:
        self.chosen = self.why = ""
        self.reducers: dict[str, Reducer] = {"none": Plain(), "bf16": BFloat16()}
        self._group = group
        self._uses: Counter[str] = Counter()
        self._begun: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._times: Any = None

    def next(self, name: str) -> tuple[int, str]:
        """Number of this bucket's step, from 0, and the kind for it."""
        step = self._uses[name]
        self._uses[name] += 1
        if step < _TRIAL_STEPS:
            return step, _CANDIDATES[step % len(_CANDIDATES)]
        if self._times is None:
            self._times = self._sum_of_times()
        if step == _TRIAL_STEPS:
            return step, _CANDIDATES[0]
        if not self.chosen:
            self._choose(*(hvd.synchronize(self._times) / self._group.size).tolist())
        return step, self.chosen

    def begins(self, step: int) -> None:
        """A bucket of this step starts."""
        self._begun.setdefault(step, time.perf_counter())

    def ends(self, step: int) -> None:
        """A bucket of this step is finished."""
        self._ended[step] = time.perf_counter()

    def _sum_of_times(self) -> Any:
        took = defaultdict[int, list[float]](list)
        for step in range(len(_CANDIDATES), _TRIAL_STEPS):
            if step in self._ended:
                took[step % len(_CANDIDATES)].append(self._ended[step] - self._begun[step])
        medians = torch.tensor([median(took[number]) for number in range(len(_CANDIDATES))], dtype=torch.float64)
        name = f"hvdtrain.compression.{self._group.name}"
        return hvd.allreduce_async_(medians, op=hvd.Sum, name=name, process_set=self._group.process_set)

    def _choose(self, none_s: float, bf16_s: float) -> None:
        self.chosen = "bf16" if bf16_s < _CLEARLY * none_s else "none"
        self.why = (
            f"compression: {self.chosen}; gradients take {none_s:.3g} s per step as they are, {bf16_s:.3g} s as bf16"
        )
        # The other's memory is as large as the gradients.
        self.reducers = {self.chosen: self.reducers[self.chosen]}


class _Timed:
    """A reduction that says when it is finished."""

    def __init__(self, reduction: Reduction, ends: Callable[[], None]) -> None:
        self.proceed = reduction.proceed
        self._reduction, self._ends = reduction, ends

    def finish(self) -> None:
        """As `Reduction.finish`."""
        self._reduction.finish()
        self._ends()
