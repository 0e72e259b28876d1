"""Where a rank's processes are, for a rank that hangs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from hvdtrain import contract

_PY_SPY_TIMEOUT_S = 5.0


def state_of(pid: int) -> str:
    """The kernel's letter for a process: R runs, S sleeps, D waits for a device, T is stopped, Z is dead (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


def session(leader: int) -> list[int]:
    """Pids of all processes in the session that this one leads."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                found.append(int(path.parent.name))
    return sorted(found)


def describe(leader: int) -> str:
    """A line for each process of the session: what it is and what it waits for in the kernel.

    With its native stacks, where py-spy is on PATH and the process isn't stopped: py-spy attaches as a debugger does.
    """
    return "".join(_describe(pid) for pid in session(leader))


def ask_for_stacks(leader: int) -> None:
    """Make each Python of the session write the stacks of its threads to its standard error, by `faulthandler`.

    A stopped process is woken: it can't answer otherwise, and a rank that is asked is about to be ended.
    """
    for pid in session(leader):
        with contextlib.suppress(OSError):
            if _catches(pid, contract.DUMP_SIGNAL):
                os.kill(pid, contract.DUMP_SIGNAL)
                os.kill(pid, signal.SIGCONT)


def _describe(pid: int) -> str:
    waits = _read(pid, "wchan") or "0"
    where = f", in the kernel's {waits}" if waits != "0" else ""
    text = f"hvdtrain: process {pid} ({_read(pid, 'comm')}): state {state_of(pid)}{where}\n"
    if "python" in _read(pid, "comm") and (py_spy := shutil.which("py-spy")):
        command = [py_spy, "dump", "--native", "--pid", str(pid)]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            text += subprocess.check_output(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, timeout=_PY_SPY_TIMEOUT_S
            )
    return text


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    except OSError:
        return ""


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal; without one the signal would end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)
