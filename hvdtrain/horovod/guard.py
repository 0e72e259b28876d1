"""Runs one command and leaves nothing of it behind.

A build and a proof start processes that start others, some of them in sessions of their own. Between them and
hvdtrain stands a guard, ``python -m hvdtrain.horovod.guard COMMAND…``: it adopts whatever its command leaves, and kills
all of it when the command ends, when it is told to end, and when hvdtrain ends, be it by SIGKILL.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from hvdtrain import processes

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def guarded(
    command: list[str], environment: Mapping[str, str], folder: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A running command, its output and errors in one pipe. At the end of the context nothing of it runs any more.

    Args:
        command: as argv.
        environment: all its variables.
        folder: where it runs; None: the current one.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.horovod.guard", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=folder,
        # Ctrl-C in a terminal is for hvdtrain alone, which then ends the guard.
        start_new_session=True,
        preexec_fn=processes.end_with_parent(signal.SIGTERM),
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            yield process
    finally:
        process.terminate()
        process.wait()


def main(command: list[str]) -> int:
    """Run the command. Returns its exit status, 128 + signal for a signal, as a shell does."""
    for number in _SIGNALS:
        signal.signal(number, _stop)
    processes.adopt_orphans()
    try:
        status = subprocess.Popen(command, preexec_fn=processes.end_with_parent(signal.SIGKILL)).wait()
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        processes.kill_descendants()
    return status if status >= 0 else 128 - status


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
