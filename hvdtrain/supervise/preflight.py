"""What can be found out before a process starts: better here than as a traceback from every rank."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hvdtrain.errors import StartError
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.spec.models import JobSpec


def check_before_start(spec: JobSpec, plan: LaunchPlan) -> None:
    """Check the working directory, the program and its script, and that tuned values can be written.

    Raises:
        StartError: one of them isn't there.
    """
    directory = Path(plan.directory)
    if not directory.is_dir():
        what = "isn't a directory" if directory.exists() else "doesn't exist"
        raise StartError(f"the working directory {what}", where=plan.directory, fix="correct 'directory'")
    if not os.access(directory, os.X_OK):
        raise StartError("the working directory can't be entered", where=plan.directory, fix="check its permissions")
    _check_temporary_folder(plan.environment.get("TMPDIR"))
    if plan.tuning and spec.horovod.tuned:
        _check_tuned(spec.horovod.tuned)
    if all(placement.host in plan.agents for placement in plan.placements):
        # Nothing of the job runs on this machine; the hosts' agents look at theirs.
        return
    if spec.python and shutil.which(spec.python) is None:
        fix = "correct 'python', or make the environment there"
        raise StartError("the Python that the launch uses isn't there", where=spec.python, fix=fix)
    if spec.command:
        _check_command(spec.command, directory, plan.environment["PATH"])


def _check_temporary_folder(path: str | None) -> None:
    """Open MPI and Python's workers need it, and say so in their own words."""
    if path and not (Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)):
        raise StartError(
            "the folder for temporary files can't be used",
            where=f"TMPDIR={path}",
            fix="make it, or set TMPDIR to one that can be written",
        )


def _check_tuned(file: Path) -> None:
    """What is found out in hours mustn't be lost at the end."""
    folder = file.resolve().parent
    if file.is_dir():
        what = "is a folder"
    elif not folder.is_dir():
        what = "is in a folder that doesn't exist"
    elif not os.access(folder, os.W_OK | os.X_OK):
        what = "is in a folder that can't be written"
    else:
        return
    raise StartError(f"the file for tuned values {what}", where=str(file), fix="correct horovod.tuned")


def _check_command(command: tuple[str, ...], directory: Path, path: str) -> None:
    program, *arguments = command
    located = str(directory / program) if "/" in program else shutil.which(program, path=path)
    if located is None or shutil.which(located) is None:
        raise StartError(
            f"the program '{program}' wasn't found or isn't executable",
            where=str(directory / program) if "/" in program else None,
            fix=f"correct 'command', or install the program; PATH has {path.count(':') + 1} folders, see --dry-run",
        )
    if not Path(program).name.startswith("python") or not arguments:
        return
    script = arguments[0]
    if script.endswith(".py") and not (directory / script).is_file():
        raise StartError(
            f"the script '{script}' doesn't exist",
            where=str(directory / script),
            fix="correct 'command', or 'directory', from which relative paths count",
        )
