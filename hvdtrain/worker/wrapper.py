"""Runs one rank's command, hands its output and its end to the supervisor, and never outlives either.

Whatever ends first takes the rest with it: the command's end ends the wrapper with its exit status; a closed channel,
SIGTERM or SIGINT ends the command, first politely and after a grace period by SIGKILL; and if the wrapper itself is
SIGKILLed, the kernel kills the command.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain import contract, frames, processes

# From the first request to SIGKILL. Shorter than horovodrun's own grace (5 s), which kills the wrapper without asking.
GRACE_S = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_COMMAND_NOT_FOUND = 127  # as shells say it
_CHUNK = 65536


class Wrapper:
    """One rank's command and its line to the supervisor."""

    def __init__(self, channel: socket.socket, environment: dict[str, str]) -> None:
        self._channel = channel
        self._path = Path(environment.pop(contract.CHANNEL))
        self._environment = environment
        self._reader = frames.FrameReader()
        self._selector = selectors.DefaultSelector()
        self._kill_at: float | None = None
        self._killed = False
        self._process: subprocess.Popen[bytes]

    @classmethod
    def connect(cls, path: str) -> Wrapper:
        """Reach the supervisor, say who this is, and take the command's environment."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.connect(path)
            hello = {"rank": contract.rank_of(os.environ), "host": socket.gethostname(), "pid": os.getpid()}
            channel.sendall(frames.pack_json(frames.HELLO, hello))
            start = frames.receive(channel, frames.START)
        except (OSError, frames.ChannelError) as error:
            sys.exit(f"hvdtrain.worker: no supervisor at {path}: {error}")
        # HOROVOD_RANK and its like come from horovodrun, so what the supervisor sends goes on top of what is there.
        environment = {**os.environ, **start["environment"]}
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
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
        for descriptor, kind in outputs.items():
            while self._forward(descriptor, kind):
                pass

    def _patience(self) -> float | None:
        if self._kill_at is None or self._killed:
            return None
        return max(0.0, self._kill_at - time.monotonic())

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
        """STOP or the channel's end: both end the command."""
        try:
            data = self._channel.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._channel)
            self._remove_channel()
            self._stop(signal.SIGTERM)
            return
        for kind, payload in self._reader.feed(data):
            if kind == frames.STOP:
                self._stop(signal.Signals(int(payload)))

    def _remove_channel(self) -> None:
        """Clean up after a supervisor that was killed and couldn't."""
        with contextlib.suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                self._stop(signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_S
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

    def _send(self, frame: bytes) -> None:
        # A supervisor that is gone is noticed by reading from the channel.
        with contextlib.suppress(OSError):
            self._channel.sendall(frame)

    def _send_exit(self, code: int) -> None:
        self._send(frames.pack_json(frames.EXIT, {"code": code, "stopped": self._kill_at is not None}))
