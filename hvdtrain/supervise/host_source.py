"""Where an elastic job's hosts come from while it runs: a hostfile, read again, or a program that prints them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from hvdtrain.errors import InputError
from hvdtrain.hosts.hostfile import parse_hosts, read_hostfile
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.select import select
from hvdtrain.plan.plan import ElasticPlan

DISCOVERY_INTERVAL_S = 5.0
DISCOVERY_TIMEOUT_S = 30.0


class HostSource:
    """Says which hosts there are and how many slots each has, each time that it's asked. Never waits.

    Args:
        plan: what to look at.
        directory: where the discovery program runs.
        environment: its variables.
        tell: is given a sentence where the hosts can't be read; the same one only once.
    """

    def __init__(
        self, plan: ElasticPlan, directory: str, environment: dict[str, str], tell: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._environment = environment
        self._tell = tell
        self._told = ""
        self._hosts: dict[str, Host] = {name: Host(name, slots) for name, slots in plan.slots.items()}
        self._stamp: tuple[int, int, int] | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._begun = 0.0
        self._next = 0.0

    def hosts(self, now: float) -> dict[str, Host]:
        """The hosts at this moment, by name; what was known before where there is no source or it can't be read."""
        if self._plan.discovery:
            self._discover(self._plan.discovery, now)
        elif self._plan.hostfile:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._take(lambda: read_hostfile(Path(str(self._plan.hostfile))))
        return self._hosts

    def close(self) -> None:
        """End a program that still runs."""
        if self._program is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._program.pid, 9)
            self._program.wait()
            self._program = None

    def _look(self) -> tuple[int, int, int] | None:
        with suppress(OSError):
            status = Path(str(self._plan.hostfile)).stat()
            return status.st_mtime_ns, status.st_size, status.st_ino
        return None

    def _discover(self, command: tuple[str, ...], now: float) -> None:
        if self._program is None:
            if now >= self._next:
                self._begin(command, now)
            return
        code = self._program.poll()
        if code is None and now - self._begun < DISCOVERY_TIMEOUT_S:
            return
        self.close()
        self._next = now + DISCOVERY_INTERVAL_S
        assert self._output is not None
        with self._output as output:
            output.seek(0)
            text = output.read(1 << 20).decode(errors="replace")
        if code is None:
            self._say(f"elastic.discovery gave no answer within {DISCOVERY_TIMEOUT_S:g} s")
        elif code != 0:
            self._say(f"elastic.discovery ended with exit status {code}")
        else:
            lines = [line for line in text.splitlines() if line.partition("#")[0].strip()]
            self._take(lambda: parse_hosts(lines, "elastic.discovery"))

    def _begin(self, command: tuple[str, ...], now: float) -> None:
        # A file, not a pipe: what it starts may hold a pipe open for longer than it lives.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 -- closed where it is read
        self._begun = now
        try:
            self._program = subprocess.Popen(
                command,
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            self._next = now + DISCOVERY_INTERVAL_S
            self._say(f"elastic.discovery can't be started: {error.strerror}: {command[0]}")

    def _take(self, read: Callable[[], tuple[Host, ...]]) -> None:
        try:
            hosts = select(read(), self._plan.include, self._plan.exclude, missing_ok=True)
        except InputError as error:
            self._say(f"the hosts stay as they were: {error.problems[0]}")
            return
        self._hosts = {host.name: host for host in hosts}

    def _say(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._tell(text)
