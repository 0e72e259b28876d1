"""Diagnostic programs that the host's owner installed: run within a time, and never left behind.

Every answer may be ``absent``: True (there is no such program) or ``error``: text, instead of what is named here.

``tool`` with ``name``, of `TOOLS`, and ``limit_s`` → ``exit_status``: int; ``output``: str, standard output and error
    together, the first MiB.
``ib-write-bw-serve`` with ``device``, ``port`` (the adapter's), ``duration_s``, ``limit_s`` and for RoCE ``gid_index``
    → ``port``: TCP port at which one client is served within ``limit_s``.
``ib-write-bw`` with the same, ``address`` of the other host, IPv4 because perftest exchanges its parameters over that
    alone, and ``tcp_port`` → ``bit_per_s``: float, average of what this host wrote into the other's memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

from hvdtrain.probe.annotations import Any
from hvdtrain.probe.reading import which

# What may be run; nothing of a command line comes from the request. DCGM's level 1 takes seconds and loads no GPU.
TOOLS = {"dcgmi": ("dcgmi", "diag", "-r", "1", "-j"), "nvidia-smi": ("nvidia-smi", "-q", "-x")}
_PERFTEST = "ib_write_bw"
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_LIMIT_S = 3600.0
_LISTENING_S = 5.0
_TICK_S = 0.02
# A process in a driver that hangs outlives its SIGKILL; nobody waits for it.
_LAST_WORDS_S = 1.0
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
# "65536  560845  0.00  98.02  0.186950": bytes, iterations, peak, average, messages; peak isn't measured over a time.
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+(\d+(?:\.\d+)?)(?:\s|$)", re.MULTILINE)
# In the program's process group: it ends the group when the probe ends, however that ends, since its stdin is a pipe
# that only the probe holds. argv: the program's.
_GUARD = """
import os, signal, subprocess, sys, threading
def guard():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=guard, daemon=True).start()
status = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
os._exit(status if status >= 0 else 128 - status)
"""


def tool(request: dict[str, Any]) -> dict[str, Any]:
    """Run one of `TOOLS`."""
    limit_s = _limit(request)
    program, *arguments = TOOLS[request["name"]]
    path = which(program)
    if path is None:
        return {"absent": True}
    running = _Running([path, *arguments])
    status = running.finish(limit_s)
    if status is None:
        return {"error": f"{program} did not end within {limit_s:g} s"}
    return {"exit_status": status, "output": running.output()}


def ib_write_bw_serve(request: dict[str, Any]) -> dict[str, Any]:
    """Start a server for one client; it is ended at its limit."""
    limit_s = _limit(request)
    with socket.socket() as free:
        free.bind(("", 0))
        tcp_port = free.getsockname()[1]
    arguments = _perftest_arguments(request, tcp_port)
    path = which(_PERFTEST)
    if path is None:
        return {"absent": True}
    deadline = time.monotonic() + limit_s
    running = _Running([path, *arguments])
    patience = min(deadline, time.monotonic() + _LISTENING_S)
    # The client gives up at once if nobody listens yet.
    while not _listens(tcp_port):
        if running.poll(_TICK_S) is not None:
            running.end()
            return {"error": _complaint(running)}
        if time.monotonic() > patience:
            running.end()
            return {"error": f"{_PERFTEST} did not begin to listen"}
    threading.Thread(target=lambda: running.finish(deadline - time.monotonic()), daemon=True).start()
    return {"port": tcp_port}


def ib_write_bw(request: dict[str, Any]) -> dict[str, Any]:
    """Measure with the host that serves."""
    limit_s = _limit(request)
    arguments = _perftest_arguments(request, _number(request, "tcp_port", 1, 65535))
    try:
        socket.inet_pton(socket.AF_INET, str(request["address"]))
    except OSError:
        raise ValueError(f"{request['address']!r} is no IPv4 address") from None
    path = which(_PERFTEST)
    if path is None:
        return {"absent": True}
    running = _Running([path, *arguments, str(request["address"])])
    status = running.finish(limit_s)
    if status is None:
        return {"error": f"{_PERFTEST} did not end within {limit_s:g} s"}
    found = _ROW.search(running.output())
    if status or found is None:
        return {"error": _complaint(running)}
    return {"bit_per_s": float(found.group(1)) * 1e9}


def _perftest_arguments(request: dict[str, Any], tcp_port: int) -> list[str]:
    """Both ends have the same; what comes from the request is checked."""
    device = request["device"]
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise ValueError(f"{device!r} is no name of an adapter")
    duration_s = _number(request, "duration_s", 3, 60)
    given = ["-d", device, "-i", str(_number(request, "port", 1, 255)), "-p", str(tcp_port), "-D", str(duration_s)]
    if request.get("gid_index") is not None:
        given += ["-x", str(_number(request, "gid_index", 0, 1023))]
    # The first and the last second don't count (-f); with large messages and several queue pairs one core fills even
    # the fastest ports; the clock's remark (-F) would stand in the middle of the table.
    return [*given, "-f", "1", "-s", str(1 << 20), "-q", "4", "-F", "--report_gbits"]


def _number(request: dict[str, Any], name: str, least: int, most: int) -> int:
    value = request[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}, not a whole number from {least} to {most}")
    return value


def _limit(request: dict[str, Any]) -> float:
    limit_s = float(request["limit_s"])
    if not 0 < limit_s <= _MAX_LIMIT_S:
        raise ValueError(f"limit_s is {limit_s:g}, not above 0 and at most {_MAX_LIMIT_S:g}")
    return limit_s


def _complaint(running: _Running) -> str:
    """The end of what a program said, without rulers and blank lines."""
    lines = [line.strip() for line in running.output().splitlines()]
    told = "; ".join([line for line in lines if line.strip("-*=# ")][-3:])
    return told[-500:] or f"{_PERFTEST} said nothing of its result"


def _listens(tcp_port: int) -> bool:
    """Whether somebody on this host listens at the port, as /proc tells: a connection would be taken for the client."""
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:  # noqa: PTH123
            for line in file:
                cells = line.split()
                if cells[3] == "0A" and cells[1].endswith(f":{tcp_port:04X}"):
                    return True
    return False


class _Running:
    """A program in a process group of its own, with the guard that ends it with the probe."""

    def __init__(self, argv: list[str]) -> None:
        self._kept = bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self, seconds: float) -> int | None:
        """Its exit status, 128 plus the number for a signal; None if it doesn't end within this time."""
        try:
            return self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def finish(self, seconds: float) -> int | None:
        """Likewise, and nothing of its group is left."""
        status = self.poll(seconds)
        self.end()
        return status

    def end(self) -> None:
        """End whatever is left of the group, and wait a little for the last that it said."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        self._reader.join(_LAST_WORDS_S)

    def output(self) -> str:
        """What it printed, the first MiB."""
        return bytes(self._kept).decode("utf-8", "replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                return
            self._kept += piece[: _MAX_OUTPUT_BYTES - len(self._kept)]
