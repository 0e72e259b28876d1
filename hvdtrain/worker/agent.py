"""``python -m hvdtrain.worker.agent``: one host's end of a launch from another machine.

Its standard input and output are an ssh connection to the supervisor. It runs what horovodrun or mpirun wants run on
this host, takes the host's workers as the supervisor itself does on its own machine, and carries what they say. When
the connection ends, or nothing has been heard for a while, everything that it started ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain import __version__, contract, frames, processes

ALIVE_INTERVAL_S = 1.0
# A machine that is cut off keeps its connections for hours. A supervisor that is only stopped for a while (Ctrl-Z)
# may come back within this time.
SILENCE_S = 60.0
# For workers to end by themselves, a little longer than their own grace.
_GRACE_S = 5.0
_CHUNK = 65536
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
# An interface's address (netdevice(7)).
_SIOCGIFADDR = 0x8915
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Agent:
    """One host's runs and workers, in one thread."""

    def __init__(self, setup: dict[str, Any], reader: frames.FrameReader) -> None:
        self._environment = {**os.environ, **setup["environment"], contract.CHANNEL: setup["channel"]}
        self._reader = reader
        self._selector = selectors.DefaultSelector()
        self._runs: dict[int, subprocess.Popen[bytes]] = {}
        self._workers: dict[int, socket.socket] = {}
        self._next_worker = 0
        self._heard = time.monotonic()
        self._next_alive = 0.0
        self._over = False
        self._listener = processes.listen(setup["channel"])

    def serve(self) -> None:
        """Do what the supervisor wants until the connection ends, then end everything."""
        processes.adopt_orphans()
        os.set_blocking(0, False)
        with processes.signals_as_events(_SIGNALS) as signals, contextlib.suppress(BrokenPipeError):
            self._on_readable(0, self._hear)
            self._on_readable(self._listener, self._accept)
            self._on_readable(signals, lambda: self._on_signals(signals))
            while not self._over:
                for key, _ in self._selector.select(ALIVE_INTERVAL_S):
                    # One event may end what another of the same moment is about.
                    if self._selector.get_map().get(key.fd) == key:
                        key.data()
                self._look_at_the_clock()
        self._end_all()

    # --- the supervisor ----------------------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._over = True
            return
        self._heard = time.monotonic()
        for kind, payload in self._reader.feed(data):
            self._obey(kind, payload)

    def _obey(self, kind: bytes, payload: bytes) -> None:
        if kind == frames.RUN:
            message = json.loads(payload)
            self._run(message["run"], message["command"])
            return
        if kind == frames.ALIVE:
            return
        number, rest = frames.numbered(payload)
        if kind == frames.SIGNAL and number in self._runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._runs[number].pid, rest[0])
        elif kind == frames.DATA and number in self._workers:
            # A worker that is gone is noticed by reading from it.
            with contextlib.suppress(OSError):
                self._workers[number].sendall(rest)
        elif kind == frames.SHUT:
            self._forget_worker(number)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if now >= self._next_alive:
            self._next_alive = now + ALIVE_INTERVAL_S
            _send(frames.pack(frames.ALIVE, b""))
        if now - self._heard > SILENCE_S:
            self._over = True

    # --- what horovodrun or mpirun wants -----------------------------------------------------------------------

    def _run(self, number: int, command: str) -> None:
        run = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
            preexec_fn=processes.end_with_parent(signal.SIGTERM),
        )
        assert run.stdout is not None
        descriptor = run.stdout.fileno()
        os.set_blocking(descriptor, False)
        self._runs[number] = run
        self._on_readable(descriptor, lambda: self._forward(number, descriptor))

    def _forward(self, number: int, descriptor: int) -> bool:
        """Send on what a run has written; False when there is nothing now."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            _send(frames.pack_numbered(frames.OUT, number, data))
        else:
            self._forget(descriptor)
        return bool(data)

    def _on_signals(self, signals: socket.socket) -> None:
        if set(signals.recv(4096)) - {signal.SIGCHLD}:
            self._over = True
        for number, run in list(self._runs.items()):
            if run.poll() is not None:
                assert run.stdout is not None
                while not run.stdout.closed and self._forward(number, run.stdout.fileno()):
                    pass
                self._forget(run.stdout.fileno())
                run.stdout.close()
                del self._runs[number]
                _send(frames.pack_numbered(frames.EXIT, number, json.dumps({"code": run.returncode}).encode()))
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """A daemon that came from a run, such as Open MPI's, is a child of this process now."""
        for pid in processes.children() - {run.pid for run in self._runs.values()}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    # --- this host's workers -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection = processes.accept(self._listener)
        if connection is None:
            return
        number = self._next_worker
        self._next_worker += 1
        self._workers[number] = connection
        _send(frames.pack_numbered(frames.OPEN, number))
        self._on_readable(connection, lambda: self._carry(number, connection))

    def _carry(self, number: int, connection: socket.socket) -> None:
        try:
            data = connection.recv(_CHUNK)
        except OSError:
            data = b""
        if data:
            _send(frames.pack_numbered(frames.DATA, number, data))
        else:
            self._forget_worker(number)
            _send(frames.pack_numbered(frames.SHUT, number))

    def _forget_worker(self, number: int) -> None:
        connection = self._workers.pop(number, None)
        if connection is not None:
            self._forget(connection)
            connection.close()

    # --- helpers -----------------------------------------------------------------------------------------------

    def _on_readable(self, file: Any, action: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, action)

    def _forget(self, file: Any) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(file)

    def _end_all(self) -> None:
        """Workers end when their channel closes; whatever doesn't end in time is killed."""
        self._listener.close()
        for number in list(self._workers):
            self._forget_worker(number)
        for run in self._runs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while processes.children() and time.monotonic() < deadline:
            for pid in processes.children():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
        processes.kill_descendants()


def _send(frame: bytes) -> None:
    """Write a frame as a whole. Raises BrokenPipeError where the connection has ended."""
    view = memoryview(frame)
    while view:
        view = view[os.write(1, view) :]


def main() -> None:
    """Introduce this host, and serve."""
    reader = frames.FrameReader()
    _send(frames.AGENT_MARK)
    kind, setup = b"", b""
    while not kind:
        data = os.read(0, _CHUNK)
        if not data:
            sys.exit("hvdtrain.worker.agent: nobody at the other end")
        # SETUP comes alone: the supervisor says no more before READY.
        kind, setup = next(reader.feed(data), (b"", b""))
    message = json.loads(setup)
    fault = _enter(message)
    agent = None
    if fault is None:
        try:
            agent = Agent(message, reader)
        except OSError:
            fault = "another name of this launch means this host, too"
    hello = {
        "version": __version__,
        "fault": fault,
        "gpus": len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0,
        "interface": _interface_to(message["launcher"]),
    }
    _send(frames.pack_json(frames.READY, hello))
    if agent is not None:
        agent.serve()


def _interface_to(address: str | None) -> str | None:
    """The interface whose address the kernel takes for packets to an IPv4 address."""
    if address is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Of UDP this sends nothing.
        probe.connect((address, 9))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(request[20:24]) == own:
                    return name
    return None


def _enter(setup: dict[str, Any]) -> str | None:
    """Go to the working directory; why it or the folder for temporary files can't be used, where that is so."""
    try:
        os.chdir(setup["directory"])
    except OSError as error:
        return f"the working directory can't be used: {error.strerror}: {setup['directory']}"
    temporary = setup["environment"].get("TMPDIR")
    if temporary and not os.access(temporary, os.W_OK | os.X_OK):
        return f"the folder for temporary files can't be used: TMPDIR={temporary}"
    return None


if __name__ == "__main__":
    main()
