"""The run directory's JSON files as types: what the supervisor writes and other commands read."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hvdtrain.supervise.logs import LogFile

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Field of /proc/PID/stat with the time at which the process started, counted from the command's name on (proc(5)).
_START_TIME = 19


@dataclass(frozen=True)
class Supervisor:
    """Which process runs a job, so that another one that got its number later isn't taken for it.

    Attributes:
        pid: its number.
        host: its machine's name.
        boot_id: of the machine's running kernel.
        start_time: in clock ticks since the machine's start.
    """

    pid: int
    host: str
    boot_id: str
    start_time: int


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank.

    Attributes:
        rank: its number.
        host: where it runs.
        pid: of its wrapper, on that host; None before it started.
        state: ``starting``, ``running``, ``hung``, ``ended``, ``failed`` or ``lost``.
        step: steps done since the job's first start.
        activity: what it is doing; empty for a step's own computation.
        heartbeat: when it last moved, Unix seconds; None where it has no heartbeat.
        lag_s: by how much it is behind the others at each step, in seconds; None if it isn't slow.
        exit_code: of its command, negative for a signal; None while it runs.
    """

    rank: int
    host: str
    pid: int | None = None
    state: str = "starting"
    step: int = 0
    activity: str = ""
    heartbeat: float | None = None
    lag_s: float | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Status:
    """``status.json``: where a run stands.

    Attributes:
        name: of the job.
        state: ``planned``, ``starting``, ``running``, ``restarting``, ``finished``, ``failed`` or ``stopped``; readers
            also say ``lost``.
        controller: ``mpi`` or ``gloo``.
        supervisor: the process that writes this file.
        started, updated, ended: Unix seconds; ``ended`` is None while it runs.
        ranks: all of them, in order.
        attempt: number of the newest start, from 0.
        step: steps done since the first start.
        steps: of the whole training; None where nobody tells.
        epoch: from 1; None where nobody tells.
        samples: that all ranks have trained on.
        samples_per_s: over the last half minute; None before it can be told.
        eta_s: seconds to the end; None before it can be told.
        exit_status: of the launch; None while it runs.
        summary: how it ended, in one line.
    """

    name: str
    state: str
    controller: str
    supervisor: Supervisor
    started: float
    updated: float
    ranks: tuple[RankStatus, ...]
    attempt: int = 0
    step: int = 0
    steps: int | None = None
    epoch: int | None = None
    samples: int = 0
    samples_per_s: float | None = None
    eta_s: float | None = None
    exit_status: int | None = None
    summary: str = ""
    ended: float | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Status:
        """What was written.

        Raises:
            KeyError, TypeError, ValueError: something else.
        """
        values = {field.name: data[field.name] for field in fields(cls)}
        values["supervisor"] = Supervisor(**values["supervisor"])
        values["ranks"] = tuple(RankStatus(**rank) for rank in values["ranks"])
        return cls(**values)


@dataclass(frozen=True)
class FailureRecord:
    """``failure.json``: the newest failure of a run. Its fields are `hvdtrain.supervise.outcome.Failure`'s."""

    attempt: int
    time: float
    kind: str
    rank: int | None
    host: str | None
    exception: str | None
    traceback: tuple[str, ...]
    exit_code: int | None
    signal: str | None
    diagnosis: str | None
    hint: str | None
    evidence: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Replace the file in one step."""
        _replace(path, json.dumps(asdict(self), indent=2))


class StatusFile:
    """Writes `Status` so that a reader always finds a whole one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, status: Status) -> None:
        """Replace the file in one step."""
        _replace(self._path, json.dumps(asdict(status)))


class Events:
    """``events.jsonl``: what happened, one record for each line; made at the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LogFile | None = None

    def add(self, kind: str, **fields: object) -> None:
        """Add a record with the time and its kind as ``event``.

        Raises:
            OSError: it can't be written.
        """
        if self._file is None:
            self._file = LogFile(self._path, _raise)
        self._file.write(json.dumps({"time": time.time(), "event": kind, **fields}))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def this_supervisor() -> Supervisor:
    """This process, for `Status`."""
    started = start_time(os.getpid())
    assert started is not None
    return Supervisor(os.getpid(), socket.gethostname(), boot_id(), started)


def boot_id() -> str:
    """Differs from one start of this machine to the next."""
    return _BOOT_ID.read_text().strip()


def start_time(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since the machine did; None where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold blanks and brackets, so what follows the last bracket is counted.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[_START_TIME - 1])


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
    temporary.replace(path)


def _raise(error: OSError) -> None:
    raise error
