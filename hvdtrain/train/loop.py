"""The training loop: one for all frameworks, to be read from top to bottom."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.train.backend import Backend
from hvdtrain.train.checkpoint import save_checkpoint
from hvdtrain.train.metrics import MetricsFile
from hvdtrain.train.options import Options
from hvdtrain.train.schedule import Schedule
from hvdtrain.train.sharding import epoch_shards, evaluation_batches, steps_per_epoch

# Between two lines of progress, where the options don't say; the end of an epoch always gives one.
_LOG_EVERY_STEPS = 100


@dataclass(frozen=True)
class Settings:
    """What the launcher decides about a run.

    Attributes:
        run_directory: where metrics and checkpoints go.
        attempt: number of this start of the job.
        checkpoint_every: steps between checkpoints; None for the last one only.
        checkpoint_keep: how many to keep.
    """

    run_directory: Path
    attempt: int = 0
    checkpoint_every: int | None = None
    checkpoint_keep: int = 3


class Loop:
    """One run of one task on one rank."""

    def __init__(self, backend: Backend, options: Options, settings: Settings) -> None:
        self.backend = backend
        self.options = options
        self.settings = settings
        self.step = 0
        self.metrics = MetricsFile(settings.run_directory, rank=backend.rank, attempt=settings.attempt)

    def run(self) -> dict[str, float]:
        """Train to the end. Returns the last evaluation, averaged over all ranks' samples."""
        backend, options = self.backend, self.options
        backend.build(options.seed, options.lr)
        self.steps = steps_per_epoch(backend.train_samples, options.batch_size, backend.size)
        self.schedule = Schedule.of(options, size=backend.size, steps_per_epoch=self.steps)
        self._announce()
        started = time.monotonic()
        results: dict[str, float] = {}
        if options.evaluate_first:
            results = self._evaluate(epoch=0)
            self._say(f"before training: {_format(results)}")
        for epoch in range(1, options.epochs + 1):
            progress = self._train_epoch(epoch)
            results = self._evaluate(epoch)
            self._say(f"{progress} {_format(results)}")
        self._save(options.epochs)
        self._say(f"finished: {_format(results)} after {time.monotonic() - started:.1f} s of training")
        self.metrics.close()
        backend.finish()
        return results

    def _train_epoch(self, epoch: int) -> str:
        """Every sample once. Returns the last line of progress, not yet printed."""
        backend, options = self.backend, self.options
        shards = epoch_shards(
            backend.train_samples, options.batch_size, backend.rank, backend.size, options.seed, epoch
        )
        log_every = options.log_every_steps or _LOG_EVERY_STEPS
        window = _Window()
        for number, (shard, batch) in enumerate(
            zip(shards, backend.batches([shard.indices for shard in shards]), strict=True), 1
        ):
            lr = self.schedule.at(self.step)
            backend.set_lr(lr)
            loss = backend.step(batch, shard.weight(backend.size))
            self.step += 1
            window.add(loss, len(shard.indices), shard.global_count)
            if number % log_every == 0 and number < self.steps:
                self._say(self._measure(epoch, number, lr, window))
                window = _Window()
            if self.settings.checkpoint_every and self.step % self.settings.checkpoint_every == 0:
                self._save(epoch)
                window.restart()
        return self._measure(epoch, self.steps, lr, window)

    def _measure(self, epoch: int, number: int, lr: float, window: _Window) -> str:
        """Record the steps of a window, and put them into words."""
        seconds = window.seconds()
        loss = sum(self.backend.gather(float(window.loss_sum))) / window.global_samples
        throughput = window.global_samples / seconds
        self.metrics.write(
            epoch=epoch,
            step=self.step,
            loss=loss,
            lr=lr,
            samples_per_s=throughput,
            step_time_s=seconds / window.steps,
        )
        return (
            f"epoch {epoch}/{self.options.epochs} step {number}/{self.steps} "
            f"loss {loss:.4f} lr {lr:.3g} {throughput:,.0f} samples/s"
        )

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Each metric's mean over the evaluation data of all ranks."""
        backend = self.backend
        if not backend.eval_samples:
            return {}
        batches = evaluation_batches(backend.eval_samples, self.options.batch_size, backend.rank, backend.size)
        totals: dict[str, tuple[float, int]] = {}
        for own in backend.gather(backend.evaluate(batches)):
            for name, (value, count) in own.items():
                total, seen = totals.get(name, (0.0, 0))
                totals[name] = (total + value, seen + count)
        results = {f"eval_{name}": total / count for name, (total, count) in totals.items()}
        self.metrics.write(epoch=epoch, step=self.step, **results)
        return results

    def _save(self, epoch: int) -> None:
        if self.backend.rank == 0:
            state = {"step": self.step, "epoch": epoch, "seed": self.options.seed, "size": self.backend.size}
            folder = self.settings.run_directory / contract.CHECKPOINTS
            save_checkpoint(folder, state, self.backend.save, keep=self.settings.checkpoint_keep)

    def _announce(self) -> None:
        options, size = self.options, self.backend.size
        self._say(self.backend.describe())
        self._say(
            f"{self.backend.train_samples} training and {self.backend.eval_samples} evaluation samples, "
            f"{self.steps} steps per epoch; global batch {options.batch_size} x {size} = {options.batch_size * size}, "
            f"learning rate {self.schedule.peak:g} (lr {options.lr:g}, scaling {options.lr_scaling})"
        )

    def _say(self, text: str) -> None:
        if self.backend.rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


class _Window:
    """What is gathered from one line of progress to the next."""

    def __init__(self) -> None:
        self.loss_sum: Any = 0.0
        self.global_samples = 0
        self.steps = 0
        self._paused = 0.0
        self._started = self._last = time.monotonic()

    def add(self, loss: Any, samples: int, global_samples: int) -> None:
        """Count a step. The loss stays the framework's own scalar, so that a GPU needn't be waited for."""
        self.loss_sum = self.loss_sum + loss * samples
        self.global_samples += global_samples
        self.steps += 1
        self._last = time.monotonic()

    def restart(self) -> None:
        """Leave out the time since the last step, which went into something else."""
        self._paused += time.monotonic() - self._last

    def seconds(self) -> float:
        """Time spent on the steps."""
        return max(1e-9, time.monotonic() - self._started - self._paused)


def _format(results: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.4f}" for name, value in results.items())
