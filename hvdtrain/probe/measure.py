"""Measurements: TCP between two hosts, the disk under a folder, memory.

``expect`` with ``address``, ``token``, ``streams``, ``warm_up_s``, ``duration_s``, ``limit_s`` → ``port``: for one
    ``exchange``, within ``limit_s``, who knows the token is let in; the token keeps strangers and mistakes away, no
    eavesdropper. Address is one of this host's own.
``exchange`` with the same and ``port``, of the other host, and ``pings``, their number → ``rtt_s``: median of 1-byte
    round trips; ``out`` and ``in``: {bytes: int, seconds: float}, measured at the receiver, one direction after the
    other, without the first ``warm_up_s``; bytes are TCP's payload. Or ``error``: text.
``disk-speed`` with ``folder``, ``size_bytes`` (at most), ``limit_s`` (at most, for each direction) → ``write`` and
    ``read``: {bytes: int, seconds: float}; ``direct``: bool, past the page cache (O_DIRECT). Or ``skipped``, ``error``:
    text. The file has no name while it is there, so nothing of it can be left.
``memory-speed`` with ``size_bytes``, of all buffers, and ``duration_s`` → ``bytes``, ``seconds``, ``threads``: copies
    by one thread on each of at most 32 processors, each thread in memory of its own; bytes read plus bytes written, as
    STREAM's copy counts them. Or ``error``: text.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import queue
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable

from hvdtrain.probe.annotations import Any

_CONTROL, _TO_SERVER, _TO_CLIENT = b"C", b"S", b"R"
_PING, _NO_MORE = b"p", b"."
# A stranger that connects and is silent holds one of the places at the door no longer than this.
_GREETING_S = 2.0
_MAX_AT_THE_DOOR = 32
# The other end is there already and begins at once, unless its machine is busy.
_PATIENCE_S = 2.0
_CHUNK_BYTES = 1 << 20
_MAX_PING_S = 0.25
# Long enough that the kernel keeps several requests at the device at once.
_DISK_CHUNK_BYTES = 8 << 20
_SYNC_BYTES = 32 << 20
_MIN_DISK_BYTES = 16 << 20
# Of a disk's free space and of the memory that is available, no more than one part in so many is used.
_SPARED = 8
_MAX_THREADS = 32
# For the kernel to give out all pages on a busy machine.
_TOUCHED_S = 15.0


# --- TCP ---------------------------------------------------------------------------------------------------------


def expect(request: dict[str, Any]) -> dict[str, Any]:
    """Open a listener for one exchange and serve it in the background."""
    door = _Door(request["address"], request["token"])
    threading.Thread(target=_serve, args=(door, request), daemon=True).start()
    return {"port": door.port}


def exchange(request: dict[str, Any]) -> dict[str, Any]:
    """Measure with the host that expects it."""
    deadline = time.monotonic() + request["limit_s"]
    streams = range(request["streams"])
    try:
        with contextlib.ExitStack() as stack:

            def connected(role: bytes) -> socket.socket:
                return stack.enter_context(_connect(request, role, deadline))

            control = connected(_CONTROL)
            rtt_s = _ping(control, request["pings"])
            _send([connected(_TO_SERVER) for _ in streams], deadline)
            sent = json.loads(_line(control))
            received = _receive([connected(_TO_CLIENT) for _ in streams], request)
    except (OSError, ValueError) as error:
        return {"error": _told(error)}
    return {"rtt_s": rtt_s, "out": sent, "in": received}


class _Door:
    """A listener that lets in who knows the token; each connection says what it is for."""

    def __init__(self, address: str, token: str) -> None:
        self._token = token.encode()
        self._guests: queue.Queue[tuple[bytes, socket.socket]] = queue.Queue()
        self._places = threading.Semaphore(_MAX_AT_THE_DOOR)
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(_place(address, 0))
        self._listener.listen(128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._admit, daemon=True).start()

    def next(self, role: bytes, deadline: float) -> socket.socket:
        """The next that was let in; OSError if there is none in time, or it comes for something else."""
        try:
            found, connection = self._guests.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("nobody came") from None
        if found != role:
            connection.close()
            raise OSError("it came for something else")
        return connection

    def close(self) -> None:
        # Closing alone doesn't end an accept() that is under way.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _admit(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._places.acquire()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        greeting = b""
        deadline = time.monotonic() + _GREETING_S
        try:
            while len(greeting) <= len(self._token):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                piece = connection.recv(len(self._token) + 1 - len(greeting))
                if not piece:
                    raise EOFError
                greeting += piece
            if not hmac.compare_digest(greeting[:-1], self._token):
                raise PermissionError
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_PATIENCE_S)
            self._guests.put((greeting[-1:], connection))
        except (OSError, EOFError):
            connection.close()
        finally:
            self._places.release()


def _serve(door: _Door, request: dict[str, Any]) -> None:
    """The other side of `exchange`; the client tells what goes wrong."""
    deadline = time.monotonic() + request["limit_s"]
    streams = range(request["streams"])
    with contextlib.closing(door), contextlib.suppress(OSError), contextlib.ExitStack() as stack:

        def came(role: bytes) -> socket.socket:
            return stack.enter_context(door.next(role, deadline))

        control = came(_CONTROL)
        while control.recv(1) == _PING:
            control.sendall(_PING)
        received = _receive([came(_TO_SERVER) for _ in streams], request)
        control.sendall(json.dumps(received).encode() + b"\n")
        _send([came(_TO_CLIENT) for _ in streams], deadline)


def _place(address: str, port: int) -> tuple[Any, ...]:
    host, _, scope = address.partition("%")
    return (host, port, 0, socket.if_nametoindex(scope)) if scope else (host, port)


def _connect(request: dict[str, Any], role: bytes, deadline: float) -> socket.socket:
    address = request["address"]
    stream = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        stream.settimeout(max(0.001, min(_PATIENCE_S, deadline - time.monotonic())))
        stream.connect(_place(address, request["port"]))
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(request["token"].encode() + role)
    except OSError:
        stream.close()
        raise
    return stream


def _ping(control: socket.socket, most: int) -> float:
    """Median of the round trips, seconds."""
    times: list[float] = []
    end = time.monotonic() + _MAX_PING_S
    while not times or (len(times) < most and time.monotonic() < end):
        began = time.perf_counter()
        control.sendall(_PING)
        if control.recv(1) != _PING:
            raise OSError("the other host closed the connection")
        times.append(time.perf_counter() - began)
    control.sendall(_NO_MORE)
    return statistics.median(times)


def _line(control: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < 4096:
        piece = control.recv(4096)
        if not piece:
            raise OSError("the other host closed the connection")
        line += piece
    return line


def _send(streams: list[socket.socket], deadline: float) -> None:
    """Send on all streams until the other end closes them: a thread for each, and none of them copies anything."""
    with os.fdopen(os.memfd_create("hvdtrain"), "w+b", buffering=0) as source:
        source.write(bytes(_CHUNK_BYTES))

        def pour(stream: socket.socket) -> None:
            stream.settimeout(None)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_PATIENCE_S), 0))
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline:
                    os.sendfile(stream.fileno(), source.fileno(), 0, _CHUNK_BYTES)

        _all_at_once([lambda stream=stream: pour(stream) for stream in streams])  # type: ignore[misc]


def _receive(streams: list[socket.socket], request: dict[str, Any]) -> dict[str, Any]:
    """Count what comes, from the end of the warm-up on, and close the streams."""
    buffer = bytearray(_CHUNK_BYTES)
    total, begun, first, last = 0, 0.0, 0.0, 0.0
    end = time.monotonic() + _PATIENCE_S
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            stream.setblocking(False)
            selector.register(stream, selectors.EVENT_READ, stream)
        while time.monotonic() < end:
            for key, _ in selector.select(max(0.0, end - time.monotonic())):
                # The kernel drops the data instead of copying it: the link is measured, not this processor.
                size = key.data.recv_into(buffer, 0, socket.MSG_TRUNC)
                now = time.monotonic()
                if size == 0:
                    end = now
                elif not begun:
                    begun, end = now, now + request["warm_up_s"] + request["duration_s"]
                elif first:
                    total, last = total + size, now
                elif now >= begun + request["warm_up_s"]:
                    first = last = now
    for stream in streams:
        # With a reset, so that the sender ends at once and what it has sent already is dropped.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()
    return {"bytes": total, "seconds": last - first}


# --- disk --------------------------------------------------------------------------------------------------------


def disk_speed(request: dict[str, Any]) -> dict[str, Any]:
    """Write a file and read it again."""
    import tempfile

    folder = request["folder"]
    try:
        found = os.statvfs(folder)
        size = min(request["size_bytes"], found.f_bavail * found.f_frsize // _SPARED)
        size -= size % _DISK_CHUNK_BYTES
        if size < _MIN_DISK_BYTES:
            return {"skipped": "there is too little free space"}
        # Without a name, or with one for a moment where the file system has no such files.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, _DISK_CHUNK_BYTES) as buffer:
            # Random, for file systems that compress; and a mapping is aligned as O_DIRECT asks.
            buffer.write(os.urandom(_DISK_CHUNK_BYTES))
            direct = _past_the_cache(file.fileno(), buffer)
            written = _timed(lambda: file.write(buffer), size, request["limit_s"], _syncing(file.fileno()))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            read = _timed(lambda: file.readinto(buffer), written["bytes"], request["limit_s"])
    except OSError as error:
        return {"error": _told(error)}
    return {"write": written, "read": read, "direct": direct}


def _past_the_cache(descriptor: int, buffer: mmap.mmap) -> bool:
    """Whether the file system does without its cache; some take the flag and refuse the first write."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(descriptor, buffer, 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


def _syncing(descriptor: int) -> Callable[[int, bool], None]:
    """Data is on the disk only after this; in pieces, so that a slow disk isn't given more than it can do in time."""

    def sync(done: int, is_last: bool) -> None:
        if is_last or done % _SYNC_BYTES == 0:
            os.fsync(descriptor)

    return sync


def _timed(
    step: Callable[[], int | None],
    size: int,
    limit_s: float,
    after: Callable[[int, bool], None] = lambda done, is_last: None,
) -> dict[str, Any]:
    """Repeat until the size or the time is reached."""
    began = time.monotonic()
    done = 0
    while True:
        moved = step()
        if not moved:
            raise OSError("the file ended early")
        done += moved
        is_last = done >= size or time.monotonic() - began >= limit_s
        after(done, is_last)
        if is_last:
            return {"bytes": done, "seconds": time.monotonic() - began}


# --- memory ------------------------------------------------------------------------------------------------------


def memory_speed(request: dict[str, Any]) -> dict[str, Any]:
    """Copy memory on all processors at once."""
    try:
        import ctypes
    except ImportError as error:
        return {"error": str(error)}
    processors = sorted(os.sched_getaffinity(0))
    # Evenly spread, so that every NUMA node has its part.
    count = min(_MAX_THREADS, len(processors))
    chosen = [processors[place * len(processors) // count] for place in range(count)]
    size = min(request["size_bytes"], _available_bytes() // _SPARED) // (2 * count)
    copied = [(0, 0.0)] * count
    ready = threading.Barrier(count)

    def copy(place: int) -> None:
        # Pages lie on the node of the processor that touches them first.
        os.sched_setaffinity(0, {chosen[place]})
        with mmap.mmap(-1, size) as source, mmap.mmap(-1, size) as target:
            to, of = (ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (target, source))
            ctypes.memset(of, 1, size)
            ctypes.memmove(to, of, size)
            ready.wait(_TOUCHED_S)
            began = time.monotonic()
            done = 0
            while time.monotonic() < began + request["duration_s"]:
                # Python's lock is free meanwhile.
                ctypes.memmove(to, of, size)
                done += 2 * size
            copied[place] = done, time.monotonic() - began

    try:
        _all_at_once([lambda place=place: copy(place) for place in range(count)])  # type: ignore[misc]
    except (OSError, ValueError, threading.BrokenBarrierError) as error:
        return {"error": _told(error)}
    return {"bytes": sum(done for done, _ in copied), "seconds": max(s for _, s in copied), "threads": count}


def _available_bytes() -> int:
    from hvdtrain.probe.system import collect

    return int(collect().get("mem_available_bytes") or 0)


def _all_at_once(tasks: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own; the first one's error is raised when all are done."""
    errors: list[Exception] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # It is raised again in the thread that waits.
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _told(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:300]
