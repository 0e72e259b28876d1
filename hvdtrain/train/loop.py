"""The training loop, the same for every framework: it reads from top to bottom and talks to a `Backend`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.train.backend import Backend
from hvdtrain.train.checkpoints import Checkpoints
from hvdtrain.train.progress import Progress, Window
from hvdtrain.train.schedule import Schedule, scaled_rate
from hvdtrain.train.settings import Settings
from hvdtrain.train.sharding import epoch_order, shares, steps_per_epoch
from hvdtrain.train.task import Task

# Lines of progress in a whole training that is short, and the most steps between two lines in a long one.
_LINES = 10
_MOST_STEPS_BETWEEN_LINES = 100


@dataclass(frozen=True)
class Run:
    """What is being run, where, and which start of the job this is.

    Attributes:
        name: the task as ``module:Class``.
        folder: the run directory.
        attempt: number of this start, from 0.
    """

    name: str
    folder: Path
    attempt: int
    settings: Settings


class TrainingDivergedError(HvdtrainError):
    """The loss isn't a finite number any more."""


def train(task: Task, run: Run) -> None:
    """Train on all ranks, from ``hvd.init`` to the last barrier. Every rank calls it once.

    Raises:
        UsageError: the task's data can't be used.
        TrainingDivergedError: the loss became infinite or NaN.
        HvdtrainError: a checkpoint can't be written.
    """
    _Training(task, run, task.backend(compression=run.settings.compression)).run()


class _Training:
    """One rank's training: its counters, and what happens when they move."""

    def __init__(self, task: Task, run: Run, backend: Backend) -> None:
        self._options = task.options
        self._run = run
        self._backend = backend
        self._step = 0
        self._saved_step = 0
        self._results: dict[str, float] = {}
        self._window = Window()

    def run(self) -> None:
        options, backend = self._options, self._backend
        started = time.monotonic()
        self._seed(0)
        backend.build(scaled_rate(options, backend.size))
        self._check_data()
        backend.broadcast_state()
        self._plan()
        if options.evaluate_first:
            with self._window.paused():
                self._evaluate(0)
        for epoch in range(options.epochs):
            self._train_epoch(epoch)
            every, last = options.evaluate_every_epochs, epoch + 1 == options.epochs
            if last or (every and (epoch + 1) % every == 0):
                with self._window.paused():
                    self._evaluate(epoch + 1)
        if self._step > self._saved_step:
            self._save(options.epochs, 0)
        self._progress.done(self._step, time.monotonic() - started, self._results)
        backend.finish()

    def _plan(self) -> None:
        """Everything that follows from the options, the data and the number of ranks."""
        options, backend = self._options, self._backend
        self._steps_per_epoch = steps_per_epoch(backend.train_samples, options.batch_size, backend.size)
        self._steps = options.epochs * self._steps_per_epoch
        self._schedule = Schedule(options, size=backend.size, steps_per_epoch=self._steps_per_epoch)
        automatic = max(1, min(_MOST_STEPS_BETWEEN_LINES, self._steps // _LINES))
        self._log_every = options.log_every_steps or automatic
        checkpoint = self._run.settings.checkpoint
        self._save_every = checkpoint.every_steps
        self._checkpoints = Checkpoints(self._run.folder / contract.CHECKPOINTS, checkpoint.keep)
        self._progress = Progress(
            self._run.folder / contract.METRICS_FILE,
            attempt=self._run.attempt,
            epochs=options.epochs,
            steps=self._steps,
            silent=backend.rank != 0,
        )
        self._progress.start(self._run.name, backend, options, self._steps_per_epoch)
        self._window = Window()

    def _train_epoch(self, epoch: int) -> None:
        options, backend = self._options, self._backend
        self._seed(epoch + 1)
        order = epoch_order(backend.train_samples, options.seed, epoch)
        mine = list(shares(order, options.batch_size, backend.rank, backend.size))
        batches = backend.train_batches(share.indices for share in mine)
        trained = 0
        for share, batch in zip(mine, batches, strict=True):
            rate = self._schedule(self._step)
            samples = len(share.indices)
            loss = backend.train_step(batch, samples, share.weight, rate)
            self._window.add(loss, samples, share.total)
            self._step += 1
            trained += share.total
            if self._step % self._log_every == 0 or self._step == self._steps:
                self._log(epoch, rate)
            if self._save_every and self._step % self._save_every == 0:
                with self._window.paused():
                    self._save(epoch, trained)

    def _log(self, epoch: int, rate: float) -> None:
        """Average the loss over all ranks and over the steps since the last line."""
        (total,) = self._backend.sum_over_ranks([self._window.loss_sum()])
        loss = total / self._window.samples
        # Decided on the average: every rank comes to the same end.
        if not math.isfinite(loss):
            raise TrainingDivergedError(
                f"the loss is {loss} in epoch {epoch + 1}, by step {self._step}",
                where=self._run.name,
                fix=f"lower options.lr (the rate was {rate:.4g}), or warm up for longer; and look for NaN in the data",
            )
        self._progress.step(epoch + 1, self._step, loss, rate, self._window)
        self._window = Window()

    def _evaluate(self, epochs_done: int) -> None:
        """The mean of each metric over all evaluation samples, whichever rank they are on."""
        backend, samples = self._backend, self._backend.eval_samples
        if not samples:
            return
        order = np.arange(samples)
        sums = backend.evaluate(
            share.indices for share in shares(order, self._options.batch_size, backend.rank, backend.size)
        )
        # A rank without samples knows no names; rank 0 has as many samples as any.
        names = backend.broadcast_object(sorted(sums))
        if sums and sorted(sums) != names:
            raise UsageError(
                f"the task's metrics are {', '.join(sorted(sums))} on rank {backend.rank} and {', '.join(names)} on "
                "rank 0",
                where=self._run.name,
                fix="let metrics() return the same names for every batch",
            )
        totals = backend.sum_over_ranks([sums.get(name, 0.0) for name in names])
        self._results = {f"eval_{name}": total / samples for name, total in zip(names, totals, strict=True)}
        self._progress.evaluation(epochs_done, self._step, self._results)

    def _save(self, epoch: int, epoch_samples: int) -> None:
        """Rank 0 writes a checkpoint; the other ranks go on and wait for it at their next step."""
        self._saved_step = self._step
        if self._backend.rank != 0:
            return
        state = {
            "step": self._step,
            "epoch": epoch,
            "epoch_samples": epoch_samples,
            "seed": self._options.seed,
            "size": self._backend.size,
            "task": self._run.name,
            "options": self._options.model_dump(mode="json"),
        }
        self._checkpoints.write(self._step, state, self._backend.save)

    def _seed(self, part: int) -> None:
        """Random numbers of a part of the training: 0 is the building, the same on all ranks, then the epochs.

        They depend on nothing that came before, so a resumed epoch draws the same ones.
        """
        rank = self._backend.rank if part else 0
        self._backend.seed(int(np.random.SeedSequence([self._options.seed, part, rank]).generate_state(1)[0]))

    def _check_data(self) -> None:
        """No rank may think that it has other data: the ranks would take different numbers of steps and hang."""
        backend = self._backend
        mine = (backend.train_samples, backend.eval_samples)
        rank_0 = backend.broadcast_object(mine)
        if mine != rank_0:
            raise UsageError(
                f"rank {backend.rank} has {mine[0]} training and {mine[1]} evaluation samples, rank 0 has {rank_0[0]} "
                f"and {rank_0[1]}",
                where=self._run.name,
                fix="let train_data() and eval_data() give every rank the same samples; the loop shares them out",
            )
        if not backend.train_samples:
            raise UsageError("train_data() has no samples", where=self._run.name)
