"""Reads what a run's ranks have written, and what they go on to write, from the logs in its run directory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain import contract
from hvdtrain.errors import UsageError
from hvdtrain.supervise.runs import Run, look

_ATTEMPT = re.compile(r"attempt-(\d+)")
_RANK = re.compile(r"rank-(\d+)\.log")
_BLOCK = 1 << 16
_POLL_S = 0.2


@dataclass(frozen=True)
class Line:
    """A line of a rank, or of horovodrun itself (``rank`` is None), in one attempt."""

    rank: int | None
    attempt: int
    text: str


@dataclass(frozen=True)
class Choice:
    """Which lines are wanted.

    Attributes:
        ranks: of these ranks; empty for all.
        attempt: of this attempt, from 0; None for the newest.
        last: only so many of each log, of those that are there at first; None for all.
        launcher: horovodrun's own words in place of the ranks'.
    """

    ranks: tuple[int, ...] = ()
    attempt: int | None = None
    last: int | None = None
    launcher: bool = False


def lines(run: Run, choice: Choice, *, follow: bool) -> Iterator[Line]:
    """The lines that are there, log after log; and if ``follow``, those that come until the run has ended.

    A run that starts again is followed into its next attempt, unless ``choice`` names one.

    Raises:
        UsageError: the attempt, or a rank's log, isn't there or can't be read.
    """
    attempt = _first_attempt(run, choice)
    if not follow:
        _require_ranks(run, choice, attempt)
    reading = _Attempt(run, choice, attempt, choice.last)
    while True:
        # Both are asked before the logs are read, so that nothing that was written until then is missed.
        newest = max(attempts(run), default=attempt)
        over = not follow or not look(run).is_live or (choice.attempt is not None and newest > attempt)
        yield from reading.lines()
        if newest > attempt and choice.attempt is None:
            yield from reading.rest()
            attempt += 1
            reading = _Attempt(run, choice, attempt)
        elif over:
            yield from reading.rest()
            return
        else:
            time.sleep(_POLL_S)


def attempts(run: Run) -> list[int]:
    """Numbers of the attempts that have begun, in order."""
    return sorted(int(match[1]) for name in _names(run.path / contract.LOGS) if (match := _ATTEMPT.fullmatch(name)))


def logged_ranks(run: Run, attempt: int) -> list[int]:
    """Ranks that have a log in an attempt, in order."""
    names = _names(run.path / contract.attempt_logs(attempt))
    return sorted(int(match[1]) for name in names if (match := _RANK.fullmatch(name)))


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"the logs can't be read: {error.strerror}", where=str(folder)) from error


def _first_attempt(run: Run, choice: Choice) -> int:
    begun = attempts(run)
    if choice.attempt is None:
        return max(begun, default=0)
    if choice.attempt not in begun:
        have = f"it has {', '.join(map(str, begun))}" if begun else "none has begun"
        raise UsageError(f"there is no attempt {choice.attempt}: {have}", where=str(run))
    return choice.attempt


def _require_ranks(run: Run, choice: Choice, attempt: int) -> None:
    have = logged_ranks(run, attempt)
    if missing := sorted(set(choice.ranks) - set(have)):
        whose = f"ranks 0 to {have[-1]} have one" if have else "no rank has one"
        raise UsageError(f"rank {missing[0]} has no log in attempt {attempt}: {whose}", where=str(run))


class _Attempt:
    """The chosen logs of one attempt, each read as far as it went."""

    def __init__(self, run: Run, choice: Choice, number: int, last: int | None = None) -> None:
        self._run = run
        self._choice = choice
        self._number = number
        self._last = last
        self._logs: dict[int | None, _Log] = {}

    def lines(self) -> Iterator[Line]:
        """What has come since, log after log."""
        for rank in self._wanted():
            if rank not in self._logs:
                self._logs[rank] = _Log(self._path(rank), self._last)
            for text in self._logs[rank].lines():
                yield Line(rank, self._number, text)
        # A log that appears later is new from its first line on.
        self._last = None

    def rest(self) -> Iterator[Line]:
        """Lines without an end: nobody will end them any more."""
        for rank, log in self._logs.items():
            if text := log.rest():
                yield Line(rank, self._number, text)

    def _wanted(self) -> list[int | None]:
        if self._choice.launcher:
            return [None]
        chosen = self._choice.ranks
        return [rank for rank in logged_ranks(self._run, self._number) if not chosen or rank in chosen]

    def _path(self, rank: int | None) -> Path:
        name = contract.LAUNCHER_LOG if rank is None else contract.rank_log(rank)
        return self._run.path / contract.attempt_logs(self._number) / name


class _Log:
    """One file; open only while it's read: a job may have more ranks than a process may have open files."""

    def __init__(self, path: Path, last: int | None) -> None:
        self._path = path
        self._begun = b""
        self._position = 0 if last is None else self._begin_of_last(last)

    def lines(self) -> Iterator[str]:
        """The whole lines that have come since."""
        try:
            if self._path.stat().st_size <= self._position:
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                while block := file.read(_BLOCK):
                    self._position += len(block)
                    *whole, self._begun = (self._begun + block).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"the log can't be read: {error.strerror}", where=str(self._path)) from error

    def rest(self) -> str:
        """A line that has begun and not ended."""
        return self._begun.decode(errors="replace")

    def _begin_of_last(self, count: int) -> int:
        """Where the last ``count`` whole lines begin: behind the end of the line before them."""
        ends = 0
        try:
            with self._path.open("rb") as file:
                begin = file.seek(0, os.SEEK_END)
                while begin:
                    size = min(_BLOCK, begin)
                    begin = file.seek(begin - size)
                    block, at = file.read(size), size
                    while (at := block.rfind(b"\n", 0, at)) >= 0:
                        ends += 1
                        if ends > count:
                            return begin + at + 1
        except OSError:
            # Told when it's read.
            return 0
        return 0
