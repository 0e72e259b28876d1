"""When a training saves, and how it does so without standing still for longer than the copy takes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.train.backend import Backend
from hvdtrain.train.checkpoints import Checkpoints
from hvdtrain.train.interval import best_interval_s, mean_time_between_failures_s, read_history
from hvdtrain.train.settings import CheckpointSettings
from hvdtrain.train.state import RANDOM_FILE, State

# With ``every_steps: auto``: steps to the first save, by which the cost of one is measured.
FIRST_SAVE_STEPS = 10
# A new interval is told when it differs from the last one that was told by more than this factor.
_TOLD_AGAIN = 1.25


class Writer:
    """Writes in a thread, one thing at a time.

    Attributes:
        write_s: seconds that the last write took.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.write_s = 0.0

    def begin(self, write: Callable[[], object]) -> None:
        """Start to write; the write before has been waited for."""
        # Not a daemon: the interpreter waits for it, so that an error elsewhere costs no checkpoint.
        self._thread = threading.Thread(target=self._write, args=(write,), name="hvdtrain-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            HvdtrainError: the write has failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Tell of a write that has failed, without waiting for one.

        Raises:
            HvdtrainError: a write has failed.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, write: Callable[[], object]) -> None:
        started = time.monotonic()
        try:
            write()
        except BaseException as error:
            self._error = error
        self.write_s = time.monotonic() - started


class Saving:
    """A run's saves: every so many steps, or as often as costs and failures make it best (``auto``).

    Args:
        settings: the job spec's ``checkpoint``.
        checkpoints: rank 0's.
        backend: all ranks', for what is saved.
        run_folder: whose history tells how often the run fails.
        say: shows a line, on rank 0.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        checkpoints: Checkpoints,
        backend: Backend,
        *,
        run_folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._every = settings.every_steps
        self._backend = backend
        self._checkpoints = checkpoints
        self._writer = Writer()
        self._run_folder = run_folder
        self._say = say
        self._next_step = 0
        self._told_s = 0.0

    def start(self, step: int) -> None:
        """The training goes on from here."""
        self._next_step = step + FIRST_SAVE_STEPS
        self._measured_from = (step, time.monotonic())

    def due(self, step: int) -> bool:
        """Whether to save now that so many steps are done: on all ranks the same.

        Raises:
            HvdtrainError: the last checkpoint couldn't be written.
        """
        self._writer.check()
        if self._every == "auto":
            return step >= self._next_step
        return self._every is not None and step % self._every == 0

    def save(self, state: State, *, last: bool = False) -> None:
        """Save the training as it is now; the ranks' random streams too (all ranks).

        Args:
            state: its counters.
            last: no other save follows.

        Raises:
            HvdtrainError: the checkpoint before couldn't be written.
        """
        started = time.monotonic()
        backend = self._backend
        # First, or there would be two copies in memory.
        self._writer.wait()
        if backend.rank == 0 and backend.parts:
            # Before the ranks meet: none writes its part before there is a folder for it.
            self._checkpoints.begin(state.step)
        streams = backend.gather(backend.random_state())
        if backend.rank == 0 or backend.rank in backend.parts:
            self._begin(state, streams)
        if self._every == "auto" and not last:
            chosen = self._choose(state.step, time.monotonic() - started) if backend.rank == 0 else 0
            self._next_step = backend.broadcast_object(chosen)

    def _begin(self, state: State, streams: list[dict[str, Any]]) -> None:
        """Copy this rank's part and begin to write it."""
        backend, step = self._backend, state.step
        write_copy = backend.snapshot()

        def write_part() -> None:
            self._checkpoints.write_part(step, backend.rank, write_copy)

        def write(folder: Path) -> None:
            (folder / RANDOM_FILE).write_text(json.dumps(streams))
            if backend.parts:
                write_part()
            else:
                write_copy(folder)

        def write_all() -> None:
            self._checkpoints.write(step, state.model_dump(mode="json"), write, backend.parts)

        self._writer.begin(write_all if backend.rank == 0 else write_part)

    def finish(self) -> None:
        """Wait until everything is on disk.

        Raises:
            HvdtrainError: the last checkpoint couldn't be written.
        """
        self._writer.wait()

    def _choose(self, step: int, cost_s: float) -> int:
        """Step of the next save, from the cost of this one."""
        history = read_history(self._run_folder, time.time())
        mtbf_s = mean_time_between_failures_s(history, self._backend.hosts)
        interval_s = best_interval_s(cost_s, mtbf_s, self._writer.write_s)
        before, since = self._measured_from
        now = time.monotonic()
        self._measured_from = (step, now)
        step_s = max(now - since, 1e-6) / max(step - before, 1)
        steps = max(1, round(interval_s / step_s))
        if not self._told_s / _TOLD_AGAIN <= interval_s <= self._told_s * _TOLD_AGAIN:
            self._told_s = interval_s
            failures = f"{history.failures} in {history.running_s:,.0f} s of running"
            why = failures if history.failures else "none yet, so one a day for each host is assumed"
            self._say(
                f"checkpoints every {interval_s:,.0f} s, about {steps:,} steps: saving stops the training for "
                f"{cost_s:.3f} s, and a failure is expected every {mtbf_s:,.0f} s ({why})"
            )
        return step + steps
