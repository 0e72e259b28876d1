"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdtrain.train.options import Options

_SCALES = {"none": lambda size: 1.0, "linear": float, "sqrt": math.sqrt}


@dataclass(frozen=True)
class Schedule:
    """Warm-up to ``peak``, then constant or a cosine down to zero.

    Attributes:
        start: rate before the first step of the warm-up.
        peak: rate after it.
        warmup_steps: its length.
        total_steps: of the whole run.
        decay: ``none`` or ``cosine``.
    """

    start: float
    peak: float
    warmup_steps: int
    total_steps: int
    decay: str

    @classmethod
    def of(cls, options: Options, *, size: int, steps_per_epoch: int) -> Schedule:
        """The schedule that the options ask for with ``size`` workers."""
        peak = options.lr * _SCALES[options.lr_scaling](size)
        return cls(
            start=options.lr if peak > options.lr else 0.0,
            peak=peak,
            warmup_steps=round(options.warmup_epochs * steps_per_epoch),
            total_steps=options.epochs * steps_per_epoch,
            decay=options.lr_decay,
        )

    def at(self, step: int) -> float:
        """Rate of a step; steps count from 0."""
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * (step + 1) / self.warmup_steps
        if self.decay == "none":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.peak * 0.5 * (1 + math.cos(math.pi * done))
