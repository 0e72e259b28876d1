"""Who can reach whom: listeners that say which host they are, and connections to those of other hosts.

``listen`` → ``{"identity": str, "port": int or None, "ports": {"4": port, "6": port}}``: listens on all addresses.
``connect`` with ``targets`` (list of ``{key, address, port, identity}``) and ``timeout_s`` → ``results``: ``{key: {ok:
bool, reason: None or str, rtt_s: float, local_address: str}}``, where ``reason`` is one of ``refused``, ``timeout``,
``unreachable``, ``other-host`` (something else answers at this address) and ``error: …``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time

from hvdtrain.probe.annotations import Any

_IDENTITY = os.urandom(16).hex()
_NONCE_BYTES = 16
# A stranger that connects and is silent holds a thread no longer than this.
_PATIENCE_S = 10.0
_MAX_AT_ONCE = 128
_REASONS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "refused",
    errno.ETIMEDOUT: "timeout",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.EADDRNOTAVAIL: "unreachable",
    errno.EINVAL: "unreachable",
}
_listeners: dict[str, socket.socket] = {}


def listen(request: dict[str, Any]) -> dict[str, Any]:
    """Open the listeners, once; each connection gets back the line that it sent, with this host's identity."""
    for name, family, any_address in (("4", socket.AF_INET, "0.0.0.0"), ("6", socket.AF_INET6, "::")):  # noqa: S104
        if name in _listeners:
            continue
        # A kernel without one of the families is served in the other.
        with contextlib.suppress(OSError):
            listener = socket.socket(family, socket.SOCK_STREAM)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((any_address, int(request.get("port") or 0)))
            listener.listen(1024)
            _listeners[name] = listener
            threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    ports = {name: listener.getsockname()[1] for name, listener in _listeners.items()}
    return {"identity": _IDENTITY, "port": ports.get("4", ports.get("6")), "ports": ports}


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            continue
        threading.Thread(target=_greet, args=(connection,), daemon=True).start()


def _greet(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_PATIENCE_S)
        line = b""
        while not line.endswith(b"\n") and len(line) < 256:
            piece = connection.recv(256)
            if not piece:
                return
            line += piece
        connection.sendall(line.rstrip(b"\n") + b" " + _IDENTITY.encode() + b"\n")


class _Attempt:
    """One connection: it connects, sends a nonce and waits for it to come back with the identity."""

    def __init__(self, target: dict[str, Any], timeout_s: float) -> None:
        self.key = str(target["key"])
        self.expected = target.get("identity")
        self.nonce = os.urandom(_NONCE_BYTES).hex().encode()
        self.received = b""
        self.connected = False
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s
        self.rtt_s: float | None = None
        self.local: str | None = None
        address = str(target["address"])
        host, _, scope = address.partition("%")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        place: tuple[Any, ...] = (host, int(target["port"]))
        if scope:
            place = (*place, 0, int(scope) if scope.isdigit() else socket.if_nametoindex(scope))
        code = self.socket.connect_ex(place)
        if code not in (0, errno.EINPROGRESS):
            self.socket.close()
            raise OSError(code, os.strerror(code))

    def go_on(self) -> dict[str, Any] | None:
        """Do what can be done now; the result when there is one."""
        if not self.connected:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return self.result(_reason(OSError(code, os.strerror(code))))
            self.connected = True
            self.rtt_s = time.monotonic() - self.began
            self.local = self.socket.getsockname()[0]
            self.socket.send(self.nonce + b"\n")
            return None
        piece = self.socket.recv(256)
        self.received += piece
        if piece and not self.received.endswith(b"\n") and len(self.received) < 1024:
            return None
        nonce, _, identity = self.received.decode("ascii", "replace").strip().partition(" ")
        if nonce != self.nonce.decode() or (self.expected is not None and identity != self.expected):
            return self.result("other-host")
        return self.result(None)

    def result(self, reason: str | None) -> dict[str, Any]:
        self.socket.close()
        return {"ok": reason is None, "reason": reason, "rtt_s": self.rtt_s, "local_address": self.local}


def connect(request: dict[str, Any]) -> dict[str, Any]:
    """Try all targets, many at once."""
    timeout_s = float(request.get("timeout_s") or 5.0)
    waiting = list(reversed(request["targets"]))
    results: dict[str, Any] = {}
    selector = selectors.DefaultSelector()
    under_way: dict[int, _Attempt] = {}
    while waiting or under_way:
        while waiting and len(under_way) < _MAX_AT_ONCE:
            _start(waiting.pop(), timeout_s, selector, under_way, results)
        for key, _ in selector.select(0.1):
            _advance(key.data, selector, under_way, results)
        now = time.monotonic()
        for attempt in [attempt for attempt in under_way.values() if now > attempt.deadline]:
            _finish(attempt, attempt.result("timeout"), selector, under_way, results)
    return {"results": results}


def _start(target: dict[str, Any], timeout_s: float, selector: selectors.BaseSelector,
           under_way: dict[int, _Attempt], results: dict[str, Any]) -> None:  # fmt: skip
    try:
        attempt = _Attempt(target, timeout_s)
    except (OSError, ValueError, OverflowError) as error:
        results[str(target["key"])] = {"ok": False, "reason": _reason(error), "rtt_s": None, "local_address": None}
        return
    under_way[id(attempt)] = attempt
    selector.register(attempt.socket, selectors.EVENT_WRITE, attempt)


def _advance(attempt: _Attempt, selector: selectors.BaseSelector, under_way: dict[int, _Attempt],
             results: dict[str, Any]) -> None:  # fmt: skip
    try:
        done = attempt.go_on()
    except OSError as error:
        done = attempt.result("other-host" if attempt.connected else _reason(error))
    if done is None:
        selector.modify(attempt.socket, selectors.EVENT_READ, attempt)
    else:
        _finish(attempt, done, selector, under_way, results)


def _finish(attempt: _Attempt, done: dict[str, Any], selector: selectors.BaseSelector,
            under_way: dict[int, _Attempt], results: dict[str, Any]) -> None:  # fmt: skip
    results[attempt.key] = done
    del under_way[id(attempt)]
    # The socket is closed by now; the selector still knows it by its object.
    selector.unregister(attempt.socket)


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)
    return _REASONS.get(number or 0, f"error: {error}")
