"""The supervisor's end of the channel: a Unix socket that every worker connects to, and what they say there."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from hvdtrain import frames, processes
from hvdtrain.heartbeat import Beat
from hvdtrain.supervise.lines import LineAssembler

# Lines of a rank that are kept to show why it failed.
KEPT_LINES = 200


@dataclass(frozen=True)
class Report:
    """An exception that a rank's Python didn't handle, as that Python told it (`hvdtrain/worker/inject`).

    Attributes:
        time: when, Unix seconds of its host.
        exception: the traceback's last line.
        traceback: its lines.
    """

    time: float
    exception: str
    traceback: tuple[str, ...]


@dataclass(frozen=True)
class End:
    """How a worker's command ended.

    Attributes:
        code: its exit status, negative for a signal.
        stopped: whether it had been told to end, by the supervisor, horovodrun or mpirun.
        oom: whether the kernel ended processes of its host for lack of memory while it ran.
        report: the exception that ended it, where it is known.
    """

    code: int
    stopped: bool
    oom: bool
    report: Report | None


class Line(Protocol):
    """The way to a worker."""

    def send(self, frame: bytes) -> None:
        """Send a frame; a worker that is gone is noticed by what comes from it."""

    def close(self) -> None:
        """End the channel, and with it the worker."""


@dataclass(frozen=True)
class SocketLine:
    """The way to a worker, or to what stands for ssh, on this machine."""

    socket: socket.socket

    def send(self, frame: bytes) -> None:
        """Send a frame."""
        with suppress(OSError):
            self.socket.sendall(frame)

    def receive(self) -> bytes:
        """What can be read now; nothing at the connection's end."""
        try:
            return self.socket.recv(1 << 20)
        except OSError:
            return b""

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


@dataclass
class Worker:
    """One connected worker, and what is known of its rank."""

    line: Line
    reader: frames.FrameReader = field(default_factory=frames.FrameReader)
    rank: int | None = None
    host: str = ""
    pid: int = 0
    # The host that it is for Horovod.
    alias: str = ""
    # Somebody else than the supervisor has told it to end.
    ending: bool = False
    ended: bool = False
    streams: dict[bytes, LineAssembler] = field(
        default_factory=lambda: {frames.OUT: LineAssembler(), frames.ERR: LineAssembler()}
    )
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    @property
    def is_remote(self) -> bool:
        """Whether it runs on another host."""
        return not isinstance(self.line, SocketLine)

    def introduce(self, payload: bytes) -> None:
        """Take rank, pid and alias from its HELLO, and the host where only it knows."""
        message = json.loads(payload)
        self.rank, self.pid = int(message["rank"]), int(message["pid"])
        self.host = self.host or str(message["host"])
        self.alias = str(message["alias"])

    def start(self, environment: dict[str, str]) -> None:
        """Let its command begin."""
        self.line.send(frames.pack_json(frames.START, {"environment": environment}))

    def stop(self, number: int, grace_s: float) -> None:
        """End its command with that signal, and by SIGKILL after the grace period, in seconds."""
        self.line.send(frames.pack_json(frames.STOP, {"signal": int(number), "grace_s": grace_s}))

    def dump(self) -> None:
        """Ask for the stacks of its processes, which come as lines of its output."""
        self.line.send(frames.pack(frames.DUMP, b""))


class Listener:
    """Accepts this user's workers on a socket in Linux's abstract namespace, which leaves nothing on any disk."""

    def __init__(self) -> None:
        self.name = f"hvdtrain-{secrets.token_hex(16)}"
        self.socket = processes.listen(self.name)

    def accept(self) -> SocketLine | None:
        """The next who comes, and hasn't said yet who it is; None for another user's process."""
        # The answer to a HELLO carries secrets.
        connection = processes.accept(self.socket)
        return SocketLine(connection) if connection else None

    def close(self) -> None:
        """Take no more workers."""
        self.socket.close()


def beat_message(payload: bytes) -> tuple[Beat, str]:
    """A worker's BEAT: what its rank is doing, and its command's state as the kernel's letter."""
    message = json.loads(payload)
    return Beat(**message["beat"]), str(message["state"])


def end_message(payload: bytes, mask: Callable[[str], str]) -> tuple[End, Beat]:
    """A worker's EXIT, with what ``mask`` makes of the texts of its report."""
    message = json.loads(payload)
    report = message["report"]
    if report is not None:
        traceback = tuple(mask(str(line)) for line in report["traceback"])
        report = Report(float(report["time"]), mask(str(report["exception"])), traceback)
    end = End(int(message["code"]), bool(message["stopped"]), bool(message["oom"]), report)
    return end, Beat(**message["beat"])


def environment_with_secrets(environment: dict[str, str], secrets: tuple[str, ...]) -> dict[str, str]:
    """The workers' environment as it goes over the channel."""
    return environment | {name: os.environ[name] for name in secrets}
