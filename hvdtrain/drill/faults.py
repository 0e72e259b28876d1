"""The faults, one class each: how it is done, what shows that the supervisor knows, and what must come of it.

A new one is a class in `_ALL`; a fault between hosts also needs a `Target` that reaches them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, ClassVar

from hvdtrain import heartbeat
from hvdtrain.drill.models import Seen, Subject
from hvdtrain.drill.target import Target
from hvdtrain.errors import ExitStatus
from hvdtrain.hosts.local import is_this_machine

# The supervisor calls a rank slow that takes 0.05 s and half as long again as the others for its part of a step.
_LEAST_STOP_S = 0.3
# Short against the computation of a step, in which the rank has to be stopped.
_LOOK_S = 0.0005


class Recovery(Enum):
    """What counts as well again."""

    # A new attempt goes on, or an elastic job's other workers; a job that may not begin again ends.
    RESTART = "restart"
    # The launch has ended, and no process of it is left.
    END = "end"
    # The job goes on as before.
    CONTINUE = "continue"


class Fault(ABC):
    """One kind of fault."""

    name: ClassVar[str]
    # Said when it is done, behind the rank if it hits one.
    does: ClassVar[str]
    recovery: ClassVar[Recovery] = Recovery.RESTART
    # Whether it happens to a rank, which then must be named.
    hits_rank: ClassVar[bool] = True

    def not_here(self, subject: Subject) -> str | None:
        """Why this job on these hosts can't be given the fault; None: it can."""
        host = subject.plan.placements[subject.rank].host
        if subject.plan.elastic and self.recovery is Recovery.RESTART and not subject.tells_steps:
            return "an elastic command tells nothing of its steps, so nobody can say when it goes on"
        if self.hits_rank and not is_this_machine(host):
            return f"rank {subject.rank} runs on {host}, and this version reaches the processes of this machine only"
        return None

    def settings(self, subject: Subject) -> tuple[str, ...]:
        """What has to be set in the job's spec for it, as for ``--set``."""
        return ()

    @abstractmethod
    def inflict(self, target: Target) -> AbstractContextManager[None]:
        """Do it on entering; what would last is undone on leaving, once it was noticed."""

    @abstractmethod
    def is_notice(self, event: dict[str, Any], rank: int) -> bool:
        """Whether this record shows that the supervisor knows of the fault."""

    def complaints(self, seen: Seen) -> list[str]:
        """What is wrong with what happened, beside its time."""
        if seen.noticed_s is None:
            return []
        expected = seen.rank if self.hits_rank else None
        if seen.blame is None:
            return ["failure.json is missing"]
        if seen.blame.attempt != seen.attempt:
            return [f"attempt {seen.blame.attempt + 1} failed too"]
        if seen.blame.rank != expected:
            return [f"failure.json names {_named(seen.blame.rank)}, not {_named(expected)}"]
        return []


class KillRank(Fault):
    """SIGKILL of a rank's command."""

    name = "kill-rank"
    does = "SIGKILL of its command"

    @contextlib.contextmanager
    def inflict(self, target: Target) -> Iterator[None]:
        """Kill the command alone: its wrapper is there to tell."""
        target.command().send_signal(signal.SIGKILL)
        yield

    def is_notice(self, event: dict[str, Any], rank: int) -> bool:
        """The rank's end."""
        return bool(event["event"] == "rank_ended" and event["rank"] == rank)


class KillWrapper(Fault):
    """SIGKILL of the process that watches a rank, as if its host were gone."""

    name = "kill-wrapper"
    does = "SIGKILL of the process that watches it"

    @contextlib.contextmanager
    def inflict(self, target: Target) -> Iterator[None]:
        """The kernel then kills the command."""
        target.wrapper().send_signal(signal.SIGKILL)
        yield

    def is_notice(self, event: dict[str, Any], rank: int) -> bool:
        """The rank's end."""
        return bool(event["event"] == "rank_ended" and event["rank"] == rank)


class StopRank(Fault):
    """SIGSTOP of a rank: it hangs, and says nothing."""

    name = "stop-rank"
    does = "SIGSTOP of its command"

    def settings(self, subject: Subject) -> tuple[str, ...]:
        """A hang is known after ``hang_timeout_s``, by default ten minutes: too long for a drill."""
        own = subject.plan.hang_timeout_s
        return () if own == subject.hang_timeout_s else (f"hang_timeout_s={subject.hang_timeout_s:g}",)

    @contextlib.contextmanager
    def inflict(self, target: Target) -> Iterator[None]:
        """For good: it's the supervisor who has to end it."""
        os.killpg(target.group(), signal.SIGSTOP)
        yield

    def is_notice(self, event: dict[str, Any], rank: int) -> bool:
        """That the job hangs; whether the right rank was named, failure.json tells."""
        return bool(event["event"] == "hang")


class SlowRank(Fault):
    """A rank that is slower than the others: to be named, and not to be ended."""

    name = "slow-rank"
    does = "stopped for a while in each step"
    recovery = Recovery.CONTINUE

    def not_here(self, subject: Subject) -> str | None:
        """Slow is who keeps others waiting at each step."""
        if subject.size == 1:
            return "one rank alone is slower than nobody"
        if not subject.tells_steps:
            return "a command tells nothing of its steps, so nobody can say that one of its ranks is slow"
        return super().not_here(subject)

    @contextlib.contextmanager
    def inflict(self, target: Target) -> Iterator[None]:
        """Stop it in each step for as long as a step takes, from a thread, until it's noticed."""
        over = threading.Event()
        stop_s = max(_LEAST_STOP_S, target.step_s or 0)
        arguments = (target.heartbeat(), target.group(), stop_s, over)
        thread = threading.Thread(target=_stop_in_each_step, args=arguments, name="slow-rank", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def is_notice(self, event: dict[str, Any], rank: int) -> bool:
        """That this rank is slow."""
        return bool(event["event"] == "straggler" and event["rank"] == rank)

    def complaints(self, seen: Seen) -> list[str]:
        """Nothing may end, and nobody else may be called slow."""
        others = sorted({event["rank"] for event in seen.of_kind("straggler")} - {seen.rank})
        wrong = [f"rank {rank} was called slow" for rank in others]
        if seen.rank in seen.called_slow:
            wrong.append(f"rank {seen.rank} had been called slow before it was, and isn't named twice")
        if seen.of_kind("attempt_failed") or seen.of_kind("ended"):
            wrong.append(f"the job was ended: {seen.summary}")
        return wrong


class KillLauncher(Fault):
    """SIGKILL of horovodrun."""

    name = "kill-launcher"
    does = "SIGKILL of horovodrun"
    hits_rank = False

    @contextlib.contextmanager
    def inflict(self, target: Target) -> Iterator[None]:
        """Only horovodrun itself: under MPI its mpirun lives on at first."""
        target.launcher().send_signal(signal.SIGKILL)
        yield

    def is_notice(self, event: dict[str, Any], rank: int) -> bool:
        """That the job is at its end."""
        return event["event"] in ("launcher_ended", "rank_ended", "attempt_failed", "ended")


class StopJob(Fault):
    """SIGTERM to `hvdtrain launch`: an orderly stop within stop_grace_s."""

    name = "stop-job"
    does = "SIGTERM to the launch"
    recovery = Recovery.END
    hits_rank = False

    @contextlib.contextmanager
    def inflict(self, target: Target) -> Iterator[None]:
        """As a scheduler does, or a person who shuts the machine down."""
        target.supervisor.send_signal(signal.SIGTERM)
        yield

    def is_notice(self, event: dict[str, Any], rank: int) -> bool:
        """That it was heard."""
        return bool(event["event"] == "stopping")

    def complaints(self, seen: Seen) -> list[str]:
        """The documented exit status, and ranks that ended by themselves."""
        wrong = []
        if seen.exit_status not in (None, ExitStatus.TERMINATED):
            wrong.append(f"the launch ended with status {seen.exit_status}, not {int(ExitStatus.TERMINATED)}")
        killed = [event["rank"] for event in seen.of_kind("rank_ended") if event["exit_code"] == -signal.SIGKILL]
        if killed:
            ranks = ", ".join(map(str, sorted(killed)))
            wrong.append(f"ranks that didn't end within stop_grace_s and were killed: {ranks}")
        return wrong


_ALL = (KillRank, KillWrapper, StopRank, SlowRank, KillLauncher, StopJob)
FAULTS: dict[str, Fault] = {fault.name: fault() for fault in _ALL}
# Faults between hosts, which need workers on several: this version starts them on this machine only.
BETWEEN_HOSTS = ("cut-host", "slow-link")


def _stop_in_each_step(page: mmap.mmap, group: int, stop_s: float, over: threading.Event) -> None:
    """While the rank computes: in a collective it would look as if it waited for the others."""
    stopped_in = -1
    with contextlib.suppress(ProcessLookupError):
        while not over.wait(_LOOK_S):
            beat = heartbeat.read(page)
            if beat.step == stopped_in or beat.waiting:
                continue
            stopped_in = beat.step
            os.killpg(group, signal.SIGSTOP)
            over.wait(stop_s)
            os.killpg(group, signal.SIGCONT)


def _named(rank: int | None) -> str:
    return "no rank" if rank is None else f"rank {rank}"
