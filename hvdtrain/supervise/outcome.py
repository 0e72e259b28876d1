"""How a run ended, in words and as an exit status."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain import contract
from hvdtrain.errors import ExitStatus

_TRACEBACK = "Traceback (most recent call last):"
# What a rank says that lost the others in the middle of a collective.
_CONSEQUENCES = ("Horovod has been shut down", "Connection closed by peer", "Connection reset by peer")
# Lines that are shown of a rank or a launcher that failed without a traceback.
_TAIL = 12


@dataclass(frozen=True)
class Outcome:
    """A run's end.

    Attributes:
        status: what ``hvdtrain launch`` exits with.
        summary: one line for the user.
        evidence: lines that show why, the most telling last; empty where all went well.
    """

    status: ExitStatus
    summary: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankEnd:
    """How one rank's command ended.

    Attributes:
        rank: number of the worker.
        host: where it ran.
        code: its exit status, negative for a signal; None if its wrapper vanished without a word.
        stopped: whether its command was told to end, by the supervisor, horovodrun or mpirun.
        lines: the last lines that it wrote.
    """

    rank: int
    host: str
    code: int | None
    stopped: bool
    lines: tuple[str, ...]

    @property
    def is_consequence(self) -> bool:
        """Whether it seems to have ended because another rank had."""
        return any(phrase in line for line in telling_lines(self.lines) for phrase in _CONSEQUENCES)

    @property
    def explains_itself(self) -> bool:
        """Whether it wrote a traceback."""
        return _TRACEBACK in self.lines


def choose_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """Of the ranks that failed, in the order of their ends, the one to name as the cause.

    A rank that raises shuts Horovod down while its interpreter winds up, so the others often end before it does; and
    by then horovodrun may be ending the rank that raised.
    """
    own_faults = [end for end in ends if not end.is_consequence]
    for end in own_faults:
        if not end.stopped or end.explains_itself:
            return end
    return (own_faults or ends)[0]


def rank_failed(end: RankEnd) -> Outcome:
    """The outcome when this rank was the first to fail."""
    who = f"rank {end.rank} on {end.host}"
    if end.code is None:
        return Outcome(ExitStatus.LOST, f"{who} was lost: it ended without a word", telling_lines(end.lines))
    if end.code == contract.BAD_TASK_STATUS:
        return Outcome(ExitStatus.USAGE, "the task can't be used", telling_lines(end.lines))
    number = -end.code if end.code < 0 else end.code - 128
    if number == signal.SIGKILL:
        summary = f"{who} was killed by SIGKILL: by someone, or by the kernel because memory ran out (see dmesg)"
        return Outcome(ExitStatus.LOST, summary, telling_lines(end.lines))
    return Outcome(ExitStatus.TRAINING_FAILED, f"{who} {describe_exit(end.code)}", telling_lines(end.lines))


def describe_exit(code: int) -> str:
    """A process's end in words; for a signal, its exit status is negative (Python) or 128 + signal (a shell)."""
    if 128 < code <= 128 + signal.NSIG:
        code = 128 - code
    if code < 0:
        return f"was ended by {signal.Signals(-code).name} ({signal.strsignal(-code)})"
    return f"ended with exit status {code}"


def telling_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """The last traceback with what follows it, or the last few lines."""
    starts = [index for index, line in enumerate(lines) if line == _TRACEBACK]
    return tuple(lines[starts[-1] :] if starts else lines[-_TAIL:])
