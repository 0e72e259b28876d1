"""Saved output: a run directory, or what somebody kept of horovodrun or mpirun, read once and in bounded memory."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from hvdtrain import contract
from hvdtrain.diagnosis import noise, tracebacks
from hvdtrain.diagnosis.diagnose import diagnose, explain
from hvdtrain.diagnosis.models import Diagnosis
from hvdtrain.diagnosis.split import Splitter
from hvdtrain.errors import UsageError

# Of each rank are kept: its last lines, and the lines around the first few that sound alarming.
_TAIL = 300
_BEFORE = 20
_AFTER = 100
_MOST_ALARMS = 5
# Of more ranks than these nothing is kept: they say what the others say.
_MOST_RANKS = 4096
_LONGEST_LINE = 1 << 16
_ALARMS = (
    *("Traceback (most", "rror: ", "ERROR", "Fatal Python", "terminate called", "NCCL WARN", " of ranks", "ranks:"),
    *("ignal: ", "signal ", "not found", "denied", "refused", "No space", "Xid", "OOM "),
)
_SHOWN = 12
# The newest run of a job, in the folder of its runs.
_LATEST = "latest"
_NUMBER = re.compile(r"\d+")


@dataclass
class _Kept:
    """What is kept of one rank's lines, each with its number in the file."""

    tail: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_TAIL))
    alarming: list[tuple[int, str]] = field(default_factory=list)
    alarms: int = 0
    more: int = 0

    def add(self, number: int, line: str) -> None:
        if self.more:
            self.more -= 1
            self.alarming.append((number, line))
        elif self.alarms < _MOST_ALARMS and any(alarm in line for alarm in _ALARMS):
            self.alarms += 1
            self.more = _AFTER
            last = self.alarming[-1][0] if self.alarming else -1
            self.alarming += [kept for kept in list(self.tail)[-_BEFORE:] if kept[0] > last]
            self.alarming.append((number, line))
        self.tail.append((number, line))

    def lines(self) -> list[tuple[int, str]]:
        """In their order, without those that are kept twice."""
        begin = self.tail[0][0] if self.tail else 0
        return [*(kept for kept in self.alarming if kept[0] < begin), *self.tail]


class Output:
    """The lines of each rank and of the launcher, as far as they matter."""

    def __init__(self) -> None:
        self._kept: dict[int | None, _Kept] = {}
        self._number = 0

    def add(self, rank: int | None, line: str) -> None:
        """One more line."""
        self._number += 1
        kept = self._kept.get(rank)
        if kept is None:
            if len(self._kept) > _MOST_RANKS:
                return
            kept = self._kept[rank] = _Kept()
        kept.add(self._number, line)

    def diagnose(self) -> Diagnosis | None:
        """Why it failed, as far as the lines tell. Without any prefix, the lines are taken for one process's."""
        ranks = {rank: kept.lines() for rank, kept in sorted(self._kept.items(), key=_by_rank) if rank is not None}
        launcher = [line for _, line in self._kept[None].lines()] if None in self._kept else []
        plain = {rank: [line for _, line in lines] for rank, lines in ranks.items()}
        found = diagnose(plain, launcher, first=_first(ranks))
        return found if ranks and found else _alone(launcher, found)

    def telling(self) -> list[str]:
        """The last lines that aren't noise, with their ranks."""
        numbered = []
        for rank, kept in self._kept.items():
            lines = kept.lines()
            for index in noise.telling([line for _, line in lines]):
                number, line = lines[index]
                numbered.append((number, line if rank is None else f"[{rank}] {line}"))
        return [line for _, line in sorted(numbered)[-_SHOWN:]]


def _by_rank(item: tuple[int | None, _Kept]) -> int:
    return -1 if item[0] is None else item[0]


def _first(ranks: dict[int, list[tuple[int, str]]]) -> int | None:
    """The rank whose exception stands first, of those that aren't consequences of another rank's end."""
    starts = []
    for rank, lines in ranks.items():
        found = tracebacks.find([line for _, line in lines])
        if found and not noise.is_consequence(found[-1].exception):
            starts.append((lines[found[-1].start][0], rank))
    return min(starts)[1] if starts else None


def _alone(lines: list[str], found: Diagnosis | None) -> Diagnosis | None:
    """One process's output, without prefixes: no rank is known, but its traceback is shown."""
    traces = [trace for trace in tracebacks.find(lines) if not noise.is_consequence(trace.exception)]
    if not traces or (found and found.kind == "setup"):
        return found
    last = traces[-1]
    found = found or Diagnosis("signal" if last.fatal else "exception")
    return replace(found, exception=last.exception, traceback=last.lines)


@dataclass(frozen=True)
class Saved:
    """What a saved output says.

    Attributes:
        source: its path.
        diagnosis: None where it shows no failure.
        telling: the last lines that aren't noise.
    """

    source: str
    diagnosis: Diagnosis | None
    telling: tuple[str, ...] = ()


def read(path: str) -> Saved:
    """Diagnose a run directory, a file, or standard input (``-``).

    Raises:
        UsageError: it can't be read.
    """
    try:
        if path == "-":
            return diagnose_stream(path, sys.stdin.buffer)
        if Path(path).is_dir():
            return _of_run(Path(path))
        with Path(path).open("rb") as stream:
            return diagnose_stream(path, stream)
    except OSError as error:
        fix = "give a run directory, a saved output of horovodrun or mpirun, or - for standard input"
        raise UsageError(f"can't be read: {error.strerror}", where=path, fix=fix) from error


def diagnose_stream(source: str, stream: BinaryIO) -> Saved:
    """Diagnose a saved output. ``source`` is its name."""
    output, splitter = Output(), Splitter()
    for line in _lines(stream):
        # With more blanks hvdtrain repeats what a rank has written.
        if not line.startswith("hvdtrain:   "):
            for rank, text in splitter.feed(line):
                output.add(rank, text)
    for rank, text in splitter.close():
        output.add(rank, text)
    return Saved(source, output.diagnose(), tuple(output.telling()))


def _of_run(run: Path) -> Saved:
    """What the supervisor has written, else what the newest attempt's logs say."""
    if not (run / contract.LOGS).exists() and (run / _LATEST).is_dir():
        run /= _LATEST
    record = run / contract.FAILURE_FILE
    if record.is_file():
        return Saved(str(record), _of_record(record))
    attempts = sorted((run / contract.LOGS).glob("attempt-*"), key=lambda folder: _numbers(folder.name))
    logs = attempts[-1] if attempts else run
    files = sorted(logs.glob("rank-*.log"), key=lambda file: _numbers(file.name))
    if not files and not (logs / contract.LAUNCHER_LOG).is_file():
        raise UsageError(
            "is no run directory: it has no failure.json and no logs", where=str(run), fix="give runs/NAME/latest"
        )
    output = Output()
    launcher = logs / contract.LAUNCHER_LOG
    if launcher.is_file():
        _add_file(output, None, launcher)
    for file in files:
        _add_file(output, _numbers(file.name)[0], file)
    return Saved(str(logs), output.diagnose(), tuple(output.telling()))


def _add_file(output: Output, rank: int | None, file: Path) -> None:
    with file.open("rb") as stream:
        for line in _lines(stream):
            output.add(rank, line.rstrip("\r\n"))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _lines(stream: BinaryIO) -> Iterator[str]:
    """The lines of a stream, the longest cut into pieces."""
    reader = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)  # type: ignore[type-var]
    while line := reader.readline(_LONGEST_LINE):
        yield line.decode(errors="replace")


def _of_record(path: Path) -> Diagnosis:
    """What failure.json says; where it knows no cause, what the rules say of its lines."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        found = Diagnosis(
            kind=str(record["kind"]),
            rank=record.get("rank"),
            host=record.get("host"),
            exception=record.get("exception"),
            traceback=tuple(record.get("traceback") or ()),
            cause=record.get("diagnosis"),
            fix=record.get("hint"),
            evidence=tuple(record.get("evidence") or ()),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"is no failure record: {error}", where=str(path), fix="remove it to read the logs") from error
    if found.cause is None and (known := explain([*found.evidence, *found.traceback])):
        found = replace(found, cause=known[0], fix=known[1])
    return found
