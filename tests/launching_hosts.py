"""A launch from the first of several namespace hosts, for tests that watch it from outside."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launching import PATIENCE_S, Job, killed
from namespace_hosts import Cluster, NamespaceHost

# In which everything of a job must be gone from all hosts once its launch has ended.
GONE_S = 10


class HostsJob(Job):
    """A job that is launched on the first host of a cluster."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster
        # Tests are about the launch itself; checks of hosts have their own.
        self.settings: dict[str, Any] = {"validate": "none"}

    def write(self, where: str, controller: str, **settings: Any) -> None:
        spec = {"controller": controller, "hosts": {"list": [where]}, **self.settings, **settings}
        (self.folder / "job.yaml").write_text(json.dumps(spec))

    @contextlib.contextmanager
    def started(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        process = self.cluster.hosts[0].popen(
            [sys.executable, "-m", "hvdtrain", "launch", "job.yaml", *options],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with killed(process):
            yield process

    def run_to_end(self, *options: str) -> tuple[int, str]:
        with self.started(*options) as process:
            output, _ = process.communicate(timeout=PATIENCE_S)
            return process.returncode, output

    def until(self, process: subprocess.Popen[str], pattern: str, count: int) -> list[re.Match[str]]:
        """The first lines of the output that match."""
        found, seen = [], []
        assert process.stdout
        for line in process.stdout:
            seen.append(line)
            if match := re.search(pattern, line):
                found.append(match)
                if len(found) == count:
                    return found
        raise AssertionError("".join(seen))

    def processes_on(self, host: NamespaceHost) -> dict[int, str]:
        """What runs on a host beside its sshd, as command lines by process id."""
        pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout.split()
        found = {}
        for pid in map(int, pids):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_of_a_job = re.search(r"hvdtrain|orted|mpirun|train\.py", words)
                if is_of_a_job and not re.match("sshd|.*namespace_hosts", words):
                    found[pid] = words
        return found

    def nothing_is_left(self, seconds: float = GONE_S) -> None:
        deadline = time.monotonic() + seconds
        while left := {host.name: found for host in self.cluster.hosts if (found := self.processes_on(host))}:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
