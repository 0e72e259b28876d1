"""Dialogues with many hosts at once: one process for each, one event loop, and no host can hold up the others."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain import processes

# Logins under way at once: more would only wait for each other, and sshd's own host is no faster for it.
MAX_STARTING = 128
_MAX_ANSWER_BYTES = 16 << 20
# What a login shell may print before the dialogue begins.
_MAX_BANNER_BYTES = 256 << 10
_KEPT_STDERR_BYTES = 16 << 10
_READ_BYTES = 64 << 10


@dataclass(frozen=True)
class HostFailure:
    """Why a host gave no answer.

    Attributes:
        kind: ``start`` (the command can't be run), ``ended`` (it ended early), ``timeout``, ``garbage`` (it says
            what is no answer), ``too-much`` (its answer has no end) or ``refused`` (the probe says that it can't).
        text: a sentence.
        exit_status: of the command, if it has ended by itself; negative for a signal.
        stderr: the end of what the command printed there.
    """

    kind: str
    text: str
    exit_status: int | None = None
    stderr: str = ""


Answer = dict[str, Any]
Outcome = Answer | HostFailure


@dataclass
class _Host:
    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    failure: HostFailure | None = None
    unsent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    banner_bytes: int = 0
    asked: int | None = None
    deadline: float = 0.0
    sent_unix_s: float = 0.0
    answered_unix_s: float = 0.0


class Session:
    """The dialogues, kept open until `close`; use it in a ``with`` statement.

    Args:
        commands: for each host the argv of the process that is talked with, such as ssh with `probe_command`.
        greeting: what each process is sent first, such as `probe_sources`.
        max_starting: processes at once that have not answered yet.
    """

    def __init__(
        self, commands: Mapping[str, Sequence[str]], greeting: bytes = b"", max_starting: int = MAX_STARTING
    ) -> None:
        self._hosts = {name: _Host(name, command) for name, command in commands.items()}
        self._greeting = greeting
        self._max_starting = max_starting
        self._selector = selectors.DefaultSelector()
        self._number = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self,
        requests: Mapping[str, Answer],
        timeout_s: float,
        on_done: Callable[[str, Outcome], None] | None = None,
    ) -> dict[str, Outcome]:
        """Send each host its request and give what each answered.

        A host that failed is out: its process is ended and later requests get the same failure.

        Args:
            requests: by host, each with ``ask`` and what belongs to it.
            timeout_s: for each host, from its own start.
            on_done: called for each host as soon as it is done.
        """
        self._number += 1
        waiting = [self._hosts[name] for name in reversed(list(requests))]
        asked: dict[str, _Host] = {}
        outcomes: dict[str, Outcome] = {}

        def done(host: _Host, outcome: Outcome) -> None:
            asked.pop(host.name, None)
            host.asked = None
            outcomes[host.name] = outcome
            if on_done:
                on_done(host.name, outcome)

        while waiting or asked:
            while waiting and len(asked) < self._max_starting:
                host = waiting.pop()
                asked[host.name] = host
                self._send(host, requests[host.name], timeout_s)
                if host.failure:
                    done(host, host.failure)
            for host, outcome in self._turn(asked):
                done(host, outcome)
        return outcomes

    def round_trip(self, host: str) -> tuple[float, float]:
        """When the last request was sent and its answer was there, Unix seconds of this machine."""
        return self._hosts[host].sent_unix_s, self._hosts[host].answered_unix_s

    def close(self) -> None:
        """End every process that is left; those on the hosts end with their standard input."""
        for host in self._hosts.values():
            if host.process:
                self._end(host)
        self._selector.close()

    def _send(self, host: _Host, request: Answer, timeout_s: float) -> None:
        if host.process is None and host.failure is None:
            self._start(host)
        if host.failure or host.process is None:
            return
        host.asked = self._number
        host.deadline = time.monotonic() + timeout_s
        host.sent_unix_s = time.time()
        host.unsent += json.dumps({"id": self._number, **request}).encode() + b"\n"
        self._write(host)

    def _start(self, host: _Host) -> None:
        try:
            host.process = subprocess.Popen(
                host.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=processes.end_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            host.failure = HostFailure("start", f"{host.command[0]} can't be run: {error.strerror}")
            return
        host.unsent += self._greeting
        for stream in (host.process.stdin, host.process.stdout, host.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._selector.register(host.process.stdout, selectors.EVENT_READ, (host, "out"))  # type: ignore[arg-type]
        self._selector.register(host.process.stderr, selectors.EVENT_READ, (host, "err"))  # type: ignore[arg-type]

    def _turn(self, asked: Mapping[str, _Host]) -> list[tuple[_Host, Outcome]]:
        """Wait for something and give the hosts that it makes done."""
        if not asked:
            return []
        nearest = min(host.deadline for host in asked.values())
        results: dict[str, tuple[_Host, Outcome]] = {}
        for key, _ in self._selector.select(max(0.0, nearest - time.monotonic())):
            host, stream = key.data
            outcome = self._event(host, stream)
            if outcome is not None and host.name in asked:
                results[host.name] = (host, outcome)
        now = time.monotonic()
        for host in asked.values():
            if now >= host.deadline and host.name not in results:
                failure = self._fail(host, "timeout", "it did not answer in time")
                results[host.name] = (host, failure)
        return list(results.values())

    def _event(self, host: _Host, stream: str) -> Outcome | None:
        if host.process is None or host.failure:
            return None
        if stream == "in":
            self._write(host)
            return None
        pipe = host.process.stdout if stream == "out" else host.process.stderr
        assert pipe is not None
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        if stream == "err":
            host.stderr = (host.stderr + data)[-_KEPT_STDERR_BYTES:]
            if not data:
                self._selector.unregister(pipe)
            return None
        if not data:
            return self._fail(host, "ended", "it ended before it answered")
        host.received += data
        # Whole lines only are looked at: searching all that is there again and again would take long.
        return self._answer(host) if b"\n" in data or len(host.received) > _MAX_ANSWER_BYTES else None

    def _answer(self, host: _Host) -> Outcome | None:
        *lines, rest = bytes(host.received).split(b"\n")
        host.received = bytearray(rest)
        for line in lines:
            answer = _parsed(line)
            if answer is None or answer.get("id") is None:
                host.banner_bytes += len(line) + 1
            elif host.asked is None or answer["id"] != host.asked:
                return self._fail(host, "garbage", "it answered what it wasn't asked")
            else:
                host.answered_unix_s = time.time()
                if "failed" in answer:
                    return HostFailure("refused", str(answer["failed"])[:1000], stderr=_words(host.stderr))
                return answer
        if host.banner_bytes > _MAX_BANNER_BYTES:
            return self._fail(host, "garbage", "it prints what is no answer")
        if len(host.received) > _MAX_ANSWER_BYTES:
            return self._fail(host, "too-much", f"its answer is longer than {_MAX_ANSWER_BYTES >> 20} MiB")
        return None

    def _write(self, host: _Host) -> None:
        assert host.process is not None
        stdin = host.process.stdin
        assert stdin is not None
        try:
            while host.unsent:
                del host.unsent[: os.write(stdin.fileno(), host.unsent[:_READ_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            # Its end is told by its other streams.
            host.unsent.clear()
        waits = stdin in self._selector.get_map()
        if host.unsent and not waits:
            self._selector.register(stdin, selectors.EVENT_WRITE, (host, "in"))
        elif not host.unsent and waits:
            self._selector.unregister(stdin)

    def _fail(self, host: _Host, kind: str, text: str) -> HostFailure:
        status = self._end(host, patience_s=1.0 if kind == "ended" else 0.0)
        host.failure = HostFailure(kind, text, status, _words(host.stderr))
        return host.failure

    def _end(self, host: _Host, patience_s: float = 0.0) -> int | None:
        """End the host's process and all of its group; its exit status if it ended by itself."""
        process = host.process
        assert process is not None
        host.process = None
        status = None
        if patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr and status is not None:
            with contextlib.suppress(OSError):
                host.stderr = (host.stderr + os.read(process.stderr.fileno(), _READ_BYTES))[-_KEPT_STDERR_BYTES:]
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                if stream in self._selector.get_map():
                    self._selector.unregister(stream)
                stream.close()
        host.received.clear()
        host.unsent.clear()
        return status


def clock_offsets(session: Session, hosts: Sequence[str], timeout_s: float, samples: int = 3) -> dict[str, Any]:
    """How far each host's clock is ahead of this machine's: ``{host: {offset_s, error_s}}`` or its failure.

    As NTP does it: the answer's time belongs to the middle of the round trip, half of which is the error's bound, and
    the quickest round trip counts.
    """
    found: dict[str, Any] = {}
    for _ in range(samples):
        for host, answer in session.ask({host: {"ask": "clock"} for host in hosts}, timeout_s).items():
            if isinstance(answer, HostFailure):
                found[host] = answer
                continue
            sent, received = session.round_trip(host)
            sample = {"offset_s": answer["time_unix_s"] - (sent + received) / 2, "error_s": (received - sent) / 2}
            if host not in found or sample["error_s"] < found[host]["error_s"]:
                found[host] = sample
    return found


def _parsed(line: bytes) -> Answer | None:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _words(stderr: bytearray) -> str:
    return stderr.decode("utf-8", "replace").strip()
