"""A launch as a child process, for commands that run jobs of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import processes


def start_launch(arguments: Sequence[str], runs: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start `hvdtrain launch`; it is ended by SIGTERM, and so orderly, if this process ends before it.

    Args:
        arguments: of `hvdtrain launch`, without ``--runs``.
        runs: for its run directory.
        output: a new file, for both of its streams.
    """
    with output.open("wb") as written:
        return subprocess.Popen(
            [sys.executable, "-m", "hvdtrain", "launch", *arguments, "--runs", str(runs)],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the command, which then ends the launch.
            start_new_session=True,
            preexec_fn=processes.end_with_parent(signal.SIGTERM),
        )
