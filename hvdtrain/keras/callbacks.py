"""Keras callbacks for training on Horovod. Give all of them to every rank, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras.variables import broadcast_model


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the root rank's model and optimizer state when `fit` starts (see `broadcast_model`).

    It comes before the first batch. A model without an `Input` is built by that batch, so there it comes right after,
    and the first step averages gradients that different weights gave.

    Args:
        root_rank: rank to copy from.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._is_done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts anew with each `fit`."""
        self._is_done = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts a model that has its variables."""
        # Not in on_train_begin: other callbacks may load a checkpoint there.
        if not self._is_done and self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts a model that has its variables only now."""
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_model(self.model, self.root_rank)
        self._is_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the epoch's logs over the ranks, so that later callbacks decide the same on every rank.

    Put it before `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`. Each rank counts by the samples that it
    saw, in training and in validation. So means over samples, such as loss and accuracy, are those of all samples
    together; for metrics that aren't means, such as AUC, it is an average of the ranks' values. Logs that aren't single
    numbers stay as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._train_samples: float | None = None
        self._validation_samples = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets the last epoch's samples."""
        self._train_samples = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the samples of the epoch's training."""
        # Keras counts validation with the same metrics; until it resets them they hold the training's.
        self._train_samples = self._samples()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the samples of its validation."""
        self._validation_samples = self._samples()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the logs by their averages."""
        if logs is None:
            return
        train_samples = self._samples() if self._train_samples is None else self._train_samples
        weighted = {
            name: (float(value), self._validation_samples if name.startswith("val_") else train_samples)
            for name, value in logs.items()
            if isinstance(value, (int, float))
        }
        for name, value in _weighted_means(hvd.allgather_object(weighted, name="hvdtrain.metrics")).items():
            logs[name] = value

    def _samples(self) -> float:
        """Samples since the metrics were reset, by the loss that Keras tracks; 1 where it tracks none."""
        tracked = next((metric for metric in self.model.metrics if metric.name == "loss"), None)
        return float(tracked.count) if isinstance(tracked, keras.metrics.Mean) else 1.0


def _weighted_means(of_ranks: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Mean of each log over the ranks that have it with a weight above zero."""
    means = {}
    for name in sorted({name for logs in of_ranks for name in logs}):
        pairs = [logs[name] for logs in of_ranks if name in logs and logs[name][1] > 0]
        if pairs:
            means[name] = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    return means


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a multiplier of the epoch.

    Args:
        initial_lr: learning rate to multiply.
        multiplier: function of the epoch, which has a fraction unless `staircase`; or a number, the decay per epoch.
        start_epoch: first epoch in which the rate is set.
        end_epoch: epoch from which on it isn't; None: to the end.
        staircase: set once at the start of an epoch, else for every batch.
        steps_per_epoch: batches in an epoch, where Keras can't know it, as with a generator.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the rate can be set."""
        if not isinstance(self.model.optimizer.learning_rate, keras.Variable):
            raise UsageError(
                f"{type(self).__name__} can't set a learning rate that the optimizer takes from its own schedule",
                fix="give the optimizer a number as learning_rate, or put the warm-up into the schedule, "
                "as keras.optimizers.schedules.CosineDecay can, and leave the callback out",
            )
        if not self.staircase and not self._steps():
            raise UsageError(
                f"{type(self).__name__} doesn't know how many batches an epoch has",
                fix="pass steps_per_epoch to the callback",
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of a staircase."""
        self._epoch = epoch
        if self.staircase and self._is_active():
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of the batch."""
        if not self.staircase and self._is_active():
            self._set(self._epoch + batch / self._steps())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate."""
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def _is_active(self) -> bool:
        return self.start_epoch <= self._epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _set(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def _steps(self) -> int:
        return self.steps_per_epoch or (self.params or {}).get("steps") or 0


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`, batch by batch.

    The gradual warm-up of Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2: with `size` ranks the batch
    is `size` times larger, and so is the rate that fits it, but not from the first step on.

    Args:
        initial_lr: the rate to reach, as a rule the one for one process times `hvd.size()`.
        warmup_epochs: epochs that it takes. The last batch of them is the first at the full rate.
        steps_per_epoch: batches in an epoch, where Keras can't know it, as with a generator.
        verbose: 1: rank 0 says when the rate is reached.
    """

    def __init__(
        self, initial_lr: float, warmup_epochs: int = 5, steps_per_epoch: int | None = None, verbose: int = 0
    ) -> None:
        super().__init__(initial_lr, self._share, 0, warmup_epochs, False, steps_per_epoch)
        self.verbose = verbose

    def _share(self, epoch: float) -> float:
        """Linear from 1/size to 1; `epoch` has a fraction, and the step it starts counts."""
        assert self.end_epoch
        progress = min(1.0, (epoch + 1 / self._steps()) / self.end_epoch)
        size: int = hvd.size()
        return (1 + progress * (size - 1)) / size

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate, and says when it is reached."""
        is_last = epoch + 1 == self.end_epoch
        if is_last:
            # With steps_per_execution above 1 the last batch doesn't set it.
            self.model.optimizer.learning_rate = self.initial_lr
        super().on_epoch_end(epoch, logs)
        if is_last and self.verbose and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"Epoch {epoch + 1}: learning rate warmed up to {rate:g}")  # noqa: T201
