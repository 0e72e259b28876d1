"""What launcher and workers need from Linux to own the processes that they start. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SEND_TIMEOUT_S = 10.0


@contextlib.contextmanager
def signals_as_events(numbers: Iterable[signal.Signals]) -> Iterator[socket.socket]:
    """A socket that yields a byte, the signal's number, for each signal that arrives, for use in a selector.

    The signals' former handlers are put back at the end.
    """
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        former_descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        # A handler must be there, or the signal's default action comes first.
        former = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            yield receiver
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_descriptor)


def peer_user(connection: socket.socket) -> int:
    """Id of the user who holds the other end of a Unix socket, as the kernel tells it (unix(7), SO_PEERCRED)."""
    credentials = struct.Struct("3i")  # process, user, group
    _, user, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(user)


def listen(name: str) -> socket.socket:
    """A listener in Linux's abstract namespace, which leaves nothing on any disk.

    Raises:
        OSError: somebody has that name.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(socket.SOMAXCONN)
    return listener


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection; None if it is another user's, since the abstract namespace has no permissions."""
    connection, _ = listener.accept()
    if peer_user(connection) != os.getuid():
        connection.close()
        return None
    # At the other end is a wrapper, or what stands for ssh, which always read: a send of little can't block for long.
    connection.settimeout(_SEND_TIMEOUT_S)
    return connection


def end_with_parent(number: signal.Signals) -> Callable[[], None]:
    """A ``preexec_fn`` that makes the kernel send the child this signal when its parent ends, however it ends."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            # The parent ended between fork and prctl.
            os._exit(1)

    return prepare


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that none gets away."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Pids of this process's children, zombies included."""
    paths = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in paths for pid in path.read_text().split()}


def kill_descendants(spare: Iterable[int] = ()) -> None:
    """SIGKILL every descendant but ``spare``'s, generation by generation, and wait for each.

    Needs `adopt_orphans`: the children of a killed process become this process's own and are next.
    """
    spared = set(spare)
    while pids := children() - spared:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
