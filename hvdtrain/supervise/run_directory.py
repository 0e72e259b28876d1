"""The run directory: one private folder for each launch, under ``runs/<name>/``."""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import StartError

LATEST = "latest"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. Nothing exists before `create`."""

    path: Path

    @classmethod
    def choose(cls, runs: Path, name: str, now: datetime | None = None) -> RunDirectory:
        """A new folder's path: sorts by time (UTC), and two launches in one second differ."""
        time = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
        return cls(runs.absolute() / name / f"{time}-{secrets.token_hex(3)}")

    @property
    def logs(self) -> Path:
        """Folder of this attempt's logs."""
        return self.path / contract.attempt_logs(0)

    @property
    def launcher_log(self) -> Path:
        """What horovodrun itself says."""
        return self.logs / "launcher.log"

    def rank_log(self, rank: int) -> Path:
        """What a rank's command writes, both streams in the order of arrival."""
        return self.logs / contract.rank_log(rank)

    def create(self, job: str, plan: dict[str, Any]) -> None:
        """Make the folder with the resolved spec and the plan, and point ``latest`` to it.

        Raises:
            StartError: the folder can't be made or written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            self.logs.mkdir(parents=True)
            (self.path / contract.JOB_FILE).write_text(job)
            (self.path / contract.PLAN_FILE).write_text(json.dumps(plan, indent=2) + "\n")
            self._point_latest()
        except OSError as error:
            raise StartError(
                f"can't write the run directory: {error.strerror}",
                where=str(error.filename or self.path),
                fix="free some space or choose another folder with --runs DIRECTORY",
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
