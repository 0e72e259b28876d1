"""What a run ran on and with, for ``environment.json``: enough to know later why two runs differ."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.plan.plan import LaunchPlan

_PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")
_GIT_TIMEOUT_S = 5.0


def fingerprint(plan: LaunchPlan) -> dict[str, Any]:
    """Versions, hosts, and the state of the user's code. No variable's value is in it."""
    return {
        "hvdtrain": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "launcher": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "hosts": list(plan.hosts),
        "code": _git(Path(plan.directory)),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out where the job runs, and whether files differ from it; None outside of git."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def _run_git(folder: Path, *arguments: str) -> str | None:
    # Without its locks, so that it disturbs nobody who works in the folder.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
