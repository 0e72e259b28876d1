"""A supervisor that goes on in the background, whatever becomes of the terminal that it was started from."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click

from hvdtrain import contract
from hvdtrain.errors import ExitStatus, StartError, UsageError
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.spec.models import JobSpec
from hvdtrain.supervise.launch import prepare, resume
from hvdtrain.supervise.runs import Run, read_status

_POLL_S = 0.05
# Before its first status a supervisor asks git and the package index of this machine, both at most for seconds.
_PATIENCE_S = 60.0


def launch_detached(spec: JobSpec, plan: LaunchPlan) -> int:
    """Check and make the run directory here, as `hvdtrain.supervise.launch.launch` does, and run in the background.

    Returns:
        As `detached`.

    Raises:
        StartError: something that the job needs isn't there; nothing was started.
    """
    directory = prepare(spec, plan)
    return detached(directory.path, lambda: resume(directory.path))


def detached(run_directory: Path, supervise: Callable[[], int], keep: tuple[int, ...] = ()) -> int:
    """Call ``supervise`` in a process in the background, and wait until its run is known to have begun.

    A forked process gets the environment, secrets included, without any command line. It never returns from here: it
    ends with the status of ``supervise``, or by its error, and writes what the terminal would show into the run
    directory's `contract.LAUNCH_LOG`.

    Args:
        run_directory: of the run, which is there.
        supervise: runs it and returns its exit status.
        keep: descriptors that the process in the background needs; it closes all others.

    Returns:
        0 if it has begun, or else the exit status of what didn't begin, whose words were shown.

    Raises:
        StartError: the process can't be started, or nothing is heard of it.
    """
    path = run_directory / contract.LAUNCH_LOG
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        told = os.fstat(log).st_size
        child = os.fork()
    except OSError as error:
        raise StartError(f"can't go to the background: {error.strerror}", where=str(path)) from error
    if child == 0:
        _leave_terminal(log, keep)
        sys.exit(supervise())
    os.close(log)
    try:
        status = _await_begin(child, run_directory)
    except KeyboardInterrupt:
        # Whoever changes their mind now gets what Ctrl-C means without --detach.
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        raise
    if status:
        click.echo(path.read_bytes()[told:].decode(errors="replace"), err=True, nl=False)
    return status


def _leave_terminal(log: int, keep: tuple[int, ...]) -> None:
    """A session of its own gets none of the terminal's signals, and no open file keeps a reader waiting for its end."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for standard in (1, 2):
        os.dup2(log, standard)
    begin = 3
    for descriptor in sorted(keep):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))


def _await_begin(child: int, run_directory: Path) -> int:
    """0 as soon as the child's first status is there; its exit status if it ended before."""
    run = Run(run_directory)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        # Asked first: a run that is over already has begun, too.
        ended, how = os.waitpid(child, os.WNOHANG)
        with suppress(OSError, UsageError):
            if read_status(run).supervisor.pid == child:
                return ExitStatus.DONE
        if ended:
            code = os.waitstatus_to_exitcode(how)
            return code if code >= 0 else 128 - code
        time.sleep(_POLL_S)
    raise StartError(
        f"process {child} in the background has not written {contract.STATUS_FILE} for {_PATIENCE_S:.0f} s",
        where=str(run_directory),
        fix=f"see {contract.LAUNCH_LOG} there",
    )
