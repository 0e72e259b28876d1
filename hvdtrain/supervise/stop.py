"""Ends a run from another process: by the signals that its supervisor would get from its terminal."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from hvdtrain import contract
from hvdtrain.errors import CheckFailedError, UsageError
from hvdtrain.supervise.records import Status, Supervisor, start_time
from hvdtrain.supervise.runs import LOST, UNKNOWN, Run, Sight, look

_POLL_S = 0.1
_TELL_S = 5.0
# Two signals of one kind that wait together are one: the second is sent once the first was noticed, or after this time.
_NOTICED_S = 2.0
# Of the events only the newest matter here.
_TAIL = 1 << 16


def stop(run: Run, *, kill: bool, timeout_s: float | None, tell: Callable[[str], None]) -> Sight:
    """Ask the run's supervisor to stop the job, and wait until it has ended. A run that doesn't live is left alone.

    Args:
        run: which.
        kill: don't let the ranks end in order.
        timeout_s: how long to wait, in seconds; None: for ever.
        tell: is given a line for the user now and then.

    Returns:
        How the run stands at the end.

    Raises:
        UsageError: the supervisor is on another host or another user's, or the status can't be read.
        CheckFailedError: it hasn't ended within the time, or has only just begun.
    """
    sight = look(run)
    if sight.status is not None and not sight.is_here and (sight.is_live or sight.state == LOST):
        host = sight.status.supervisor.host
        raise UsageError(f"the run's supervisor is on {host}", where=str(run), fix=f"run 'hvdtrain stop' on {host}")
    if sight.state == UNKNOWN:
        raise UsageError(f"its supervisor can't be told: {sight.note}", where=str(run.path / contract.STATUS_FILE))
    if not sight.is_live:
        return sight
    if sight.status is None:
        raise CheckFailedError("the run is only just starting", where=str(run), fix="try again in some seconds")
    began = time.monotonic()
    if _is_stopping(run, sight.status):
        tell(f"{run} was asked to stop before; {'killing it' if kill else 'waiting for it'}")
        if kill:
            _send(sight.status.supervisor, run)
    else:
        tell(f"{'killing' if kill else 'stopping'} {run}")
        _send(sight.status.supervisor, run)
        if kill:
            _await(lambda: not _lives(sight) or _is_stopping(run, sight.status), _NOTICED_S)
            _send(sight.status.supervisor, run)
    deadline = began + (math.inf if timeout_s is None else timeout_s)
    while not _await(lambda: not _lives(sight), min(_TELL_S, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            raise CheckFailedError(
                f"the run hasn't ended within {timeout_s:g} s", where=str(run), fix="wait, or end it with --kill"
            )
        tell(f"waiting for {run}, {time.monotonic() - began:.0f} s so far")
    return look(run)


def _lives(sight: Sight) -> bool:
    assert sight.status is not None
    return start_time(sight.status.supervisor.pid) == sight.status.supervisor.start_time


def _await(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true within that time."""
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return true


def _send(supervisor: Supervisor, run: Run) -> None:
    # Between the look and the signal the number could only go to another process if all others were used up.
    if start_time(supervisor.pid) != supervisor.start_time:
        return
    try:
        os.kill(supervisor.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise UsageError(
            f"its supervisor, process {supervisor.pid}, is another user's", where=str(run), fix="ask them to stop it"
        ) from error


def _is_stopping(run: Run, status: Status | None) -> bool:
    """Whether its supervisor has been asked to stop before: another signal would kill what is saving its state."""
    with suppress(OSError), (run.path / contract.EVENTS_FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        for line in file.read().splitlines():
            with suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                if event["event"] == "stopping" and status is not None and event["time"] >= status.started:
                    return True
    return False
