"""The training loop, the same for every framework: it reads from top to bottom and talks to a `Backend`."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError
from hvdtrain.heartbeat import STOPPED
from hvdtrain.train.backend import Backend
from hvdtrain.train.checkpoints import Checkpoints
from hvdtrain.train.checks import check_data, check_folder, warn_of_whole_model
from hvdtrain.train.evaluation import evaluate
from hvdtrain.train.progress import Progress, Window
from hvdtrain.train.saving import Saving
from hvdtrain.train.schedule import Schedule, scaled_rate
from hvdtrain.train.settings import Settings
from hvdtrain.train.sharding import epoch_order, shares, steps_per_epoch
from hvdtrain.train.state import State, resume
from hvdtrain.train.stopping import Stopping
from hvdtrain.train.task import Task

# Lines of progress in a whole training that is short, and the most steps between two lines in a long one.
_LINES = 10
_MOST_STEPS_BETWEEN_LINES = 100
# An elastic job remembers where it is so often, in seconds, and in at most one part in so many of its time.
_COMMIT_INTERVAL_S = 1.0
_COMMIT_SHARE = 50
# In a row, without a step further: then it isn't lost ranks that keep it.
_MOST_FAILURES = 20


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


@dataclass(frozen=True)
class Place:
    """How far a training has come.

    Attributes:
        step: steps done since the first start.
        epoch: the epoch that is being trained, from 0.
        epoch_samples: samples of it that were trained, by all ranks.
        saved_step: the newest checkpoint's.
    """

    step: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    saved_step: int = 0


class HostsChangedError(Exception):
    """Ranks of an elastic job want to come, or have to go: all come together anew."""


class TrainingDivergedError(HvdtrainError):
    """The loss isn't a finite number any more."""


def train(task: Task, run: Run) -> None:
    """Train on all ranks, from ``hvd.init`` to the last barrier. Every rank calls it once.

    It goes on from the run's newest whole checkpoint, where there is one. It returns when the training is done, or
    when SIGTERM has asked for an orderly stop and the checkpoint for it is on disk. In an elastic job it also goes on
    when a rank is lost, from what all others remember, and when one comes.

    Raises:
        UsageError: the task's data can't be used, or its checkpoint can't be gone on with.
        TrainingDivergedError: the loss became infinite or NaN.
        HvdtrainError: a checkpoint can't be written.
    """
    backend = task.backend(run.settings)
    with Stopping(backend) as stopping:
        _Training(task, run, backend, stopping).run()


class _Training:
    """One rank's training: its counters, and what happens when they move."""

    def __init__(self, task: Task, run: Run, backend: Backend, stopping: Stopping) -> None:
        self._options = task.options
        self._run = run
        self._backend = backend
        self._stopping = stopping
        self._step = 0
        self._epoch = 0
        self._epoch_samples = 0
        self._saved_step = 0
        # Of an elastic job: where `Backend.recall` leads to, when that was remembered and how long it took.
        self._committed: Place | None = None
        self._committed_at = 0.0
        self._commit_s = 0.0
        self._results: dict[str, float] = {}
        self._window = Window()

    def run(self) -> None:
        started = time.monotonic()
        backend, heartbeat = self._backend, self._backend.heartbeat
        heartbeat.doing("building")
        self._seed(0)
        backend.build(scaled_rate(self._options, backend.replicas))
        finished = self._train_elastically() if backend.elastic else self._train_together()
        if finished:
            self._progress.done(self._step, time.monotonic() - started, self._results)
        else:
            self._progress.stopped(self._step)
        backend.finish()
        heartbeat.doing("done" if finished else STOPPED)

    def _train_elastically(self) -> bool:
        """As `_train_together`, again and again with the ranks that are there."""
        failures, best, changed = 0, -1, False
        while True:
            try:
                if changed:
                    # A rank may be lost in here, too.
                    self._backend.rejoin()
                    self._stopping.restart()
                return self._train_together()
            except HostsChangedError:
                pass
            except Exception as error:
                failures, best = (0, self._step) if self._step > best else (failures + 1, best)
                if not self._backend.is_lost_rank(error) or failures == _MOST_FAILURES:
                    raise
                self._roll_back()
            changed = True
            self._backend.heartbeat.doing("resizing")
            self._saving.finish()

    def _train_together(self) -> bool:
        """What is left of the training, with these ranks; False: stopped before the end."""
        self._plan()
        check_data(self._backend, self._run.name)
        warn_of_whole_model(self._backend)
        check_folder(self._backend, self._checkpoints.folder)
        self._restore()
        finished = self._train()
        if self._step > self._saved_step:
            self._save(last=True)
        self._backend.heartbeat.doing("checkpoint")
        self._saving.finish()
        return finished

    def _plan(self) -> None:
        """Everything that follows from the options, the data and the number of ranks."""
        options, backend, run = self._options, self._backend, self._run
        self._batches = run.settings.batches_of(backend.replicas)
        self._global_batch = options.batch_size * self._batches
        self._steps_per_epoch = steps_per_epoch(backend.train_samples, self._global_batch)
        self._schedule = Schedule(options, size=self._batches, steps_per_epoch=self._steps_per_epoch)
        self._progress = Progress(
            run.folder / contract.METRICS_FILE, attempt=run.attempt, epochs=options.epochs, silent=backend.rank != 0
        )
        self._checkpoints = Checkpoints(run.folder / contract.CHECKPOINTS, run.settings.checkpoint.keep)
        self._saving = Saving(
            run.settings.checkpoint,
            self._checkpoints,
            backend,
            run_folder=run.folder,
            say=self._progress.say,
        )

    def _restore(self) -> None:
        """Begin where rank 0 remembers to be, else where the newest whole checkpoint ends, else at the beginning."""
        options, backend = self._options, self._backend
        backend.heartbeat.doing("restoring")
        if not (backend.elastic and self._follow_rank_0()):
            self._progress.start(self._run.name, backend, options, self._batches, self._steps_per_epoch)
            self._resumed = resume(self._checkpoints, backend, self._run.name, options)
            if self._resumed:
                state = self._resumed.state
                self._step = self._saved_step = state.step
                self._epoch, self._epoch_samples = state.epoch, state.epoch_samples
                self._progress.resumed(state, backend.size)
            else:
                backend.broadcast_state()
        left = 0
        if self._epoch < options.epochs:
            rest = steps_per_epoch(backend.train_samples - self._epoch_samples, self._global_batch)
            left = rest + (options.epochs - self._epoch - 1) * self._steps_per_epoch
        self._steps = self._progress.steps = self._step + left
        automatic = max(1, min(_MOST_STEPS_BETWEEN_LINES, self._steps // _LINES))
        self._log_every = options.log_every_steps or automatic
        backend.heartbeat.training(self._steps, backend.size)
        self._beat()
        self._saving.start(self._step)
        self._window = Window()
        if backend.elastic:
            self._commit()

    def _follow_rank_0(self) -> bool:
        """Take the training as rank 0 has it, if it has one; that is a rank that was there before, where one was."""
        found = self._backend.broadcast_object((self._committed, self._size) if self._committed else None)
        if found is None:
            return False
        place, before = found
        self._step, self._epoch, self._epoch_samples = place.step, place.epoch, place.epoch_samples
        self._saved_step = place.saved_step
        self._resumed = None
        self._backend.broadcast_state()
        self._progress.resized(before, self._backend.size, self._options, self._batches, self._step)
        return True

    def _commit(self) -> None:
        """Remember where the training is, for the ranks that are left when one is lost."""
        started = time.monotonic()
        self._backend.remember()
        self._committed = Place(self._step, self._epoch, self._epoch_samples, self._saved_step)
        self._size = self._backend.size
        self._committed_at = time.monotonic()
        self._commit_s = self._committed_at - started

    def _roll_back(self) -> None:
        """A rank is lost in the middle of a step, which counts for nothing: back to what was remembered."""
        if self._committed:
            self._backend.recall()

    def _keep_up(self) -> None:
        """What an elastic job does between two steps.

        Raises:
            HostsChangedError: on all ranks after the same step.
        """
        if self._stopping.resize:
            self._commit()
            raise HostsChangedError
        if time.monotonic() - self._committed_at > max(_COMMIT_INTERVAL_S, _COMMIT_SHARE * self._commit_s):
            self._commit()

    def _train(self) -> bool:
        """All epochs that are left; False: stopped before the end."""
        options = self._options
        if options.evaluate_first and not self._resumed and not self._step:
            self._evaluate(0)
        while self._epoch < options.epochs:
            if not self._train_epoch():
                return False
            every, done = options.evaluate_every_epochs, self._epoch + 1
            if done == options.epochs or (every and done % every == 0):
                self._evaluate(done)
            self._epoch, self._epoch_samples = done, 0
        return True

    def _train_epoch(self) -> bool:
        """What is left of the epoch; False: stopped in it or at its end."""
        options, backend = self._options, self._backend
        order = epoch_order(backend.train_samples, options.seed, self._epoch)[self._epoch_samples :]
        mine = list(shares(order, self._global_batch, backend.replica, backend.replicas))
        self._seed(self._epoch + 1)
        batches = backend.train_batches(share.indices for share in mine)
        self._restore_random_state()
        for share in mine:
            # Before the batch is loaded, which may draw random numbers: a resumed run draws them again.
            if self._stopping.agreed(self._step):
                return False
            if backend.elastic:
                self._keep_up()
            backend.heartbeat.doing("loading data")
            batch = next(batches)
            backend.heartbeat.doing("")
            rate = self._rate()
            samples = len(share.indices)
            weight = share.weight_of_busy if self._run.settings.adasum else share.weight
            loss = backend.train_step(batch, samples, weight, rate)
            self._window.add(loss, samples, share.total)
            self._step += 1
            self._epoch_samples += share.total
            self._beat()
            if self._step % self._log_every == 0 or self._step == self._steps:
                self._log(rate)
            if self._saving.due(self._step):
                self._save()
        # Here too, so that a stop needn't wait for the evaluation; whoever resumes begins with it.
        return not self._stopping.agreed(self._step)

    def _rate(self) -> float:
        """The next step's learning rate. It follows from the place in the epoch, whatever the number of ranks was."""
        return self._schedule(self._epoch * self._steps_per_epoch + self._epoch_samples / self._global_batch)

    def _beat(self) -> None:
        samples = self._epoch * self._backend.train_samples + self._epoch_samples
        self._backend.heartbeat.step(self._step, min(self._epoch + 1, self._options.epochs), samples)

    def _log(self, rate: float) -> None:
        """Average the loss over all ranks and over the steps since the last line."""
        sums = self._backend.sum_over_ranks([self._window.loss_sum(), *self._stopping.words()])
        self._stopping.hear(self._step, sums[1:])
        loss = sums[0] / self._window.samples
        # Decided on the average: every rank comes to the same end.
        if not math.isfinite(loss):
            raise TrainingDivergedError(
                f"the loss is {loss} in epoch {self._epoch + 1}, by step {self._step}",
                where=self._run.name,
                fix=f"lower options.lr (the rate was {rate:.4g}), or warm up for longer; and look for NaN in the data",
            )
        self._progress.step(self._epoch + 1, self._step, loss, rate, self._window)
        for finding in self._backend.findings():
            self._progress.say(finding)
        self._window = Window()

    def _evaluate(self, epochs_done: int) -> None:
        if self._backend.eval_samples:
            self._backend.heartbeat.doing("evaluation")
            with self._window.paused():
                self._results = evaluate(self._backend, self._run.name, self._global_batch)
                self._progress.evaluation(epochs_done, self._step, self._results)

    def _save(self, *, last: bool = False) -> None:
        """What is to be saved is copied, and written behind the training; ranks that save nothing wait for the copy."""
        self._saved_step = self._step
        self._backend.heartbeat.doing("checkpoint")
        state = State(
            step=self._step,
            epoch=self._epoch,
            epoch_samples=self._epoch_samples,
            train_samples=self._backend.train_samples,
            seed=self._options.seed,
            size=self._backend.size,
            grid=asdict(self._backend.groups.grid),
            task=self._run.name,
            options=self._options.model_dump(mode="json"),
        )
        with self._window.paused():
            self._saving.save(state, last=last)

    def _seed(self, part: int) -> None:
        """Random numbers of a part of the training: 0 is the building, the same on all ranks, then the epochs.

        They depend on nothing that came before. Within an epoch a resumed run goes on with the checkpoint's streams.
        """
        stream = self._backend.stream if part else 0
        entropy = [self._options.seed, part, stream]
        if part and self._epoch_samples and not (self._resumed and self._resumed.streams):
            # In the middle of an epoch for another number of ranks: not once more the numbers of the epoch's begin.
            entropy.append(self._epoch_samples)
        self._backend.seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    def _restore_random_state(self) -> None:
        """Once, in the epoch of the checkpoint and after its batches were begun, as it was when it was written."""
        if self._resumed and self._resumed.streams and self._resumed.state.epoch == self._epoch:
            self._backend.set_random_state(self._resumed.streams)
            self._resumed = self._resumed.model_copy(update={"streams": None})
