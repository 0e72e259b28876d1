"""The faults, one class each: how it is done, what shows that the supervisor knows, and what must come of it.

A new one is a class in `_ALL`; what it does on a host is in `on_host`.
"""

from __future__ import annotations

import contextlib
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, ClassVar

from hvdtrain.drill.models import Seen, Subject
from hvdtrain.drill.target import Deed, Target
from hvdtrain.errors import ExitStatus

# The supervisor calls a rank slow that takes 0.05 s and half as long again as the others for its part of a step.
_LEAST_STOP_S = 0.3
# Silence is known after 15 s (`supervise.remote`); a hang that is looked for sooner would come before.
_LEAST_HANG_TIMEOUT_S = 30.0


class Recovery(Enum):
    """What counts as well again."""

    # A new attempt goes on, or an elastic job's other workers; a job that may not begin again ends.
    RESTART = "restart"
    # The launch has ended, and no process of it is left.
    END = "end"
    # The job goes on, and the rank is as fast as before.
    CONTINUE = "continue"
    # The job goes on, as fast as before.
    SPEED = "speed"


class Fault(ABC):
    """One kind of fault."""

    name: ClassVar[str]
    # Said when it is done, behind the rank if it hits one.
    does: ClassVar[str]
    recovery: ClassVar[Recovery] = Recovery.RESTART
    # Whether it happens to a rank, or to a host, which then must be named.
    hits_rank: ClassVar[bool] = True
    hits_host: ClassVar[bool] = False
    # Seconds of training that it needs before.
    needs_s: ClassVar[float] = 0.0

    def not_here(self, subject: Subject) -> str | None:
        """Why this job on these hosts can't be given the fault; None: it can."""
        if subject.plan.elastic and self.recovery is Recovery.RESTART and not subject.tells_steps:
            return "an elastic command tells nothing of its steps, so nobody can say when it goes on"
        if self.hits_host and not subject.plan.agents:
            hosts = ", ".join(subject.plan.hosts)
            return f"it needs workers on several hosts, and this job has them on this machine only ({hosts})"
        return None

    def settings(self, subject: Subject) -> tuple[str, ...]:
        """What has to be set in the job's spec for it, as for ``--set``."""
        return ()

    @abstractmethod
    def ready(self, target: Target) -> AbstractContextManager[Deed]:
        """Get ready on entering, for what is called to do it; what would last is undone on leaving, once noticed."""

    @abstractmethod
    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
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
        if self.hits_host:
            right = seen.blame.host == seen.host
            return [] if right else [f"failure.json names {seen.blame.host or 'no host'}, not {seen.host}"]
        if seen.blame.rank != expected:
            return [f"failure.json names {_named(seen.blame.rank)}, not {_named(expected)}"]
        return []


class KillRank(Fault):
    """SIGKILL of a rank's command."""

    name = "kill-rank"
    does = "SIGKILL of its command"

    def ready(self, target: Target) -> AbstractContextManager[Deed]:
        """The command alone: its wrapper is there to tell."""
        return target.on_rank("kill-command")

    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
        """The rank's end."""
        return bool(event["event"] == "rank_ended" and event["rank"] == subject.rank)


class KillWrapper(Fault):
    """SIGKILL of the process that watches a rank, as if its host were gone."""

    name = "kill-wrapper"
    does = "SIGKILL of the process that watches it"

    def ready(self, target: Target) -> AbstractContextManager[Deed]:
        """The kernel then kills the command."""
        return target.on_rank("kill-wrapper")

    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
        """The rank's end."""
        return bool(event["event"] == "rank_ended" and event["rank"] == subject.rank)


class StopRank(Fault):
    """SIGSTOP of a rank: it hangs, and says nothing."""

    name = "stop-rank"
    does = "SIGSTOP of its command"

    def settings(self, subject: Subject) -> tuple[str, ...]:
        """A hang is known after ``hang_timeout_s``, by default ten minutes: too long for a drill."""
        own = subject.plan.hang_timeout_s
        return () if own == subject.hang_timeout_s else (f"hang_timeout_s={subject.hang_timeout_s:g}",)

    def ready(self, target: Target) -> AbstractContextManager[Deed]:
        """For good: it's the supervisor who has to end it."""
        return target.on_rank("stop-command")

    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
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

    def ready(self, target: Target) -> AbstractContextManager[Deed]:
        """Stop it in each step for as long as a step takes, until it's noticed."""
        return target.on_rank("slow-command", stop_s=max(_LEAST_STOP_S, target.step_s or 0))

    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
        """That this rank is slow."""
        return bool(event["event"] == "straggler" and event["rank"] == subject.rank)

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
    def ready(self, target: Target) -> Iterator[Deed]:
        """Only horovodrun itself: under MPI its mpirun lives on at first."""
        yield target.launcher().kill

    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
        """That the job is at its end."""
        return event["event"] in ("launcher_ended", "rank_ended", "attempt_failed", "ended")


class StopJob(Fault):
    """SIGTERM to `hvdtrain launch`: an orderly stop within stop_grace_s."""

    name = "stop-job"
    does = "SIGTERM to the launch"
    recovery = Recovery.END
    hits_rank = False

    @contextlib.contextmanager
    def ready(self, target: Target) -> Iterator[Deed]:
        """As a scheduler does, or a person who shuts the machine down."""
        yield lambda: target.supervisor.send_signal(signal.SIGTERM)

    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
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


class CutHost(Fault):
    """A host that is cut off: its connections stay open, and nothing is heard of it any more."""

    name = "cut-host"
    does = "SIGSTOP of all that the launch runs there"
    hits_rank = False
    hits_host = True

    def not_here(self, subject: Subject) -> str | None:
        """The launching machine can't be cut off from itself."""
        agents = subject.plan.agents
        if agents and subject.host not in agents:
            ranks = [place.rank for place in subject.plan.placements if place.host in agents]
            return f"rank {subject.rank} runs on this machine, as the launch itself does; try --rank {ranks[-1]}"
        return super().not_here(subject)

    def settings(self, subject: Subject) -> tuple[str, ...]:
        """The silence has to be what is noticed."""
        own = subject.plan.hang_timeout_s
        return (f"hang_timeout_s={_LEAST_HANG_TIMEOUT_S:g}",) if own and own < _LEAST_HANG_TIMEOUT_S else ()

    def ready(self, target: Target) -> AbstractContextManager[Deed]:
        """Let it go on once it's noticed: it then finds that its connection has ended."""
        return target.on_rank("freeze")

    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
        """That the host is given up."""
        return bool(event["event"] == "host_lost" and event["host"] == subject.host)


class SlowLink(Fault):
    """A host that sends more slowly than before: the job has to go on, and to be as fast as before afterwards."""

    name = "slow-link"
    does = "its link is slowed"
    recovery = Recovery.SPEED
    hits_rank = False
    hits_host = True
    needs_s = 10.0

    def not_here(self, subject: Subject) -> str | None:
        """It is told from the job's speed."""
        if subject.plan.agents and not subject.tells_steps:
            return "a command tells nothing of its steps, so nobody can say how fast it goes"
        return super().not_here(subject)

    def ready(self, target: Target) -> AbstractContextManager[Deed]:
        """For all that the host sends over the job's interface."""
        return target.on_link("slow-link")

    def is_notice(self, event: dict[str, Any], subject: Subject) -> bool:
        """No record tells of it: `hvdtrain status` shows the throughput (`Recovery.SPEED`)."""
        return False

    def complaints(self, seen: Seen) -> list[str]:
        """Nothing may end."""
        ended = seen.of_kind("attempt_failed") or seen.of_kind("ended")
        return [f"the job was ended: {seen.summary}"] if ended else []


_ALL = (KillRank, KillWrapper, StopRank, SlowRank, KillLauncher, StopJob, CutHost, SlowLink)
FAULTS: dict[str, Fault] = {fault.name: fault() for fault in _ALL}


def _named(rank: int | None) -> str:
    return "no rank" if rank is None else f"rank {rank}"
