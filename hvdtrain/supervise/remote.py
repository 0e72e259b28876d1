"""Other hosts' ends of a launch: one ssh connection to each, and what goes over it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvdtrain import __version__, frames, processes
from hvdtrain.errors import StartError
from hvdtrain.remote.ssh import SSH_FAILED, explain, last_words
from hvdtrain.supervise.channel import Worker
from hvdtrain.supervise.events import EventLoop

# From ssh's start to the agent's first words: a login that asks directories, a Python on a network file system.
CONNECT_TIMEOUT_S = 60.0
# An agent says each second that it's there; ssh itself gives a silent host up at about the same time.
SILENCE_S = 15.0
ALIVE_INTERVAL_S = 1.0
_MOST_WORDS = 65536
_SAME_PYTHON = "install the same environment there, or name its Python with 'python' in the job spec"
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Handlers:
    """What a host's events are told to.

    Attributes:
        said: a worker has said these bytes.
        shut: a worker is gone.
        lost: the host can't be reached any more, and why; its workers are shut next.
        ran: what horovodrun or mpirun had run has written these bytes, or has ended with that exit status.
    """

    said: Callable[[Worker, bytes], None]
    shut: Callable[[Worker], None]
    lost: Callable[[RemoteHost, str], None]
    ran: Callable[[int, bytes, int | None], None] = lambda number, output, code: None


class RemoteHost:
    """The connection to one host's agent.

    Args:
        name: the host's, for messages.
        argv: the ssh command that starts its agent.
        loop: in which its events are handled.
        handlers: who is told.
    """

    def __init__(self, name: str, argv: tuple[str, ...], loop: EventLoop, handlers: Handlers) -> None:
        self.name = name
        self.argv = argv
        self.ready = False
        # What the agent has found there: its NVIDIA GPUs, and the interface by which it reaches the launcher.
        self.gpus = 0
        self.interface: str | None = None
        # Why it is lost, once it is.
        self.fault: str | None = None
        self._loop = loop
        self._handlers = handlers
        self._reader = frames.FrameReader()
        # What came before the agent's first words; None once these have come.
        self._begin: bytearray | None = bytearray()
        self._words = bytearray()
        self._unsent = bytearray()
        self._workers: dict[int, Worker] = {}
        self._runs: set[int] = set()
        self._heard = time.monotonic()
        try:
            self._ssh = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=processes.end_with_parent(signal.SIGTERM),
            )
        except OSError as error:
            raise StartError(f"ssh can't be started: {error.strerror}", fix="install OpenSSH's client") from error
        for stream in (self._ssh.stdin, self._ssh.stdout, self._ssh.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        loop.on_readable(self._ssh.stdout, self._hear)
        loop.on_readable(self._ssh.stderr, self._hear_words)

    @property
    def words(self) -> str:
        """What ssh, or Python on the host, has said on standard error."""
        return self._words.decode(errors="replace")

    @property
    def ssh_status(self) -> int | None:
        """Exit status of ssh, None while it runs."""
        return self._ssh.poll()

    def set_up(self, channel: str, directory: str, environment: Mapping[str, str], launcher: str | None) -> None:
        """Tell the agent what it needs to know; it answers that it's ready, or why it can't be.

        Args:
            channel: name of the socket that workers connect to.
            directory: where commands run.
            environment: their variables.
            launcher: this machine's address as the hosts see it, where it's known.
        """
        setup = {"channel": channel, "directory": directory, "environment": dict(environment), "launcher": launcher}
        self._send(frames.pack_json(frames.SETUP, setup))

    def run(self, number: int, command: str) -> None:
        """Have a shell run a command in the working directory."""
        if self.fault is not None:
            self._handlers.ran(number, b"", SSH_FAILED)
            return
        self._runs.add(number)
        self._send(frames.pack_json(frames.RUN, {"run": number, "command": command}))

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a run's process group."""
        if number in self._runs:
            self._send(frames.pack_numbered(frames.SIGNAL, number, bytes([what])))

    def tick(self, now: float) -> None:
        """Say that the supervisor is there, and see whether the agent is."""
        if self.fault is None and self.ready:
            self._send(frames.pack(frames.ALIVE, b""))
            if now - self._heard > SILENCE_S:
                self._lose(f"nothing has been heard of it for {SILENCE_S:.0f} s")

    def close(self) -> None:
        """End the connection, and with it everything that the agent has started."""
        for stream in (self._ssh.stdout, self._ssh.stderr):
            with suppress(ValueError):
                self._loop.forget(stream)
        for stream in (self._ssh.stdin, self._ssh.stdout, self._ssh.stderr):
            assert stream is not None
            with suppress(OSError):
                stream.close()

    def wait(self, seconds: float) -> None:
        """Wait until a closed connection has ended; it is ended after that time, in seconds."""
        try:
            self._ssh.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()

    # --- events ------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        assert self._ssh.stdout is not None
        data = self._ssh.stdout.read(_CHUNK)
        if data is None:
            return
        if not data:
            self._loop.forget(self._ssh.stdout)
            self._hear_words()
            self._lose(f"its connection has ended{last_words(self.words)}")
            return
        self._heard = time.monotonic()
        try:
            for kind, payload in self._reader.feed(self._after_mark(data)):
                self._on_frame(kind, payload)
        except (frames.ChannelError, ValueError, KeyError, TypeError):
            self._lose("it says what no agent says")

    def _after_mark(self, data: bytes) -> bytes:
        """What an agent says, without what its login shell has said before."""
        if self._begin is None:
            return data
        self._begin += data
        before, mark, after = bytes(self._begin).partition(frames.AGENT_MARK)
        if mark:
            self._begin = None
            return after
        if len(before) > _MOST_WORDS:
            raise frames.ChannelError("no agent")
        return b""

    def _hear_words(self) -> None:
        assert self._ssh.stderr is not None
        data = self._ssh.stderr.read(_CHUNK)
        if data is None:
            return
        if not data:
            self._loop.forget(self._ssh.stderr)
        self._words = (self._words + data)[-_MOST_WORDS:]

    def _on_frame(self, kind: bytes, payload: bytes) -> None:
        if kind == frames.READY:
            self._on_ready(json.loads(payload))
        elif kind == frames.ALIVE:
            return
        else:
            number, rest = frames.numbered(payload)
            self._on_numbered(kind, number, rest)

    def _on_ready(self, message: dict[str, Any]) -> None:
        if message["fault"]:
            self._lose(str(message["fault"]))
        elif message["version"] != __version__:
            self._lose(f"its hvdtrain is {message['version']!s:.40}, and the launcher's is {__version__}")
        else:
            self.ready, self.gpus = True, int(message["gpus"])
            self.interface = message["interface"]

    def _on_numbered(self, kind: bytes, number: int, rest: bytes) -> None:
        if kind == frames.OPEN:
            self._workers[number] = Worker(_Line(self, number), host=self.name)
        elif kind == frames.DATA and number in self._workers:
            self._handlers.said(self._workers[number], rest)
        elif kind == frames.SHUT and number in self._workers:
            self._handlers.shut(self._workers.pop(number))
        elif kind == frames.OUT and number in self._runs:
            self._handlers.ran(number, rest, None)
        elif kind == frames.EXIT and number in self._runs:
            self._runs.discard(number)
            self._handlers.ran(number, b"", int(json.loads(rest)["code"]))

    def _lose(self, why: str) -> None:
        """The host is gone: so are its workers, and whatever ran there."""
        if self.fault is not None:
            return
        self.fault = why
        with suppress(OSError):
            self._ssh.kill()
        self._handlers.lost(self, why)
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            self._handlers.shut(worker)
        for number in sorted(self._runs):
            self._handlers.ran(number, b"", SSH_FAILED)
        self._runs.clear()

    # --- to the agent ------------------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        """Send now what the pipe takes, and the rest as soon as it takes more."""
        if self.fault is not None:
            return
        waiting = bool(self._unsent)
        self._unsent += frame
        if not waiting:
            self._flush()

    def _flush(self) -> None:
        assert self._ssh.stdin is not None
        try:
            while self._unsent:
                written = os.write(self._ssh.stdin.fileno(), self._unsent)
                del self._unsent[:written]
        except BlockingIOError:
            self._loop.after(0.01, self._flush)
        except OSError:
            # Its end is noticed by reading.
            self._unsent.clear()

    def say(self, number: int, frame: bytes) -> None:
        """Send a worker of this host a frame."""
        self._send(frames.pack_numbered(frames.DATA, number, frame))

    def shut(self, number: int) -> None:
        """Close a worker's channel, which ends its command."""
        if self._workers.pop(number, None) is not None:
            self._send(frames.pack_numbered(frames.SHUT, number))


@dataclass(frozen=True)
class _Line:
    """A worker's channel by way of its host's agent."""

    host: RemoteHost
    number: int

    def send(self, frame: bytes) -> None:
        self.host.say(self.number, frame)

    def close(self) -> None:
        self.host.shut(self.number)


def start_fault(host: RemoteHost, python: str) -> StartError:
    """Why a host's agent didn't start, from what ssh or its Python said."""
    words, status, there = host.words, host.ssh_status, f"{host.name}:{python}"
    if status == SSH_FAILED and "hvdtrain" not in words:
        fault = explain(host.name, words)
        return StartError(f"{host.name} can't be reached: {fault.what}", where=host.name, fix=fault.fix)
    if status in (126, 127) or "No such file or directory" in words or "not found" in words:
        return StartError("the Python that the launch uses isn't there", where=there, fix=_SAME_PYTHON)
    if "No module named" in words:
        return StartError("its Python has no hvdtrain", where=there, fix=_SAME_PYTHON)
    what = f"{host.fault or 'no answer'}{last_words(words)}"
    return StartError(what, where=host.name, fix=f"see 'ssh {host.name}'")
