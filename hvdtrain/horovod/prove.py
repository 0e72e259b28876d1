"""Proves an installed Horovod by real two-process allreduces, one for each framework and controller."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.fabric.plan import plan_one_host
from hvdtrain.horovod import programs
from hvdtrain.horovod.guard import guarded
from hvdtrain.horovod.installed import Installed

TIMEOUT_S = 300
_SCRIPTS = {
    "torch": """
import torch, horovod.torch as hvd
hvd.init()
result = hvd.allreduce(torch.arange(1000.0) * (hvd.rank() + 1), op=hvd.Sum)
assert hvd.size() == 2 and torch.equal(result, torch.arange(1000.0) * 3), result
hvd.barrier()
""",
    "tensorflow": """
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
result = hvd.allreduce(tf.range(1000.0) * (hvd.rank() + 1), op=hvd.Sum)
assert hvd.size() == 2 and bool(tf.reduce_all(result == tf.range(1000.0) * 3)), result
hvd.allreduce(tf.zeros(1), name="barrier")
""",
}
# Lines that are shown of a proof that failed.
_TAIL = 12
# Without TensorFlow's own lines; and mpirun needs no ssh for this machine, but fails where there is none.
_QUIET_AND_LOCAL = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMPI_MCA_plm": "isolated"}
# How horovodrun and mpirun mark a worker's lines.
_OF_A_WORKER = re.compile(r"^\[(?:\d+,)?(\d+)\]<std(?:out|err)>:")


@dataclass(frozen=True)
class Proof:
    """Result of one allreduce.

    Attributes:
        framework: ``torch`` or ``tensorflow``.
        controller: ``gloo`` or ``mpi``.
        error: lines of output that show why it failed; empty if it didn't.
    """

    framework: str
    controller: str
    error: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the sums were right on both processes."""
        return not self.error


def proofs(horovod: Installed) -> Iterator[Proof]:
    """The proofs of every framework over every controller, one after the other."""
    for framework in horovod.frameworks:
        for controller in horovod.controllers:
            yield prove(horovod, framework, controller)


def prove(horovod: Installed, framework: str, controller: str) -> Proof:
    """Run two processes that allreduce a tensor of 1,000 numbers, and check the sums."""
    command = [
        str(horovod.horovodrun), "-np", "2", "-H", "localhost:2", f"--{controller}", "--disable-cache",
        sys.executable, "-c", _SCRIPTS[framework],
    ]  # fmt: skip
    # Settings of the user's own jobs, such as another interface, are no part of the question.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    environment |= _QUIET_AND_LOCAL
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        if program := shutil.which("mpirun"):
            environment |= programs.write_mpirun(Path(folder), program, dict(plan_one_host("mpi", {}).mca))
            environment["PATH"] = os.pathsep.join([folder, environment["PATH"]])
        return _proof(framework, controller, command, environment)


def _proof(framework: str, controller: str, command: list[str], environment: dict[str, str]) -> Proof:
    with guarded(command, environment) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Proof(framework, controller, (f"no result within {TIMEOUT_S} s",))
    if process.returncode == 0:
        return Proof(framework, controller, ())
    return Proof(framework, controller, _evidence(output) or (f"horovodrun ended with status {process.returncode}",))


def _evidence(output: str) -> tuple[str, ...]:
    """The last lines of one worker, or of horovodrun where no worker said anything."""
    lines = [line for line in output.splitlines() if line.strip()]
    by_worker: dict[str, list[str]] = {}
    for line in lines:
        if match := _OF_A_WORKER.match(line):
            by_worker.setdefault(match[1], []).append(line[match.end() :])
    return tuple(max(by_worker.values(), key=len, default=lines)[-_TAIL:])
