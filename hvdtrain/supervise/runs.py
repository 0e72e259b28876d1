"""Finds runs and tells where they stand: for whoever looks at them from another process than their supervisor's."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import time
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import UsageError
from hvdtrain.supervise.records import RankStatus, Status, Supervisor, boot_id, start_time
from hvdtrain.supervise.restarts import MAX_BACKOFF_S

# States of a run that has no supervisor any more. In any other it should have one.
ENDED = frozenset({"finished", "failed", "stopped"})
LOST = "lost"
UNKNOWN = "unknown"
# The status is written every second; a busy disk may take its time.
SILENCE_S = 30.0
# A launch writes its first status this soon after it made the run directory.
_FIRST_STATUS_S = 60.0
_LONGEST_STATUS = 64 * 1024 * 1024
# Beyond what any clock says; keeps a damaged file's numbers out of calendars.
_LARGEST_FLOAT = 1e10
_HINTS = {record: typing.get_type_hints(record) for record in (Status, Supervisor, RankStatus)}


@dataclass(frozen=True)
class Run:
    """A run directory, ``<runs>/<name>/<id>``."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.path.parent.name

    @property
    def id(self) -> str:
        """When it began, and what tells it from others of that second."""
        return self.path.name

    def __str__(self) -> str:
        return f"{self.name}/{self.id}"

    @property
    def age_key(self) -> tuple[str, int]:
        """Sorts runs by their beginning."""
        try:
            made = (self.path / contract.PLAN_FILE).stat().st_mtime_ns
        except OSError:
            made = 0
        return self.id.partition("-")[0], made


@dataclass(frozen=True)
class Sight:
    """Where a run stands as seen from here.

    Attributes:
        run: which.
        state: as in its status, but `LOST` where that says that it lives and nothing bears it out; ``unknown`` where
            the status can't be read.
        note: what isn't as it should be, one clause; empty where all is well.
        status: what its supervisor wrote last; None where that can't be read.
    """

    run: Run
    state: str
    note: str = ""
    status: Status | None = None

    @property
    def is_live(self) -> bool:
        """Whether its supervisor still runs, as far as can be seen from here."""
        return self.state not in ENDED | {LOST, UNKNOWN}

    @property
    def is_here(self) -> bool:
        """Whether its supervisor's process can be seen from this machine."""
        return self.status is not None and _is_here(self.status.supervisor)


# --- finding ---------------------------------------------------------------------------------------------------------


def all_runs(folder: Path) -> list[Run]:
    """All runs below a folder of run directories, the newest first. Empty where there is no such folder."""
    runs = [Run(path) for name in _folders(folder.absolute()) for path in _folders(name) if _is_run(path)]
    return sorted(runs, key=lambda run: run.age_key, reverse=True)


def find(wanted: str | None, folder: Path) -> Run:
    """The run that somebody means.

    Args:
        wanted: a run directory's path; a job's name for its newest run; ``NAME/ID``; the beginning of either part of an
            ID, with or without its job's name, where no other run has it; None for the newest of all.
        folder: of the run directories.

    Raises:
        UsageError: there is none, or more than one.
    """
    if wanted:
        for path in (Path(wanted), folder / wanted):
            if _is_run(path):
                return Run(path.resolve())
    folder = folder.absolute()
    runs = all_runs(folder)
    if not wanted:
        if not runs:
            raise UsageError("there are no runs", where=str(folder), fix="name another folder with --runs DIRECTORY")
        return runs[0]
    if of_name := [run for run in runs if run.name == wanted.rstrip("/")]:
        return of_name[0]
    name, _, beginning = wanted.rpartition("/")
    found = [run for run in runs if name in ("", run.name) and _begins(run.id, beginning)]
    if not found:
        raise UsageError(
            f"there is no run '{wanted}'",
            where=str(folder),
            fix="'hvdtrain ps --all' lists the runs; --runs DIRECTORY names another folder of runs",
        )
    if len(found) > 1:
        raise UsageError(
            f"'{wanted}' may be any of {len(found)} runs: {', '.join(map(str, found[:5]))}"
            f"{', ...' if len(found) > 5 else ''}",
            where=str(folder),
            fix="write more of the ID",
        )
    return found[0]


def _begins(identifier: str, text: str) -> bool:
    return identifier.startswith(text) or identifier.rpartition("-")[2].startswith(text)


def _folders(folder: Path) -> list[Path]:
    """Its folders, without links such as ``latest``."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _is_run(path: Path) -> bool:
    try:
        return (path / contract.PLAN_FILE).is_file() or (path / contract.STATUS_FILE).is_file()
    except (OSError, ValueError):
        return False


# --- looking ---------------------------------------------------------------------------------------------------------


def look(run: Run) -> Sight:
    """Where a run stands. Never raises for what it finds in the run's files."""
    try:
        status = read_status(run)
    except FileNotFoundError:
        return _without_status(run)
    except UsageError as error:
        return Sight(run, UNKNOWN, error.what)
    if status.state in ENDED:
        return Sight(run, status.state, "", status)
    supervisor, silent_s = status.supervisor, time.time() - status.updated
    if not _is_here(supervisor):
        if silent_s > SILENCE_S + (MAX_BACKOFF_S if status.state == "restarting" else 0):
            return Sight(run, LOST, _not_heard_of(status), status)
        return Sight(run, status.state, "", status)
    if start_time(supervisor.pid) != supervisor.start_time:
        # It may have ended in order between the two looks.
        return _ended_or_lost(run, f"its supervisor, process {supervisor.pid}, is gone")
    if silent_s > SILENCE_S and status.state != "restarting":
        return Sight(run, status.state, f"its supervisor has written nothing for {silent_s:.0f} s", status)
    return Sight(run, status.state, "", status)


def read_status(run: Run) -> Status:
    """The run's ``status.json``, whatever has become of its supervisor.

    Raises:
        FileNotFoundError: it isn't there.
        UsageError: it can't be read, or isn't what a supervisor writes.
    """
    path = run.path / contract.STATUS_FILE
    try:
        if not path.is_file():
            raise FileNotFoundError(path)
        if path.stat().st_size > _LONGEST_STATUS:
            raise ValueError("it is too long")
        data = json.loads(path.read_bytes())
        status = Status.from_json(data)
        _check_types(status)
        _check_types(status.supervisor)
        for rank in status.ranks:
            _check_types(rank)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"the status can't be read: {error.strerror}", where=str(path)) from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            "this is no status of a run, or one of another version of hvdtrain", where=str(path)
        ) from error
    return status


def _check_types(record: Status | Supervisor | RankStatus) -> None:
    """Raises TypeError or ValueError where a field isn't what its annotation says."""
    hints = _HINTS[type(record)]
    for field in fields(record):
        value: Any = getattr(record, field.name)
        hint = hints[field.name]
        if isinstance(value, float) and not (math.isfinite(value) and abs(value) < _LARGEST_FLOAT):
            raise ValueError(field.name)
        if typing.get_origin(hint) is tuple:
            continue
        if not isinstance(value, (hint, int) if hint in (float, float | None) else hint):
            raise TypeError(field.name)


def _without_status(run: Run) -> Sight:
    """A launch makes the folder, and writes its first status a little later."""
    try:
        age_s = time.time() - (run.path / contract.PLAN_FILE).stat().st_mtime
    except OSError:
        age_s = math.inf
    if age_s < _FIRST_STATUS_S:
        return Sight(run, "planned", "it has written no status yet")
    return Sight(run, LOST, "its launch ended before it wrote a status")


def _ended_or_lost(run: Run, note: str) -> Sight:
    with contextlib.suppress(FileNotFoundError, UsageError):
        status = read_status(run)
        if status.state in ENDED:
            return Sight(run, status.state, "", status)
        return Sight(run, LOST, note, status)
    return Sight(run, LOST, note)


def _not_heard_of(status: Status) -> str:
    host = status.supervisor.host
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.updated))
    again = f", and {host} was started again" if host == socket.gethostname() else ""
    return f"its supervisor on {host} was not heard of since {since}{again}"


def _is_here(supervisor: Supervisor) -> bool:
    # A container has its host's kernel and another name: its processes aren't seen from here.
    return supervisor.host == socket.gethostname() and supervisor.boot_id == boot_id()


def require_ended(run: Run) -> Sight:
    """Only a run that has ended, in order or not, goes on.

    Raises:
        UsageError: it still lives, or there is no telling.
    """
    sight = look(run)
    if sight.state == UNKNOWN:
        raise UsageError(
            f"whether this run still lives can't be told: {sight.note}",
            where=str(run.path / contract.STATUS_FILE),
            fix="if you know that it doesn't, remove this file",
        )
    if sight.is_live:
        who = sight.status.supervisor if sight.status else None
        place = f", by process {who.pid} on {who.host}" if who else ""
        raise UsageError(
            f"the run still lives: it is {sight.state}{place}", where=str(run), fix="'hvdtrain stop' ends it"
        )
    return sight


def unfinished(folder: Path, name: str) -> Run | None:
    """The newest run of a job, if it has ended before its training had and has something to go on from."""
    runs = [run for run in map(Run, _folders(folder.absolute() / name)) if _is_run(run.path)]
    newest = max(runs, key=lambda run: run.age_key, default=None)
    if newest is None or look(newest).state not in {"failed", "stopped", LOST}:
        return None
    return newest if any((newest.path / contract.CHECKPOINTS).glob("step-*")) else None


# --- taking ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def taken(run: Run) -> Iterator[int]:
    """Inside, no other process can take the run: two that resume it at once would write the same files.

    Gives the descriptor that holds it; a forked process that keeps it open holds the run too.

    Raises:
        UsageError: somebody else has it.
    """
    descriptor = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError("somebody else goes on with this run just now", where=str(run.path)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
