"""The run directory: one private folder for each launch, under ``runs/<name>/``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import StartError

LATEST = "latest"
# A run that begins with less than this will not come far: logs, metrics and a small model's checkpoint.
_NEEDED_BYTES = 16 * 1024 * 1024
_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another folder with --runs DIRECTORY",
    errno.EDQUOT: "free some of your quota, or choose another folder with --runs DIRECTORY",
}


def new_id(now: datetime | None = None) -> str:
    """Sorts by time (UTC), and two of one second differ."""
    time = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
    return f"{time}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. Nothing exists before `create`."""

    path: Path

    @classmethod
    def choose(cls, runs: Path, name: str, now: datetime | None = None) -> RunDirectory:
        """A new folder's path, with a `new_id`."""
        return cls(runs.absolute() / name / new_id(now))

    def logs(self, attempt: int) -> Path:
        """Folder of an attempt's logs: a file for each rank, and one for horovodrun's own words."""
        return self.path / contract.attempt_logs(attempt)

    @property
    def attempts(self) -> int:
        """How many attempts have begun."""
        return sum(1 for _ in (self.path / contract.LOGS).glob("attempt-*"))

    @property
    def planned_at(self) -> int:
        """The first attempt by the plan that is there now: `replan` keeps an earlier one with its last attempt."""
        kept = (self.path / contract.LOGS).glob(f"attempt-*/{contract.PLAN_FILE}")
        return max((int(file.parent.name.rpartition("-")[2]) + 1 for file in kept), default=0)

    def create(self, job: str, plan: dict[str, Any]) -> None:
        """Make the folder with the resolved spec and the plan, and point ``latest`` to it.

        Raises:
            StartError: the folder can't be made or written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            _require_space(self.path)
            (self.path / contract.JOB_FILE).write_text(job)
            (self.path / contract.PLAN_FILE).write_text(_json(plan))
            self._point_latest()
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise self._cannot_write(error, "choose another folder with --runs DIRECTORY") from error

    def replan(self, job: str, plan: dict[str, Any]) -> None:
        """Put a resolved spec and a plan in the place of those that are there, which go to their last attempt's logs.

        Raises:
            StartError: the folder can't be written; what was there is there still.
        """
        try:
            _require_space(self.path)
            if self.attempts > self.planned_at:
                for name in (contract.JOB_FILE, contract.ENVIRONMENT_FILE, contract.PLAN_FILE):
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copyfile(self.path / name, self.logs(self.attempts - 1) / name)
            # In this order: a plan that isn't of the spec beside it is made anew.
            _replace(self.path / contract.JOB_FILE, job)
            _replace(self.path / contract.PLAN_FILE, _json(plan))
        except OSError as error:
            raise self._cannot_write(error, "see the folder's permissions") from error

    def _cannot_write(self, error: OSError, remedy: str) -> StartError:
        return StartError(
            f"can't write the run directory: {error.strerror}",
            where=str(error.filename or self.path),
            fix=_REMEDIES.get(error.errno or 0, remedy),
        )

    def _point_latest(self) -> None:
        """Replace the link in one step, so that a reader always finds one."""
        link = self.path.parent / f".{LATEST}-{self.path.name}"
        link.symlink_to(self.path.name)
        try:
            link.replace(self.path.parent / LATEST)
        except OSError:
            with contextlib.suppress(OSError):
                link.unlink()
            raise


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def _replace(file: Path, text: str) -> None:
    """Write a file in one step: a reader finds the old one or the new."""
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_text(text)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _require_space(folder: Path) -> None:
    """Raises OSError where the disk or the quota has too little left."""
    probe = folder / ".space"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _NEEDED_BYTES)
    except OSError as error:
        if error.errno in _REMEDIES:
            raise
    finally:
        os.close(descriptor)
        probe.unlink()
