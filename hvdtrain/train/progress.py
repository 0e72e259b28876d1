"""What a training says: lines for people, and the same as records in ``metrics.jsonl`` for programs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from hvdtrain.errors import HvdtrainError
from hvdtrain.train.backend import Backend
from hvdtrain.train.options import Options
from hvdtrain.train.schedule import scaled_rate
from hvdtrain.train.state import State


class Window:
    """The steps between two lines of progress."""

    def __init__(self) -> None:
        self.samples = 0
        self.steps = 0
        self._losses: list[tuple[SupportsFloat, int]] = []
        self._started = time.perf_counter()

    def add(self, loss: SupportsFloat, samples: int, total: int) -> None:
        """One step: this rank's mean loss and number of samples, and the number of all ranks' samples."""
        self._losses.append((loss, samples))
        self.samples += total
        self.steps += 1

    def loss_sum(self) -> float:
        """Sum of this rank's losses over its samples; waits for the device."""
        return sum(float(loss) * samples for loss, samples in self._losses)

    def seconds(self) -> float:
        """Time spent in the steps."""
        return time.perf_counter() - self._started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of what is done inside out of `seconds`."""
        paused = time.perf_counter()
        yield
        self._started += time.perf_counter() - paused


class Progress:
    """Lines and records of rank 0. On the other ranks it is silent.

    Args:
        path: of ``metrics.jsonl``; records are added to what is there.
        attempt: number of this start of the job.
        epochs: of the whole training.
        silent: say and write nothing.

    Attributes:
        steps: of the whole training; to be set before the first step.
    """

    def __init__(self, path: Path, *, attempt: int, epochs: int, silent: bool) -> None:
        self._path = path
        self._attempt = attempt
        self._epochs = epochs
        self._silent = silent
        self.steps = 0

    def start(self, name: str, backend: Backend, options: Options, batches: int, steps_per_epoch: int) -> None:
        """Say what is about to run, the global batch and the effective learning rate among it.

        ``batches``: of how many workers' batches a step takes the samples, and the rate is for.
        """
        if not self._silent:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        workers = _count(backend.size, "worker")
        rate = f"learning rate {scaled_rate(options, batches):.4g}"
        if options.lr_scaling != "none":
            rate += f" ({options.lr:g}, {options.lr_scaling} scaling for {_count(batches, 'worker')})"
        if options.warmup_epochs:
            rate += f", after a warm-up of {options.warmup_epochs:g} epochs"
        if options.lr_decay != "none":
            rate += f", {options.lr_decay} decay"
        self.say(f"{name} on {workers}: {backend.describe()}")
        self.say(
            f"{backend.train_samples} training and {backend.eval_samples} evaluation samples; "
            f"{_count(options.epochs, 'epoch')} of {_count(steps_per_epoch, 'step')}"
        )
        share = f"{options.batch_size} per worker" if batches == backend.size else f"that of {batches} workers"
        if not backend.groups.grid.is_data_parallel:
            share = f"{options.batch_size} for each of {_count(batches, 'part')} of the samples"
            self.say(f"grid: {backend.groups.grid.in_words()}")
        self.say(f"global batch {options.batch_size * batches} ({share}); {rate}")

    def resumed(self, state: State, size: int) -> None:
        """The training goes on from a checkpoint, on so many ranks."""
        place = (
            f"epoch {state.epoch + 1}/{self._epochs}, {state.epoch_samples} of its {state.train_samples} samples done"
        )
        if state.epoch == self._epochs:
            place = f"all of {_count(self._epochs, 'epoch')} done"
        self.say(f"resumed from step {state.step}: {place}")
        if state.size != size:
            self.say(
                f"the checkpoint is of {_count(state.size, 'worker')}, this is {_count(size, 'worker')}: "
                "the samples that are left of the epoch are shared out anew, and random numbers differ"
            )

    def resized(self, before: int, size: int, options: Options, batches: int, step: int) -> None:
        """An elastic job goes on with another number of ranks. ``batches``: as for `start`."""
        global_batch, rate = options.batch_size * batches, scaled_rate(options, batches)
        self._record(event="resized", before=before, size=size, step=step, global_batch=global_batch, lr=rate)
        kept = "kept" if batches != size else f"{options.batch_size} per worker"
        self.say(
            f"resized from {_count(before, 'worker')} to {size} at step {step}: global batch {global_batch} ({kept}), "
            f"learning rate {rate:.4g}"
        )

    def step(self, epoch: int, step: int, loss: float, rate: float, window: Window) -> None:
        """A window of steps has ended. Epochs count from 1."""
        seconds = window.seconds()
        step_time = seconds / window.steps
        samples_per_s = window.samples / seconds
        self._record(epoch=epoch, step=step, loss=loss, lr=rate, samples_per_s=samples_per_s, step_time_s=step_time)
        self.say(
            f"{self._place(epoch, step)}  loss {loss:.4f}  lr {rate:.4g}  {samples_per_s:,.0f} samples/s  "
            f"{step_time * 1000:.1f} ms/step"
        )

    def evaluation(self, epoch: int, step: int, results: Mapping[str, float]) -> None:
        """An evaluation after so many epochs has ended."""
        self._record(epoch=epoch, step=step, **results)
        self.say(f"{self._place(epoch, step)}  {_in_words(results)}")

    def done(self, steps: int, seconds: float, results: Mapping[str, float]) -> None:
        """The training has ended well."""
        result = f": {_in_words(results)}" if results else ""
        self.say(f"done after {_count(self._epochs, 'epoch')}, {_count(steps, 'step')} and {seconds:.1f} s{result}")

    def stopped(self, step: int) -> None:
        """The training has ended early, because it was asked to."""
        self.say(f"stopped at step {step}; checkpoint saved" if step else "stopped before the first step")

    def _place(self, epoch: int, step: int) -> str:
        width = len(str(self.steps))
        return f"epoch {epoch:>{len(str(self._epochs))}}/{self._epochs}  step {step:>{width}}/{self.steps}"

    def say(self, line: str) -> None:
        """A line for people."""
        if not self._silent:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _record(self, **values: Any) -> None:
        if not self._silent:
            record = {"time": time.time(), "attempt": self._attempt, "rank": 0, **values}
            try:
                with self._path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                raise HvdtrainError(
                    f"can't write the metrics: {error.strerror}",
                    where=str(self._path),
                    fix="free some space or choose another folder with --runs DIRECTORY",
                ) from error


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _in_words(results: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in results.items())
