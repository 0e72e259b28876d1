"""The supervisor's end of the channel: a private Unix socket that every worker connects to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain import frames
from hvdtrain.supervise.lines import LineAssembler

# Lines of a rank that are kept to show why it failed.
KEPT_LINES = 200
# Bytes of a Unix socket's path, without the NUL at its end (unix(7)).
_MAX_SOCKET_PATH = 107


@dataclass
class Worker:
    """One connected worker: its socket, and what is known of its rank."""

    connection: socket.socket
    reader: frames.FrameReader = field(default_factory=frames.FrameReader)
    rank: int | None = None
    host: str = ""
    ended: bool = False
    streams: dict[bytes, LineAssembler] = field(
        default_factory=lambda: {frames.OUT: LineAssembler(), frames.ERR: LineAssembler()}
    )
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """The frames that can be read now. The connection's end raises.

        Raises:
            EOFError: the worker is gone.
        """
        try:
            data = self.connection.recv(1 << 20)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        yield from self.reader.feed(data)

    def send(self, frame: bytes) -> None:
        """Send a frame; a worker that is gone is noticed when it's read."""
        try:
            self.connection.sendall(frame)
        except OSError:
            return


class Listener:
    """Accepts workers on a socket in a folder that only this user can enter.

    The folder lies under the temporary directory and not in the run directory, because a Unix socket's path must be
    short; where even that is too long, under ``/tmp``.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hvdtrain-"))
        if len(os.fsencode(self._folder / "channel")) > _MAX_SOCKET_PATH:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix="hvdtrain-", dir="/tmp"))
        self.path = str(self._folder / "channel")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(self.path)
        self.socket.listen(socket.SOMAXCONN)

    def accept(self) -> Worker:
        """The next worker, who hasn't said yet which rank it is."""
        connection, _ = self.socket.accept()
        # Its reader is the wrapper, which always reads: a send of this little can't block for long.
        connection.settimeout(10)
        return Worker(connection)

    def close(self) -> None:
        """Take no more workers and remove the socket."""
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def start_frame(environment: dict[str, str]) -> bytes:
    """What a worker gets before its command starts."""
    return frames.pack_json(frames.START, {"environment": environment})


def stop_frame(signal_number: int) -> bytes:
    """Ends a worker's command with that signal, and by SIGKILL after the worker's grace period."""
    return frames.pack(frames.STOP, str(signal_number).encode())


def hello(payload: bytes) -> tuple[int, str]:
    """Rank and host of a worker's first frame."""
    message = json.loads(payload)
    return int(message["rank"]), str(message["host"])


def environment_with_secrets(environment: dict[str, str], secrets: tuple[str, ...]) -> dict[str, str]:
    """The workers' environment as it goes over the channel."""
    return environment | {name: os.environ[name] for name in secrets}


def exit_message(payload: bytes) -> tuple[int, bool]:
    """How a worker's command ended: its exit status (negative for a signal), and whether it was told to end."""
    message = json.loads(payload)
    return int(message["code"]), bool(message["stopped"])
