"""Starting ranks by plain horovodrun, and seeing whether processes are gone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from hvdtrain.horovod.guard import guarded

# Before other imports of a script: it then runs as where neither Horovod nor hvdtrain is installed.
WITHOUT_HOROVOD = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("horovod", "hvdtrain"):
            raise ModuleNotFoundError(f"{name} is blocked here")

sys.meta_path.insert(0, Blocked())
"""


# For plain horovodrun.
PLAIN = {**os.environ, "PATH": os.pathsep.join([str(Path(__file__).parent / "programs"), os.environ["PATH"]])}
# For four ranks on two cores.
CROWDED = {
    **PLAIN,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[1]),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # More ranks than cores: Open MPI's would poll without giving way.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def horovodrun(controller: str, processes: int) -> list[str]:
    """horovodrun of the interpreter that runs the tests, on this machine, up to the ranks' command."""
    program = Path(sys.executable).parent / "horovodrun"
    return [str(program), "-np", str(processes), "-H", f"localhost:{processes}", f"--{controller}"]


def python_on_ranks(
    controller: str, processes: int, folder: Path, *arguments: str, env: Mapping[str, str], timeout: float
) -> str:
    """Run Python with these arguments on each rank; returns all output, and fails with it if a rank does."""
    command = [*horovodrun(controller, processes), sys.executable, *arguments]
    # What it starts, mpirun and the ranks, would outlive horovodrun that is killed.
    with guarded(command, env, folder) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"no end within {timeout} s: {error.stdout}")
    assert process.returncode == 0, output[-6000:]
    return output


def heed_interrupts() -> None:
    """For a child's ``preexec_fn``: a shell starts its background jobs, this test run maybe, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def is_running(pid: int) -> bool:
    """Whether the process is there, and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: Iterable[int], seconds: float) -> None:
    """Fail if one of them still runs after that time."""
    deadline = time.monotonic() + seconds
    while living := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"{living} live on"
        select.select([], [], [], 0.02)
