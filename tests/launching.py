"""`hvdtrain launch` of scripts on this machine, for tests that watch it from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONTROLLERS = ["gloo", "mpi"]
PATIENCE_S = 180

# Says its process's number, then trains for ever.
TRAINS_ON = """
import os
import horovod.torch as hvd, torch
hvd.init()
print("pid", os.getpid())
while True:
    hvd.allreduce(torch.ones(4), name="x")
"""

# Trains until rank 1 raises.
RAISES = """
import horovod.torch as hvd, torch
hvd.init()
for step in range(1000):
    if step == 3 and hvd.rank() == 1:
        raise ValueError("the data of rank 1 is bad")
    hvd.allreduce(torch.ones(4), name=f"step{step}")
"""


class Job:
    """A spec in a folder of its own, whose command runs a Python script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}

    def arguments(self, script: str, *options: str, controller: str = "gloo", processes: int = 2) -> list[str]:
        (self.folder / "train.py").write_text(script)
        spec = {
            "command": ["python", "train.py"],
            "processes": processes,
            "hosts": {"list": [f"localhost:{processes}"]},
            "controller": controller,
        }
        (self.folder / "job.yaml").write_text(json.dumps(spec))
        return [sys.executable, "-m", "hvdtrain", "launch", "job.yaml", *options]

    def launch(self, script: str, *options: str, **settings: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.arguments(script, *options, **settings),  # type: ignore[arg-type]
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    @contextmanager
    def running(self, script: str, *options: str, **settings: object) -> Iterator[subprocess.Popen[str]]:
        """The launch as a process, with its output merged; killed at the end if it lives on."""
        process = subprocess.Popen(
            self.arguments(script, *options, **settings),  # type: ignore[arg-type]
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with killed(process):
            yield process

    @property
    def run_directory(self) -> Path:
        return self.folder / "runs" / "job" / "latest"

    @property
    def failure(self) -> dict[str, Any]:
        """``failure.json`` of the newest run."""
        return dict(json.loads((self.run_directory / "failure.json").read_text()))

    @property
    def status(self) -> dict[str, Any]:
        """``status.json`` of the newest run."""
        return dict(json.loads((self.run_directory / "status.json").read_text()))

    @property
    def events(self) -> list[dict[str, Any]]:
        """Records of ``events.jsonl`` of the newest run."""
        return [json.loads(line) for line in (self.run_directory / "events.jsonl").read_text().splitlines()]


@contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """At the end the process is killed if it lives on, and what it has written is read."""
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def worker_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    pids: list[int] = []
    assert process.stdout
    for line in process.stdout:
        if match := re.match(r"\[\d+\] pid (\d+)", line):
            pids.append(int(match[1]))
            if len(pids) == count:
                return pids
    raise AssertionError("the launch ended")


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return children + [grandchild for child in children for grandchild in descendants(child)]
