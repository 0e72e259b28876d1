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
            (self.path / contract.PLAN_FILE).write_text(json.dumps(plan, indent=2) + "\n")
            self._point_latest()
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise StartError(
                f"can't write the run directory: {error.strerror}",
                where=str(error.filename or self.path),
                fix=_REMEDIES.get(error.errno or 0, "choose another folder with --runs DIRECTORY"),
            ) from error

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
