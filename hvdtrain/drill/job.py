"""One launch that a drill starts: its process, its records, and its end with nothing left behind."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from hvdtrain import contract, processes
from hvdtrain.drill.models import Blame
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.supervise.child import start_launch
from hvdtrain.supervise.records import Status
from hvdtrain.supervise.run_directory import LATEST

# So long after a launch has to end no process of it may be left.
GONE_S = 10.0
# Lines of a launch's output that are shown where it failed.
_TAIL = 8


class DrilledJob:
    """A launch as a child process. Needs `processes.adopt_orphans`, so that whatever it loses becomes visible here.

    Args:
        arguments: of `hvdtrain launch`, without ``--runs``.
        name: the job's name.
        folder: for the launch's output and its run directory.
        pause: waits so many seconds.
    """

    def __init__(self, arguments: Sequence[str], name: str, folder: Path, pause: Callable[[float], None]) -> None:
        self._pause = pause
        self._latest = folder / name / LATEST
        self._read_to = 0
        self._spare = processes.children()
        self.output = folder / "launch.log"
        folder.mkdir(parents=True)
        self._process = start_launch(arguments, folder, self.output)
        self.supervisor = psutil.Process(self._process.pid)

    @property
    def run_directory(self) -> Path | None:
        """Of this launch; None before it made one."""
        return self._latest.resolve() if self._latest.exists() else None

    def status(self) -> Status | None:
        """``status.json`` as it is now; None before there is one."""
        try:
            return Status.from_json(json.loads((self._latest / contract.STATUS_FILE).read_text()))
        except FileNotFoundError:
            return None

    def new_events(self) -> list[dict[str, Any]]:
        """The records of ``events.jsonl`` that were added since the last call."""
        try:
            with (self._latest / contract.EVENTS_FILE).open("rb") as file:
                file.seek(self._read_to)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read_to += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def blame(self) -> Blame | None:
        """What ``failure.json`` says; None where there is none."""
        try:
            record = json.loads((self._latest / contract.FAILURE_FILE).read_text())
        except FileNotFoundError:
            return None
        return Blame(record["attempt"], record["kind"], record["rank"], record["host"])

    def plan(self) -> LaunchPlan:
        """Of the launch itself, once it has written its ``plan.json``."""
        return LaunchPlan.from_json(json.loads((self._latest / contract.PLAN_FILE).read_text()))

    @contextmanager
    def beside(self, pid: int) -> Iterator[None]:
        """A child of the drill that isn't of the launch, while it lives."""
        self._spare = self._spare | {pid}
        try:
            yield
        finally:
            self._spare = self._spare - {pid}

    def exit_status(self) -> int | None:
        """Of the launch; None while it runs."""
        return self._process.poll()

    def left(self) -> list[psutil.Process]:
        """Processes of the launch that live, itself included."""
        found = []
        for pid in processes.children() - self._spare:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                family = [process, *process.children(recursive=True)]
                found += [member for member in family if member.status() != psutil.STATUS_ZOMBIE]
        return found

    def last_words(self) -> list[str]:
        """The last lines of the launch's output."""
        return self.output.read_text(errors="replace").splitlines()[-_TAIL:]

    def end(self) -> tuple[str, ...]:
        """End the launch if it runs, quickly. Returns what is left of it after `GONE_S`, as command lines."""
        # The second signal tells it to kill; two of one kind could arrive as one.
        for number in (signal.SIGINT, signal.SIGTERM):
            if self.exit_status() is None:
                self._process.send_signal(number)
                self._pause(0.2)
        deadline = time.monotonic() + GONE_S
        while (self.exit_status() is None or self.left()) and time.monotonic() < deadline:
            self._pause(0.05)
        lines = []
        for process in self.left():
            with suppress(psutil.NoSuchProcess):
                lines.append(f"{process.pid} {shlex.join(process.cmdline()) or process.name()}")
        return tuple(lines)

    def kill(self) -> None:
        """End all of it now, whatever it is doing."""
        if self.exit_status() is None:
            self._process.kill()
            self._process.wait()
        processes.kill_descendants(self._spare)
