"""What stands for mpirun: which arguments reach the real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hvdtrain.horovod import programs

# As horovodrun gives them.
HOROVODRUNS = [
    "--allow-run-as-root", "--tag-output", "-np", "2", "-H", "localhost:2", "-bind-to", "none", "-map-by", "slot",
    "-mca", "pml", "ob1", "-mca", "btl", "^openib", "-mca", "btl_tcp_if_include", "lo",
    "-x", "NCCL_SOCKET_IFNAME=lo", "-x", "HVDTRAIN_MPIRUN", "-x", "PATH", "/env/bin/python",
]  # fmt: skip
KEPT = ["-np", "2", "-H", "localhost:2", "-bind-to", "none", "-map-by", "slot"]


def real_ones(folder: Path, *arguments: str) -> list[str]:
    """What a program that prints its arguments gets."""
    variables = programs.write_mpirun(folder, "/bin/echo", {"btl": "^openib,uct,ofi"})
    command = [str(folder / "mpirun"), *arguments]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    ).stdout.split()


def test_parameters_take_the_place_of_horovodruns(tmp_path: Path) -> None:
    worker = ["-m", "hvdtrain.worker", "--", "train.py", "-mca", "btl", "mine"]
    assert real_ones(tmp_path, *HOROVODRUNS, *worker) == [
        "-mca", "btl", "^openib,uct,ofi", "--allow-run-as-root", *KEPT, "-x", "PATH", "/env/bin/python", *worker,
    ]  # fmt: skip


def test_a_command_without_hvdtrains_worker_keeps_its_tags(tmp_path: Path) -> None:
    assert real_ones(tmp_path, *HOROVODRUNS, "-c", "pass") == [
        "-mca", "btl", "^openib,uct,ofi", "--allow-run-as-root", "--tag-output", *KEPT, "-x", "PATH",
        "/env/bin/python", "-c", "pass",
    ]  # fmt: skip


@pytest.mark.parametrize("question", ["--version", "--help"])
def test_a_question_is_passed_on(tmp_path: Path, question: str) -> None:
    assert real_ones(tmp_path, question, "-q") == [question, "-q"]


def test_the_stand_in_is_its_users_alone(tmp_path: Path) -> None:
    programs.write_mpirun(tmp_path, "/bin/echo", {})
    assert (tmp_path / "mpirun").stat().st_mode & 0o777 == 0o700
