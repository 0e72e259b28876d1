"""Shows a run at the terminal and writes it to its run directory: everything that happens passes through here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import ExitStatus
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.supervise.console import Console
from hvdtrain.supervise.fingerprint import fingerprint
from hvdtrain.supervise.goodput import Goodput
from hvdtrain.supervise.logs import LogFile
from hvdtrain.supervise.outcome import Failure, Outcome, RankEnd
from hvdtrain.supervise.records import Events, FailureRecord, RankStatus, Status, StatusFile, this_supervisor
from hvdtrain.supervise.restarts import Decision
from hvdtrain.supervise.run_directory import RunDirectory
from hvdtrain.supervise.watch import Hang, Watch

# Over so many seconds the throughput is averaged.
_THROUGHPUT_WINDOW_S = 30.0
# Why a variable or parameter has its value, and the rows of the grid: for --dry-run and the plan's file.
_IN_DETAIL = re.compile(r"(mpirun )?\w+(=| by host \()|  ")
_STATES = {
    ExitStatus.DONE: "finished",
    ExitStatus.INTERRUPTED: "stopped",
    ExitStatus.TERMINATED: "stopped",
}


class Recorder:
    """One run's records. A disk that fills up is told once, and doesn't end the run."""

    def __init__(self, plan: LaunchPlan, directory: RunDirectory, console: Console) -> None:
        self._directory = directory
        self._console = console
        self._attempt = 0
        # By this supervisor: a run that was resumed had some before.
        self._attempts = 0
        self._events = Events(directory.path / contract.EVENTS_FILE)
        self._status_file = StatusFile(directory.path / contract.STATUS_FILE)
        now = time.time()
        self._status = Status(
            name=plan.name,
            state="planned",
            controller=plan.controller,
            supervisor=this_supervisor(),
            started=now,
            updated=now,
            ranks=tuple(RankStatus(place.rank, place.host) for place in plan.placements),
        )
        self._started = time.monotonic()
        self._goodput = Goodput()
        self._speed: deque[tuple[float, int, int]] = deque()
        self._stragglers: set[int] = set()
        # Ranks that train together, as they say themselves.
        self._size = 0
        self._told_of_disk = False
        self._plan = plan

    # --- the run -----------------------------------------------------------------------------------------------

    def begin(self, attempt: int) -> None:
        """An attempt begins."""
        self._attempt = attempt
        self._attempts += 1
        self._stragglers.clear()
        self._speed.clear()
        self._size = 0
        self._goodput.begin(time.monotonic())
        with self._guard():
            self._directory.logs(attempt).mkdir(parents=True, exist_ok=True)
            if attempt == self._directory.planned_at:
                text = json.dumps(fingerprint(self._plan), indent=2)
                (self._directory.path / contract.ENVIRONMENT_FILE).write_text(text + "\n")
        reasons = "; ".join(reason for reason in self._plan.reasons if not _IN_DETAIL.match(reason))
        told = [self._plan.name if attempt == 0 else f"attempt {attempt}"]
        told += [reasons] if attempt == self._directory.planned_at else []
        self._console.message(": ".join(told))
        self._event("attempt_started", controller=self._plan.controller, processes=len(self._plan.placements))
        ranks = tuple(RankStatus(place.rank, place.host) for place in self._plan.placements)
        self._set(state="starting", attempt=attempt, ranks=ranks, exit_status=None, summary="", ended=None)

    def restarting(self, outcome: Outcome, decision: Decision) -> None:
        """An attempt has failed and another one will begin."""
        self._goodput.end(time.monotonic())
        self._event("attempt_failed", summary=outcome.summary, decision=decision.why)
        self._write_failure(outcome.failure)
        self._set(state="restarting", summary=outcome.summary)
        self._show(outcome)
        self._console.message(f"{outcome.summary}; {decision.why}")

    def finish(self, outcome: Outcome, why: str = "", *, silent: bool = False) -> int:
        """The run has ended. Returns its exit status.

        Args:
            outcome: how.
            why: why it isn't started again, if that needs to be said.
            silent: whoever called says it.
        """
        now = time.monotonic()
        self._goodput.end(now)
        goodput = self._goodput.fraction(now)
        summary = f"{outcome.summary}; {why}" if why else outcome.summary
        self._event("ended", summary=summary, exit_status=int(outcome.status), goodput=goodput)
        self._write_failure(outcome.failure)
        state = _STATES.get(outcome.status, "failed")
        self._set(state=state, exit_status=int(outcome.status), summary=summary, ended=time.time(), eta_s=None)
        if not silent:
            self._show(outcome)
            useful = f", {100 * goodput:.0f}% of it useful" if goodput is not None and self._attempts > 1 else ""
            self._console.message(
                f"{summary} after {now - self._started:.1f} s{useful}; run directory: {self._directory.path}"
            )
        self._events.close()
        return int(outcome.status)

    # --- one attempt -------------------------------------------------------------------------------------------

    def open_log(self, name: str) -> LogFile:
        """A log of this attempt."""
        return LogFile(self._directory.logs(self._attempt) / name, self.disk_error)

    def rank_started(self, rank: int, host: str, pid: int) -> None:
        """A rank's wrapper has come; its command starts."""
        self._event("rank_started", rank=rank, host=host, pid=pid)
        if all(known.rank != rank for known in self._status.ranks):
            # An elastic job grows.
            ranks = sorted((*self._status.ranks, RankStatus(rank, host)), key=lambda known: known.rank)
            self._set(ranks=tuple(ranks))
        self._set_rank(rank, host=host, pid=pid, state="running", exit_code=None)
        if all(known.state != "starting" for known in self._status.ranks):
            self._set(state="running")

    def rank_line(self, rank: int, line: str, *, error: bool) -> None:
        """A rank has written a line."""
        self._console.rank_line(rank, line, error=error)

    def rank_ended(self, end: RankEnd) -> None:
        """A rank's command has ended."""
        code = end.end.code if end.end else None
        self._event("rank_ended", rank=end.rank, host=end.host, exit_code=code, told_to_end=end.was_told_to_end)
        state = "lost" if code is None else "ended" if code == 0 else "failed"
        self._set_rank(end.rank, state=state, exit_code=code)

    def launcher_ended(self, code: int) -> None:
        """Horovodrun has ended."""
        self._event("launcher_ended", exit_code=code)

    def worker_lost(self, end: RankEnd, how: str, left: int, again_s: float | None) -> None:
        """An elastic job has lost a worker and goes on. ``again_s``: until its slot is offered again, in seconds."""
        again = f"; its slot is free again in {again_s:g} s" if again_s is not None else ""
        self._console.message(f"{how}; going on with {left} {'worker' if left == 1 else 'workers'}{again}")
        self._event("worker_lost", rank=end.rank, host=end.host, summary=how, left=left, again_s=again_s)

    def news(self, kind: str, text: str, **fields: object) -> None:
        """Something else that happened to the job."""
        self._console.message(text)
        self._event(kind, text=text, **fields)

    def stopping(self, number: signal.Signals) -> None:
        """The user wants the end."""
        self._console.message(f"{number.name}: stopping the job (once more to kill it)")
        self._event("stopping", signal=number.name)

    def hang(self, hang: Hang) -> None:
        """The job doesn't go on; its ranks are asked where they are."""
        hosts = {known.rank: known.host for known in self._status.ranks}
        who = "the job" if hang.rank is None else f"rank {hang.rank} on {hosts[hang.rank]}"
        self._console.message(f"{who} hangs: {hang.reason}; asking the ranks for their stacks")
        self._event("hang", rank=hang.rank, reason=hang.reason)
        if hang.rank is not None:
            self._set_rank(hang.rank, state="hung")

    def tick(self, watch: Watch) -> None:
        """Once a second: what all ranks are doing."""
        now = time.monotonic()
        newest = watch.newest()
        if newest.size and newest.size != self._size:
            if self._size:
                self._event("resized", size=newest.size, before=self._size, step=newest.step)
            self._size = newest.size
        self._goodput.step(now, newest.step)
        self._measure(now, newest.samples, newest.step)
        ranks = []
        for known in self._status.ranks:
            beat, lag = watch.last(known.rank), watch.lag(known.rank)
            if lag is None:
                self._stragglers.discard(known.rank)
            elif known.rank not in self._stragglers:
                self._stragglers.add(known.rank)
                self._console.message(
                    f"rank {known.rank} on {known.host} is slow: {lag:.2f} s a step behind the others"
                )
                self._event("straggler", rank=known.rank, host=known.host, lag_s=lag)
            heartbeat = beat.time or None
            ranks.append(
                dataclasses.replace(known, step=beat.step, activity=beat.activity, heartbeat=heartbeat, lag_s=lag)
            )
        samples_per_s, steps_per_s = self._rates()
        eta_s = (newest.steps - newest.step) / steps_per_s if newest.steps and steps_per_s else None
        self._set(
            step=newest.step,
            steps=newest.steps or None,
            epoch=newest.epoch or None,
            samples=newest.samples,
            samples_per_s=samples_per_s,
            eta_s=eta_s,
            ranks=tuple(ranks),
        )

    # --- helpers -----------------------------------------------------------------------------------------------

    def _measure(self, now: float, samples: int, step: int) -> None:
        if step and (not self._speed or step >= self._speed[-1][2]):
            self._speed.append((now, samples, step))
        while self._speed and now - self._speed[0][0] > _THROUGHPUT_WINDOW_S:
            self._speed.popleft()

    def _rates(self) -> tuple[float | None, float | None]:
        """Samples and steps per second over the window; None before two measurements."""
        if len(self._speed) < 2:
            return None, None
        (begun, samples, step), (now, samples_now, step_now) = self._speed[0], self._speed[-1]
        seconds = now - begun
        return (samples_now - samples) / seconds, (step_now - step) / seconds

    def _show(self, outcome: Outcome) -> None:
        for line in outcome.evidence:
            self._console.message(f"  {line}")
        if outcome.failure and outcome.failure.cause:
            self._console.message(f"cause: {outcome.failure.cause}")
            if outcome.failure.fix:
                self._console.message(f"fix: {outcome.failure.fix}")

    def _write_failure(self, failure: Failure | None) -> None:
        if failure is None:
            return
        record = FailureRecord(
            attempt=self._attempt,
            time=time.time(),
            kind=failure.kind,
            rank=failure.rank,
            host=failure.host,
            exception=failure.exception,
            traceback=failure.traceback,
            exit_code=failure.exit_code,
            signal=failure.signal,
            diagnosis=failure.cause,
            hint=failure.fix,
            evidence=failure.lines[-50:],
        )
        with self._guard():
            record.write(self._directory.path / contract.FAILURE_FILE)

    def _event(self, kind: str, **fields: object) -> None:
        with self._guard():
            self._events.add(kind, attempt=self._attempt, **fields)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """What can't be written is told, once, and the run goes on."""
        try:
            yield
        except OSError as error:
            self.disk_error(error)

    def disk_error(self, error: OSError) -> None:
        """Something of the run directory can't be written: it is told once."""
        if not self._told_of_disk:
            self._told_of_disk = True
            where = error.filename or self._directory.path
            self._console.message(f"can't write {where}: {error.strerror}; the job goes on, its records have gaps")

    def _set_rank(self, rank: int, **changes: Any) -> None:
        ranks = tuple(
            dataclasses.replace(known, **changes) if known.rank == rank else known for known in self._status.ranks
        )
        self._status = dataclasses.replace(self._status, ranks=ranks)

    def _set(self, **changes: Any) -> None:
        self._status = dataclasses.replace(self._status, updated=time.time(), **changes)
        with self._guard():
            self._status_file.write(self._status)
