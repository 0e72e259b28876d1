"""Runs one rank's command, hands its output and its end to the supervisor, and never outlives either.

Whatever ends first takes the rest with it: the command's end ends the wrapper with its exit status; a closed channel,
SIGTERM or SIGINT ends the command, first politely and after a grace period by SIGKILL; and if the wrapper itself is
SIGKILLed, the kernel kills the command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hvdtrain import contract, frames, heartbeat, processes
from hvdtrain.worker import stacks
from hvdtrain.worker.memory import oom_kills

# From the first request to SIGKILL. Shorter than horovodrun's own grace (5 s), which kills the wrapper without asking.
# The supervisor may give more.
GRACE_S = 3.0
BEAT_INTERVAL_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_COMMAND_NOT_FOUND = 127  # as shells say it
_CHUNK = 65536
_INJECT = str(Path(__file__).parent / "inject")


class Wrapper:
    """One rank's command and its line to the supervisor."""

    def __init__(self, channel: socket.socket, environment: dict[str, str]) -> None:
        self._channel = channel
        self._reader = frames.FrameReader()
        self._selector = selectors.DefaultSelector()
        self._page_file = os.memfd_create("hvdtrain-heartbeat")
        os.ftruncate(self._page_file, heartbeat.PAGE)
        self._page = mmap.mmap(self._page_file, heartbeat.PAGE)
        self._report_file = os.memfd_create("hvdtrain-report")
        self._environment = environment | {
            contract.HEARTBEAT: f"/proc/{os.getpid()}/fd/{self._page_file}",
            contract.REPORT: f"/proc/{os.getpid()}/fd/{self._report_file}",
            contract.DUMP: str(contract.DUMP_SIGNAL),
            "PYTHONPATH": os.pathsep.join(filter(None, [_INJECT, environment.get("PYTHONPATH")])),
        }
        self._next_beat = time.monotonic()
        self._oom_kills = oom_kills()
        self._kill_at: float | None = None
        self._killed = False
        self._process: subprocess.Popen[bytes]

    @classmethod
    def connect(cls, name: str) -> Wrapper:
        """Reach the supervisor, say who this is, and take the command's environment."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.connect("\0" + name)
            # Any user could take the name of a supervisor that has ended.
            if processes.peer_user(channel) != os.getuid():
                raise frames.ChannelError("it belongs to another user")
            hello = {
                "rank": contract.rank_of(os.environ),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "alias": os.environ.get("HOROVOD_HOSTNAME", ""),
            }
            channel.sendall(frames.pack_json(frames.HELLO, hello))
            kind, start = frames.receive(channel)
        except (OSError, frames.ChannelError) as error:
            sys.exit(f"hvdtrain.worker: no supervisor at {name}: {error}")
        if kind != frames.START:
            sys.exit(128 + signal.SIGTERM)
        # HOROVOD_RANK and its like come from horovodrun, so what the supervisor sends goes on top of what is there.
        environment = {**os.environ, **start["environment"]}
        del environment[contract.CHANNEL]
        return cls(channel, environment)

    def run(self, command: list[str]) -> int:
        """Run the command to its end. Returns the exit status, 128 + signal for a signal, as a shell does."""
        # Whatever the command leaves behind becomes this process's child, so that it can be found and ended.
        processes.adopt_orphans()
        with processes.signals_as_events(_SIGNALS) as signals:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=processes.end_with_parent(signal.SIGKILL),
                )
            except OSError as error:
                self._send(frames.pack(frames.ERR, f"{command[0]}: {error.strerror}\n".encode()))
                self._send_exit(_COMMAND_NOT_FOUND)
                return _COMMAND_NOT_FOUND
            self._pump(signals)
        code = self._process.returncode
        processes.kill_descendants()
        self._send_exit(code)
        return code if code >= 0 else 128 - code

    def _pump(self, signals: socket.socket) -> None:
        """Carry output until the command has ended and all that it wrote is sent."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        outputs = {self._process.stdout.fileno(): frames.OUT, self._process.stderr.fileno(): frames.ERR}
        for descriptor in outputs:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(signals, selectors.EVENT_READ)
        while self._process.poll() is None:
            for key, _ in self._selector.select(self._patience()):
                if key.fd in outputs:
                    self._forward(key.fd, outputs[key.fd])
                elif key.fileobj is self._channel:
                    self._hear()
                else:
                    self._on_signals(signals.recv(4096))
            self._look_at_the_clock()
        for descriptor, kind in outputs.items():
            while self._forward(descriptor, kind):
                pass

    def _patience(self) -> float:
        until = [self._next_beat]
        if self._kill_at is not None and not self._killed:
            until.append(self._kill_at)
        return max(0.0, min(until) - time.monotonic())

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_INTERVAL_S
            self._send_beat()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _forward(self, descriptor: int, kind: bytes) -> bool:
        """Send what can be read now; False when there is nothing more."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._send(frames.pack(kind, data))
            return True
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)
        return False

    def _hear(self) -> None:
        """What the supervisor wants. The channel's end ends the command."""
        try:
            data = self._channel.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._channel)
            self._stop(signal.SIGTERM, GRACE_S)
            return
        for kind, payload in self._reader.feed(data):
            if kind == frames.STOP:
                message = json.loads(payload)
                self._stop(signal.Signals(message["signal"]), message["grace_s"])
            elif kind == frames.DUMP:
                self._dump()

    def _dump(self) -> None:
        self._send(frames.pack(frames.ERR, stacks.describe(self._process.pid).encode()))
        stacks.ask_for_stacks(self._process.pid)

    def _on_signals(self, numbers: bytes) -> None:
        """Horovodrun or mpirun wants an end, or somebody at this host does."""
        for number in numbers:
            if number != signal.SIGCHLD:
                # Said now: who sends it may SIGKILL this process before the command has ended.
                self._send(frames.pack(frames.ENDING, b""))
                self._stop(signal.Signals(number), GRACE_S)

    def _stop(self, number: signal.Signals, grace_s: float) -> None:
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        if number == signal.SIGKILL:
            self._kill()
        else:
            self._signal_group(number)

    def _kill(self) -> None:
        self._killed = True
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            # A stopped process takes no other signal than SIGKILL before it goes on.
            os.killpg(self._process.pid, signal.SIGCONT)

    # --- to the supervisor -------------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        # A supervisor that is gone is noticed by reading from the channel.
        with contextlib.suppress(OSError):
            self._channel.sendall(frame)

    def _send_beat(self) -> None:
        beat = dataclasses.asdict(heartbeat.read(self._page))
        state = stacks.state_of(self._process.pid)
        self._send(frames.pack_json(frames.BEAT, {"pid": self._process.pid, "state": state, "beat": beat}))

    def _send_exit(self, code: int) -> None:
        message = {
            "code": code,
            "stopped": self._kill_at is not None,
            "oom": oom_kills() > self._oom_kills,
            "report": self._report(),
            "beat": dataclasses.asdict(heartbeat.read(self._page)),
        }
        self._send(frames.pack_json(frames.EXIT, message))

    def _report(self) -> dict[str, Any] | None:
        """The last exception that a Python of this command didn't handle (see `inject`)."""
        size = os.fstat(self._report_file).st_size
        lines = os.pread(self._report_file, size, 0).splitlines()
        with contextlib.suppress(ValueError, IndexError):
            report: dict[str, Any] = json.loads(lines[-1])
            return report
        return None
