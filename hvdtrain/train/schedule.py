"""The learning rate of each step."""

from __future__ import annotations

import math

from hvdtrain.train.options import Options


def scaled_rate(options: Options, size: int) -> float:
    """The rate for ``size`` workers: `Options.lr` times 1, ``size`` or its square root.

    Linear: Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.1.
    """
    factor = {"none": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[options.lr_scaling]
    return options.lr * factor


class Schedule:
    """Warm-up to the scaled rate, then decay.

    A warm-up to a scaled rate starts at the unscaled one (Goyal et al., section 2.2), any other at 0. The cosine is
    that of Loshchilov and Hutter, "SGDR" (2017), without restarts.
    """

    def __init__(self, options: Options, *, size: int, steps_per_epoch: int) -> None:
        self._peak = scaled_rate(options, size)
        self._first = 0.0 if options.lr_scaling == "none" else options.lr
        self._warmup_steps = round(options.warmup_epochs * steps_per_epoch)
        self._decay_steps = options.epochs * steps_per_epoch - self._warmup_steps
        self._decay = options.lr_decay

    def __call__(self, step: float) -> float:
        """The rate of a step, counted from 0 over the whole training.

        A step between two whole numbers is one of a training that has gone on with another number of ranks.
        """
        if step < self._warmup_steps:
            return self._first + (self._peak - self._first) * min(1.0, (step + 1) / self._warmup_steps)
        if self._decay == "none":
            return self._peak
        progress = (step - self._warmup_steps) / self._decay_steps
        return self._peak * ((1 - progress) if self._decay == "linear" else (1 + math.cos(math.pi * progress)) / 2)
