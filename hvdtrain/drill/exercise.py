"""One fault done to one running job, from its first steps to its recovery."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from hvdtrain.drill.faults import Fault, Recovery
from hvdtrain.drill.hand import Hand, held
from hvdtrain.drill.job import DrilledJob
from hvdtrain.drill.models import Blame, Seen, Subject
from hvdtrain.drill.on_host import GoneError, RefusedError
from hvdtrain.drill.target import Target
from hvdtrain.errors import StartError
from hvdtrain.supervise.records import RankStatus, Status

POLL_S = 0.05
# A rank's step is in status.json this much later at most: its wrapper and the supervisor look once a second each.
_STALE_S = 2.0
_TELLING = ("worker_lost", "attempt_failed", "ended")
# A job is slowed when its throughput is below the first part of what it was, and as fast as before above the second.
# The supervisor's throughput is the average of half a minute: after so many seconds it shows what there is to see.
_SLOWED, _FAST, _SLOW_WITHIN_S = 0.5, 0.8, 40.0


@dataclass(frozen=True)
class Times:
    """How long a fault's parts take, in seconds.

    Attributes:
        after_s: from the job's first step to the fault; from the start of its last rank where it tells no steps.
        timeout_s: from the launch to the fault's recovery.
    """

    after_s: float
    timeout_s: float


class Exercise:
    """Waits until the job trains, does the fault, and watches what follows in the run directory."""

    def __init__(
        self,
        fault: Fault,
        subject: Subject,
        job: DrilledJob,
        times: Times,
        *,
        say: Callable[[str], None],
        pause: Callable[[float], None],
    ) -> None:
        self._fault = fault
        self._subject = subject
        self._job = job
        self._times = times
        self._say = say
        self._pause = pause
        self._deadline = time.monotonic() + times.timeout_s
        self._events: list[dict[str, Any]] = []
        self._status: Status | None = None
        self._attempt = 0
        # The last step of the attempt that was hit, as far as it told, and the one that its successor began with.
        self._step = 0
        self._resumed_at = 0
        self._done_at = 0.0
        self._recovery = ""
        self._called_slow: tuple[int, ...] = ()
        self._host: str | None = subject.host if fault.hits_host else None
        # The throughput before the fault, in samples per second.
        self._speed = 0.0
        self._slow_speed = 0.0

    def run(self) -> Seen:
        """Do it.

        Raises:
            StartError: the job came to its end, or to no step, before the fault.
            RefusedError: the fault can't be done here, or does nothing to this job.
        """
        step_s = self._wait_for_training()
        noticed_s = self._do(step_s)
        recovered_s = None
        if noticed_s is not None:
            recovered_s = self._until(self._is_well)
            if recovered_s is None:
                self._recovery = self._why_not_well()
            took = "not recovered" if recovered_s is None else f"recovered after {recovered_s:.1f} s"
            self._say(f"{took}: {self._recovery}")
        self._look()
        return Seen(
            rank=self._subject.rank if self._fault.hits_rank else None,
            attempt=self._attempt,
            noticed_s=noticed_s,
            recovered_s=recovered_s,
            recovery=self._recovery,
            events=self._events,
            blame=self._blame(),
            summary=self._summary(),
            exit_status=self._job.exit_status(),
            called_slow=self._called_slow,
            host=self._host,
        )

    # --- before the fault ----------------------------------------------------------------------------------------

    def _wait_for_training(self) -> float | None:
        """Returns the seconds that a step takes; None where they can't be told."""
        trains_since: float | None = None
        marks: list[tuple[float, int]] = []
        after_s = max(self._times.after_s, self._fault.needs_s)
        while trains_since is None or time.monotonic() - trains_since < after_s:
            self._pause(POLL_S)
            self._look()
            self._require_start()
            if self._status is None or not self._trains(self._status):
                trains_since = None
                continue
            if trains_since is None:
                trains_since = time.monotonic()
            marks.append((self._status.updated, self._step))
        (begun, first), (now, last) = marks[0], marks[-1]
        return (now - begun) / (last - first) if last > first else None

    def _trains(self, status: Status) -> bool:
        running = all(rank.state == "running" for rank in status.ranks)
        return running and (self._step > 0 or not self._subject.tells_steps)

    def _require_start(self) -> None:
        where = str(self._job.output)
        if self._job.exit_status() is not None or (self._status and self._status.attempt > 0):
            self._look()  # again: it may have told why since
            if self._status and self._status.state == "finished":
                fix = "give it more to do, such as --set options.epochs=100, or a smaller --after-s"
                raise StartError("the job was done before the fault", where=where, fix=fix)
            why = self._summary() or f"its launch ended with status {self._job.exit_status()}"
            fix = "see its output"
            if settings := self._fault.settings(self._subject):
                fix += f"; if it only needs longer: it ran with {', '.join(settings)}, see --hang-timeout-s"
            raise StartError(f"the job failed before the fault: {why}", where=where, fix=fix)
        if time.monotonic() > self._deadline:
            what = f"the job didn't train within {self._times.timeout_s:g} s"
            raise StartError(what, where=where, fix="see its output, or give more time with --timeout")

    # --- the fault and what follows ------------------------------------------------------------------------------

    def _do(self, step_s: float | None) -> float | None:
        """Returns after how many seconds it was noticed; None: never."""
        fault, rank = self._fault, self._subject.rank
        assert self._status is not None
        self._attempt = self._status.attempt
        self._speed = self._status.samples_per_s or 0.0
        self._called_slow = tuple(event["rank"] for event in self._events if event["event"] == "straggler")
        self._events.clear()
        at = f" after step {self._step}" if self._step else ""
        who = f"rank {rank}: " if fault.hits_rank else f"{self._host}: " if self._host else ""
        with contextlib.ExitStack() as stack:
            try:
                act = stack.enter_context(fault.ready(self._target(self._status, step_s)))
                self._done_at = time.time()
                act()
            except (GoneError, psutil.NoSuchProcess, ProcessLookupError) as error:
                raise StartError(
                    "the job came to its end just before the fault", where=str(self._job.output)
                ) from error
            self._say(f"{who}{fault.does}{at}")
            noticed_s = self._until(self._is_noticed)
        if fault.recovery in (Recovery.CONTINUE, Recovery.SPEED):
            # It counts from when the rank, or the link, could be fast again.
            self._done_at = time.time()
        self._say(f"noticed after {noticed_s:.1f} s" if noticed_s is not None else "not noticed")
        return noticed_s

    def _target(self, status: Status, step_s: float | None) -> Target:
        plan, ranks = self._job.plan(), {known.rank: known for known in status.ranks}
        if self._host and self._host not in plan.hosts:
            raise RefusedError(f"the launch has left {self._host} out")
        rank = ranks.get(self._subject.rank)
        if self._host:
            # An elastic job's ranks are where there was a place.
            rank = next((known for known in ranks.values() if known.host == self._host and _runs(known)), rank)
        if rank is None:
            raise GoneError
        return Target(
            supervisor=self._job.supervisor,
            plan=plan,
            rank=rank,
            host=self._host or rank.host,
            step_s=step_s,
            rate=self._subject.rate,
            hold=self._hold,
            pause=self._pause,
        )

    @contextlib.contextmanager
    def _hold(self, hand: Hand) -> Iterator[Hand]:
        with self._job.beside(hand.pid), held(hand, self._say):
            yield hand

    def _until(self, happened: Callable[[], float | None]) -> float | None:
        """Seconds from the fault to what is waited for; None where it can't come any more, or not in time."""
        while True:
            # What the launch wrote before it ended is read after its end is known.
            over = self._job.exit_status() is not None and not self._job.left()
            self._look()
            if (moment := happened()) is not None:
                return moment - self._done_at
            if over or time.monotonic() > self._deadline:
                return None
            self._pause(POLL_S)

    def _is_noticed(self) -> float | None:
        if self._fault.recovery is Recovery.SPEED:
            return self._is_slowed()
        for event in self._events:
            if event["time"] >= self._done_at and self._fault.is_notice(event, self._subject):
                return float(event["time"])
        return None

    def _is_slowed(self) -> float | None:
        """Raises RefusedError where the job is as fast as before: then there is nothing to notice."""
        status = self._status
        if status is None or status.attempt != self._attempt or status.updated < self._done_at:
            return None
        speed = status.samples_per_s
        if speed is None or speed < _SLOWED * self._speed:
            self._slow_speed = speed or 0.0
            return status.updated
        if status.updated > self._done_at + _SLOW_WITHIN_S and status.state == "running":
            words = f"at {self._subject.rate} the job still does {speed:.3g} of {self._speed:.3g} samples/s"
            raise RefusedError(f"{words}, so there is nothing to notice; try a lower --rate")
        return None

    def _is_well(self) -> float | None:
        if self._fault.recovery is Recovery.SPEED:
            return self._is_as_fast_as_before()
        if self._fault.recovery is Recovery.CONTINUE:
            return self._is_fast_again()
        plan = self._subject.plan
        if self._fault.recovery is Recovery.RESTART and (plan.restarts or plan.elastic):
            return self._is_past_the_fault()
        return self._is_gone()

    def _is_fast_again(self) -> float | None:
        status = self._status
        if status is None or status.attempt != self._attempt or status.updated < self._done_at:
            return None
        if status.state == "finished" or (status.state == "running" and status.ranks[self._subject.rank].lag_s is None):
            self._recovery = "the job went on, and the rank wasn't called slow any more"
            return status.updated
        return None

    def _is_as_fast_as_before(self) -> float | None:
        status = self._status
        if status is None or status.attempt != self._attempt or status.updated < self._done_at:
            return None
        speed = status.samples_per_s
        if status.state == "running" and speed is not None and speed >= _FAST * self._speed:
            slow = f"at {self._subject.rate} the job went on with {self._slow_speed:.3g} of {self._speed:.3g} samples/s"
            self._recovery = f"{slow}, and does {speed:.3g} again"
            return status.updated
        return None

    def _is_past_the_fault(self) -> float | None:
        status = self._status
        same = status is not None and status.attempt == self._attempt
        if status is None or (same and not self._subject.plan.elastic):
            return None
        who = "the other workers train" if same else "a new attempt trains"
        if status.state == "finished":
            self._recovery = f"{who} to the end"
            return status.updated
        if self._step:
            # The ranks' own steps: the job's is still the former attempt's until the new one takes its first.
            step = max(rank.step for rank in status.ranks)
            # Where a new attempt begins is no step that it has done.
            self._resumed_at = self._resumed_at or (0 if same else step)
            self._recovery = f"{who} past step {self._step}"
            return status.updated if step > max(self._step, self._resumed_at) else None
        self._recovery = "all ranks run in a new attempt"
        return status.updated if status.state == "running" else None

    def _is_gone(self) -> float | None:
        if self._job.exit_status() is None or self._job.left():
            return None
        self._recovery = f"the launch has ended with status {self._job.exit_status()}, and no process is left"
        return time.time()

    def _why_not_well(self) -> str:
        if self._job.exit_status() is not None:
            return f"the launch has ended: {self._summary()}"
        return f"not within {self._times.timeout_s:g} s of the launch (--timeout)"

    def _look(self) -> None:
        """Read what is new."""
        self._events += self._job.new_events()
        status = self._job.status()
        if status is None:
            return
        self._status = status
        # An elastic job goes on in the same attempt: what it tells later isn't from before the fault.
        is_before = not self._done_at or not self._subject.plan.elastic or status.updated < self._done_at + _STALE_S
        if status.attempt == self._attempt and is_before:
            self._step = max(self._step, *(rank.step for rank in status.ranks))

    def _summary(self) -> str:
        """The supervisor's own sentence on what happened first."""
        told = [str(event["summary"]) for event in self._events if event["event"] in _TELLING]
        slow = [event for event in self._events if event["event"] == "straggler"]
        told += [f"rank {event['rank']} was called slow, by {event['lag_s']:.2f} s a step" for event in slow]
        return told[0] if told else ""

    def _blame(self) -> Blame | None:
        """Who was named: in failure.json, or as the worker without which an elastic job goes on."""
        lost = [event for event in self._events if event["event"] == "worker_lost"]
        if lost and self._status and self._status.attempt == self._attempt:
            return Blame(lost[0]["attempt"], "worker_lost", lost[0]["rank"], lost[0]["host"])
        return self._job.blame()


def _runs(rank: RankStatus) -> bool:
    return rank.pid is not None and rank.state == "running"
