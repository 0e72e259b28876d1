"""The drill's end of `hvdtrain.drill.on_host`: one process of it, on this machine or by ssh on another host."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from hvdtrain import processes
from hvdtrain.drill.on_host import MARK, GoneError, RefusedError
from hvdtrain.errors import StartError
from hvdtrain.plan.plan import LaunchPlan

# From ssh's start to the first answer: a login that asks directories, a Python on a network file system.
ANSWER_S = 60.0
# For what was done to be undone.
_UNDO_S = 20.0
_POLL_S = 0.01
_PROGRAM = "hvdtrain.drill.on_host"


class Hand:
    """One request to one host.

    Args:
        plan: of the launch; says how hosts are reached.
        host: its name there; one without an agent is this machine.
        request: for `hvdtrain.drill.on_host`.
        pause: waits so many seconds; what it raises ends the waiting.
    """

    def __init__(self, plan: LaunchPlan, host: str, request: dict[str, Any], pause: Callable[[float], None]) -> None:
        self._host = host
        self._pause = pause
        self._unread = b""
        # It has said that there is nothing more to come.
        self._is_over = False
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rest
        agent = plan.agents.get(host)
        remote = f"exec {shlex.join([plan.python, '-m', _PROGRAM])}"
        self._process = subprocess.Popen(
            [*agent[:-1], remote] if agent else [sys.executable, "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            # Ctrl-C is for the drill, which then lets go.
            start_new_session=True,
            preexec_fn=processes.end_with_parent(signal.SIGTERM),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._send(json.dumps(request))

    @property
    def pid(self) -> int:
        """Of the process on this machine."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until it has found what the request is about.

        Raises:
            GoneError: it's gone.
            RefusedError: it can't be done there.
            StartError: the host can't be reached.
        """
        self._answer(self._pause, time.monotonic() + ANSWER_S)

    def act(self, within_s: float = ANSWER_S) -> Any:
        """Do it. Returns what the host has to tell. Raises as `wait_until_ready`."""
        self._send("go")
        return self._answer(self._pause, time.monotonic() + within_s)

    def let_go(self) -> str | None:
        """Undo what was done. Returns why it may last; None where it is undone."""
        with contextlib.suppress(OSError):
            self._input.close()
        deadline, fault = time.monotonic() + _UNDO_S, None
        try:
            while not self._is_over:
                self._answer(time.sleep, deadline)
        except RefusedError as error:
            fault = f"{self._host}: {error}"
        except StartError as error:
            fault = str(error)
        except GoneError:
            pass
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._words.close()
        return fault

    def _send(self, line: str) -> None:
        # Its end is noticed by reading.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(line.encode() + b"\n")
            self._input.flush()

    def _answer(self, pause: Callable[[float], None], deadline: float) -> Any:
        while time.monotonic() < deadline:
            data = self._output.read()
            self._unread += data or b""
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                said = line.decode(errors="replace")
                if said.startswith(MARK):
                    return self._take(json.loads(said.removeprefix(MARK)))
            elif data == b"":
                raise StartError(self._last_words(), where=self._host, fix=f"see 'ssh {self._host}'")
            else:
                pause(_POLL_S)
        raise StartError("the drill's helper there doesn't answer", where=self._host, fix=f"see 'ssh {self._host}'")

    def _take(self, answer: dict[str, Any]) -> Any:
        self._is_over = answer["word"] in ("gone", "refused", "undone")
        if answer["word"] == "gone":
            raise GoneError
        if answer["word"] == "refused":
            raise RefusedError(answer["value"])
        return answer["value"]

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        return f"the drill's helper ended there: {lines[-1][:300] if lines else 'without a word'}"


@contextlib.contextmanager
def held(hand: Hand, say: Callable[[str], None]) -> Iterator[Hand]:
    """A hand that is ready, and that lets go at the end, whatever that is; what can't be undone is said.

    Raises:
        GoneError, RefusedError, StartError: as `Hand.wait_until_ready`.
    """
    is_ready = False
    try:
        hand.wait_until_ready()
        is_ready = True
        yield hand
    finally:
        fault = hand.let_go()
        if fault and is_ready:
            say(f"may not be undone: {fault}")
