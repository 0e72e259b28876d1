"""The one family of errors that hvdtrain shows to its users.

Each says what is wrong, where, and how to fix it, and carries the exit status that ``hvdtrain`` ends with.
``cli`` prints them without a traceback; any other exception is a defect of hvdtrain and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class ExitStatus(IntEnum):
    """What ``hvdtrain`` tells its caller (docs/failures.md lists them for users)."""

    DONE = 0
    CHECK_FAILED = 1
    USAGE = 2
    CANNOT_START = 3
    TRAINING_FAILED = 4
    LOST = 5
    HUNG = 6
    NOT_PROVISIONED = 7
    INTERRUPTED = 130
    TERMINATED = 143


class HvdtrainError(Exception):
    """Something that the user can fix.

    Args:
        what: what is wrong, one sentence without a full stop.
        where: the place, as ``file:line:column``, a host or a path.
        fix: what to do about it.
    """

    exit_status = ExitStatus.CANNOT_START

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  fix: {self.fix}" if self.fix else text


@dataclass(frozen=True, order=True)
class Problem:
    """One fault in a user's file, flag or list. Sorts by place.

    ``source`` is the file (or ``--set``, ``--hosts``); ``line`` and ``column`` count from 1 and are 0 where
    the source has none.
    """

    source: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = [self.source, *(str(number) for number in (self.line, self.column) if number)]
        return f"{':'.join(place)}: {self.message}"


class InputError(HvdtrainError):
    """Faults in what the user wrote: a job spec, a hostfile or a flag. All of them at once."""

    exit_status = ExitStatus.USAGE

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(set(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UsageError(HvdtrainError):
    """A request that can't be met as it was made, where no single place in a file is at fault."""

    exit_status = ExitStatus.USAGE


class CheckFailedError(HvdtrainError):
    """A check said no."""

    exit_status = ExitStatus.CHECK_FAILED


class StartError(HvdtrainError):
    """The job can't start: a missing tool, an unreachable host, a full disk."""

    exit_status = ExitStatus.CANNOT_START
