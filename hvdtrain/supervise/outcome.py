"""How a run ended, in words and as an exit status."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdtrain import contract
from hvdtrain.diagnosis import noise
from hvdtrain.diagnosis.diagnose import diagnose
from hvdtrain.errors import ExitStatus
from hvdtrain.supervise.channel import End
from hvdtrain.supervise.watch import Hang

_TRACEBACK = "Traceback (most recent call last):"
# What a rank says that lost the others in the middle of a collective.
_CONSEQUENCES = ("Horovod has been shut down", "Connection closed by peer", "Connection reset by peer")
# Lines that are shown of a rank or a launcher that failed without a traceback.
_TAIL = 12


@dataclass(frozen=True)
class RankEnd:
    """How one rank's command ended.

    Attributes:
        rank: number of the worker.
        host: where it ran.
        end: what its wrapper told; None if the wrapper vanished without a word.
        ending: whether somebody else than the supervisor had told the wrapper to end.
        lines: the last lines that it wrote.
        host_fault: why its host is lost, where it is.
        heard: when the supervisor heard of it, Unix seconds.
    """

    rank: int
    host: str
    end: End | None
    ending: bool
    lines: tuple[str, ...]
    host_fault: str | None = None
    heard: float = 0.0

    @property
    def failed_at(self) -> float:
        """When it failed, Unix seconds: by its exception's own time, where that is known."""
        return self.end.report.time if self.end and self.end.report else self.heard

    @property
    def who(self) -> str:
        """The rank and its place, for a sentence."""
        return f"rank {self.rank} on {self.host}"

    @property
    def was_told_to_end(self) -> bool:
        """Whether it ended because the supervisor, horovodrun or mpirun wanted it."""
        return self.ending or (self.end is not None and self.end.stopped)

    @property
    def traceback(self) -> tuple[str, ...]:
        """The exception that ended it, as its Python reported it or wrote it; empty without one."""
        if self.end is not None and self.end.report is not None:
            return self.end.report.traceback
        return telling_lines(self.lines) if _TRACEBACK in self.lines else ()

    @property
    def is_consequence(self) -> bool:
        """Whether it seems to have ended because another rank had."""
        lines = self.traceback or telling_lines(self.lines)
        return any(phrase in line for line in lines for phrase in _CONSEQUENCES)


@dataclass(frozen=True)
class Failure:
    """What failed first, for people and for ``failure.json``.

    Attributes:
        kind: ``exception``, ``signal``, ``oom``, ``hang``, ``lost_host`` or ``setup``.
        rank: the rank at fault; None where it's horovodrun, or nobody knows.
        host: its host.
        exception: the traceback's last line.
        traceback: its lines.
        exit_code: of the command; None if it was ended by a signal or is unknown.
        signal: name of the signal that ended it.
        lines: the last lines of the rank or of horovodrun.
        cause: the likely cause in plain words, where a rule knows this failure.
        fix: what to do about it.
    """

    kind: str
    rank: int | None = None
    host: str | None = None
    exception: str | None = None
    traceback: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: str | None = None
    lines: tuple[str, ...] = ()
    cause: str | None = None
    fix: str | None = None

    @property
    def same(self) -> str:
        """Equal for two failures that are the same one over again; empty for one that comes from outside."""
        if self.kind == "lost_host" or (self.signal == "SIGKILL" and self.kind == "signal"):
            return ""
        return f"{self.kind} {self.exception} {self.exit_code} {self.signal}"


@dataclass(frozen=True)
class Outcome:
    """A run's end.

    Attributes:
        status: what ``hvdtrain launch`` exits with.
        summary: one line for the user.
        evidence: lines that show why, the most telling last; empty where all went well.
        failure: what failed; None where nothing did.
    """

    status: ExitStatus
    summary: str
    evidence: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class Ending:
    """All that is known when an attempt has ended.

    Attributes:
        signals: that the supervisor was sent, in their order.
        hang: what hung, if something did.
        hung: the rank that is blamed for it, if one is, however it ended once it was woken.
        failures: ends of ranks that didn't end well, in their order.
        launcher_lines: horovodrun's last lines.
        launcher_code: its exit status, negative for a signal.
        launcher_ended_first: whether it ended before a rank had failed by itself.
        missing: ranks that never started.
        size: number of ranks.
        start_timeout_s: the time in which all should have started, if they haven't.
        lost_hosts: hosts whose connections have ended, and why.
    """

    signals: tuple[signal.Signals, ...]
    hang: Hang | None
    hung: RankEnd | None
    failures: tuple[RankEnd, ...]
    launcher_lines: tuple[str, ...]
    launcher_code: int
    launcher_ended_first: bool
    missing: tuple[int, ...]
    size: int
    start_timeout_s: float | None
    lost_hosts: Mapping[str, str] = field(default_factory=dict)


def outcome_of(ending: Ending) -> Outcome:
    """Who or what is to be named as the cause, and what follows for the exit status."""
    if ending.signals:
        return stopped_by(ending.signals[0])
    if ending.hang is not None:
        return _hung(ending.hang, ending.hung)
    if ending.failures and ending.start_timeout_s is None and not ending.launcher_ended_first:
        return rank_failed(choose_cause(ending.failures))
    if ending.lost_hosts and ending.missing:
        host, why = next(iter(ending.lost_hosts.items()))
        return Outcome(ExitStatus.LOST, f"{host} was lost: {why}", failure=Failure("lost_host", host=host))
    return _launcher_failed(ending)


def stopped_by(number: signal.Signals) -> Outcome:
    """The outcome when somebody wanted the end."""
    status = ExitStatus.INTERRUPTED if number == signal.SIGINT else ExitStatus.TERMINATED
    return Outcome(status, f"stopped by {number.name}")


def explained(outcome: Outcome, ranks: Mapping[int, Sequence[str]], launcher: Sequence[str]) -> Outcome:
    """The outcome with the likely cause of its failure, from the last lines of all ranks and of horovodrun."""
    failure = outcome.failure
    if failure is None:
        return outcome
    known = diagnose(
        ranks,
        launcher,
        first=failure.rank,
        traceback=failure.traceback,
        exit_code=failure.exit_code,
        oom=failure.kind == "oom",
        hang=outcome.summary if failure.kind == "hang" else None,
    )
    if known is None or known.cause is None or known.rank not in (failure.rank, None):
        return outcome
    return replace(outcome, failure=replace(failure, cause=known.cause, fix=known.fix))


def choose_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """Of the ranks that failed, in the order of their ends, the one to name as the cause.

    A rank that raises shuts Horovod down while its interpreter winds up, so the others often end before it does, some
    by a crash; and by then horovodrun may be ending the rank that raised. So the time of the exception counts, where
    it's known.
    """
    own_faults = [end for end in ends if not end.is_consequence]
    candidates = [end for end in own_faults if not end.was_told_to_end or end.traceback]
    return min(candidates or own_faults or list(ends), key=lambda end: end.failed_at)


def rank_failed(end: RankEnd) -> Outcome:
    """The outcome when this rank was the first to fail."""
    if end.end is None:
        failure = Failure("lost_host", end.rank, end.host, lines=end.lines)
        why = f"its host is lost, {end.host_fault}" if end.host_fault else "it ended without a word"
        return Outcome(ExitStatus.LOST, f"{end.who} was lost: {why}", telling_lines(end.lines), failure)
    code = end.end.code
    lines = end.traceback or telling_lines(end.lines)
    if end.traceback and end.was_told_to_end:
        # It had raised before horovodrun told all ranks to end: how it then ended says nothing. Python would have ended
        # with 1.
        failure = Failure("exception", end.rank, end.host, lines[-1], end.traceback, 1, lines=end.lines)
        return Outcome(ExitStatus.TRAINING_FAILED, f"{end.who} raised an exception", lines, failure)
    failure = Failure(
        kind=_kind(end.end),
        rank=end.rank,
        host=end.host,
        exception=lines[-1] if end.traceback else None,
        traceback=end.traceback,
        exit_code=code if code >= 0 else None,
        signal=signal.Signals(-code).name if code < 0 else None,
        lines=end.lines,
    )
    if code == contract.BAD_TASK_STATUS:
        # The lines are on the screen already, as the last ones.
        return Outcome(ExitStatus.USAGE, "the task can't be used", (), failure)
    if failure.kind == "oom":
        summary = f"{end.who} was killed by the kernel: its host's memory ran out"
        return Outcome(ExitStatus.LOST, summary, lines, failure)
    if code == -signal.SIGKILL:
        return Outcome(ExitStatus.LOST, f"{end.who} was killed by SIGKILL", lines, failure)
    return Outcome(ExitStatus.TRAINING_FAILED, f"{end.who} {describe_exit(code)}", lines, failure)


def _kind(end: End) -> str:
    if end.oom and end.code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "oom"
    return "signal" if end.code < 0 else "exception"


def _hung(hang: Hang, blamed: RankEnd | None) -> Outcome:
    """A hang, with what the ranks said of where they are."""
    lines = blamed.lines if blamed else ()
    who = blamed.who if blamed else f"rank {hang.rank}" if hang.rank is not None else "the job"
    failure = Failure("hang", hang.rank, blamed.host if blamed else None, lines=lines)
    return Outcome(ExitStatus.HUNG, f"{who} hung: {hang.reason}", _stacks(lines), failure)


def _launcher_failed(ending: Ending) -> Outcome:
    """Horovodrun ended, or started too little, without a rank at fault."""
    lines = tuple(ending.launcher_lines[index] for index in noise.telling(ending.launcher_lines))
    failure = Failure("setup", exit_code=ending.launcher_code, lines=lines)
    if ending.start_timeout_s is not None:
        summary = f"ranks {list(ending.missing)} did not start within {ending.start_timeout_s:.0f} s"
        return Outcome(ExitStatus.CANNOT_START, summary, telling_lines(lines), failure)
    ended = f"horovodrun {describe_exit(_of_the_launcher(ending.launcher_code))}"
    if len(ending.missing) == ending.size:
        return Outcome(ExitStatus.CANNOT_START, f"{ended} and started no worker", telling_lines(lines), failure)
    if ending.launcher_code != 0 or ending.missing:
        failure = Failure("signal" if ending.launcher_code < 0 else "setup", lines=lines)
        return Outcome(ExitStatus.LOST, f"{ended} before the job was done", telling_lines(lines), failure)
    return Outcome(ExitStatus.DONE, "done")


def _of_the_launcher(code: int) -> int:
    """Under MPI horovodrun is a shell, which says so where a signal ended mpirun."""
    return 128 - code if code - 128 in set(signal.Signals) else code


def describe_exit(code: int) -> str:
    """A process's end in words; its exit status is negative for a signal."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name} ({signal.strsignal(-code)})"
    number = code - 128
    if number in set(signal.Signals):
        return (
            f"ended with exit status {code} (128 + {number}: a shell says so of a command that {_name(number)} ended)"
        )
    return f"ended with exit status {code}"


def _name(number: int) -> str:
    return signal.Signals(number).name


def telling_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """The last traceback with what follows it, or the last few lines."""
    starts = [index for index, line in enumerate(lines) if line == _TRACEBACK]
    return tuple(lines[starts[-1] :] if starts else lines[-_TAIL:])


def _stacks(lines: Sequence[str]) -> tuple[str, ...]:
    """From the first line that a hanging rank wrote when it was asked where it is."""
    starts = [index for index, line in enumerate(lines) if line.startswith("hvdtrain: process ")]
    return tuple(lines[starts[0] :] if starts else lines[-_TAIL:])
