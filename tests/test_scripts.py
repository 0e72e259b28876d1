"""scripts/quickstart, scripts/test and what they share, as they run: bash on this machine."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_processes import heed_interrupts

ROOT = Path(__file__).parents[1]
SCRIPTS = ["scripts/quickstart", "scripts/test", "scripts/lib/setup.sh", "scripts/lib/leftovers.sh", ".ci/run"]
# What the search for packages calls itself.
BARE = ["bash", "cut", "id"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHON"}
PATIENCE_S = 60


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the scripts need of the project, with an environment that is this one's."""
    folder = tmp_path / "project with blank"
    for name in ("scripts", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    program(programs / "python", f'exec "{sys.executable}" "$@"')
    program(programs / "hvdtrain", f'exec "{sys.executable}" -m hvdtrain "$@"')
    return folder


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in BARE:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return folder


def arguments(command: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", f". scripts/lib/setup.sh; {command}"]


def bash(command: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that may use what setup.sh defines."""
    return subprocess.run(
        arguments(command),
        cwd=folder,
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def mark_as_set_up(folder: Path) -> None:
    done = bash('echo "$(fingerprint) build,horovod,tasks" >"$STAMP"', folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_is_content(name: str) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck isn't installed")
    done = subprocess.run(["shellcheck", "-x", name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_help_changes_nothing(project: Path, tmp_path: Path, name: str) -> None:
    before = sorted(project.rglob("*"))
    done = subprocess.run([project / "scripts" / name, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: scripts/{name} ")
    assert sorted(project.rglob("*")) == before


def test_versions_are_those_that_the_project_takes() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    done = bash('echo "$TORCH" "$TENSORFLOW"')
    for name, version in zip(("torch", "tensorflow"), done.stdout.split(), strict=True):
        least = re.search(rf'"{name}>=([\d.]+)"', project)
        assert least
        assert tuple(map(int, version.split("."))) >= tuple(map(int, least[1].split(".")))


class TestQuickstart:
    def run(self, project: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [project / "scripts" / "quickstart", *options],
            cwd=folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def test_what_is_set_up_starts_at_once(self, project: Path, tmp_path: Path) -> None:
        mark_as_set_up(project)
        done = self.run(project, tmp_path, "--dry-run", "--set", "controller=nothing")
        launch = ".venv/bin/hvdtrain launch configs/digits-torch.yaml --dry-run --set controller=nothing"
        assert done.stderr.splitlines()[0] == f"==> {launch}"
        # The launch's own status and words, for the options that it was given.
        assert done.returncode == 2
        assert "controller" in done.stderr.splitlines()[1]

    def test_a_job_counts_from_where_the_user_stands(self, project: Path, tmp_path: Path) -> None:
        mark_as_set_up(project)
        (tmp_path / "mine.yaml").write_text("nothing: here\n")
        for folder, name in ((tmp_path, "mine.yaml"), (project / "configs", "../../mine.yaml")):
            done = self.run(project, folder, name)
            assert done.returncode == 2
            assert done.stderr.splitlines()[0] == f"==> .venv/bin/hvdtrain launch {tmp_path}/mine.yaml "
            assert f"{tmp_path}/mine.yaml:1:1: " in done.stderr


def test_the_environment_is_renewed_when_what_it_is_made_from_changes(project: Path) -> None:
    def is_set_up(extras: str, folder: Path = project) -> bool:
        return bash(f"is_set_up {extras}", folder).returncode == 0

    assert not is_set_up("build,horovod,tasks")
    mark_as_set_up(project)
    assert is_set_up("build,horovod,tasks")
    assert not is_set_up("build,horovod,tasks,dev")
    moved = project.rename(project.with_name("moved"))
    assert not is_set_up("build,horovod,tasks", moved)
    moved.rename(project)
    assert is_set_up("build,horovod,tasks")
    with (project / "pyproject.toml").open("a") as file:
        file.write("\n")
    assert not is_set_up("build,horovod,tasks")


def test_an_environment_of_another_folder_is_not_used(project: Path) -> None:
    activate = project / ".venv" / "bin" / "activate"
    activate.write_text("VIRTUAL_ENV='/somewhere/else/.venv'\n")
    assert bash("venv_works", project).returncode == 1
    activate.write_text(f"VIRTUAL_ENV='{project}/.venv'\n")
    assert bash("venv_works", project).returncode == 0
    (project / ".venv" / "bin" / "python").unlink()
    assert bash("venv_works", project).returncode == 1


def test_python_that_will_not_do(project: Path, tmp_path: Path, bare_path: Path) -> None:
    done = bash("set_up none", project, PYTHON="/bin/false")
    assert done.returncode == 3
    assert done.stderr.startswith("error: PYTHON=/bin/false isn't Python 3.10 to 3.13\n")

    program(tmp_path / "other", "echo 3.10.1")
    done = bash("set_up none", project, PYTHON=f"{tmp_path}/other")
    version = ".".join(map(str, sys.version_info[:3]))
    assert done.returncode == 3
    assert done.stderr.startswith(f"error: .venv has Python {version}, and PYTHON={tmp_path}/other is another\n")

    program(bare_path / "python3", '[ "$1" = --version ] && echo Python 3.9.2; exit 1')
    done = bash("find_python", project, PATH=str(bare_path))
    assert done.returncode == 3
    assert done.stderr.startswith("error: python3 is Python 3.9.2, and 3.10 to 3.13 are needed\n")


def test_missing_packages_are_named(bare_path: Path) -> None:
    everything = "g++ make python3 python3-venv python3-dev openmpi-bin libopenmpi-dev openssh-client"
    done = bash("install_system_packages", PATH=str(bare_path))
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        f"==> missing system packages: {everything}",
        f"==> install them with: sudo apt-get update && sudo apt-get install -y {everything}",
        "error: can't go on without g++ make python3 python3-venv python3-dev",
        "  install the packages above and start again",
    ]


def test_without_mpi_it_goes_on(bare_path: Path) -> None:
    for name in ("g++", "make", "python3"):
        program(bare_path / name, "exit 0")
    done = bash('install_system_packages; echo "went on with $python"', PATH=str(bare_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"went on with {bare_path}/python3\n"
    assert "missing system packages: openmpi-bin libopenmpi-dev openssh-client\n" in done.stderr


def test_no_cuda_by_accident() -> None:
    no_gpu = 'has_gpu() { false; }; pip_install() { echo "$@"; false; }'
    done = bash(f"{no_gpu}; install_torch || true; install_tensorflow || true")
    *torch, tensorflow = done.stdout.splitlines()
    assert len(torch) == 2
    assert all(re.fullmatch(r"torch==[\d.]+\+cpu( --extra-index-url \S+/cpu)?", line) for line in torch)
    assert "[and-cuda]" not in tensorflow


class TestStep:
    def test_done(self, tmp_path: Path) -> None:
        done = bash("step 'counting' seq 100000", TMPDIR=str(tmp_path))
        assert done.returncode == 0
        assert re.fullmatch(r"==> counting \.\.\.\n==> counting: done in \d+ s\n", done.stderr)
        assert not list(tmp_path.iterdir())

    def test_failed(self, tmp_path: Path) -> None:
        done = bash("step 'counting' bash -c 'seq 100; exit 7'", TMPDIR=str(tmp_path))
        assert done.returncode == 3
        (log,) = tmp_path.iterdir()
        assert log.read_text().splitlines() == [str(number) for number in range(1, 101)]
        assert done.stderr.splitlines() == [
            "==> counting ...",
            *map(str, range(86, 101)),
            "error: counting failed (status 7)",
            "  command: bash -c seq 100; exit 7",
            f"  log: {log}",
            "  What is done so far is kept: start again when the cause is removed.",
        ]

    def test_interrupted(self, tmp_path: Path) -> None:
        """Ctrl-C ends the script, even where the command takes it for a failure of its own, as pip does."""
        pip = "trap 'exit 1' INT; echo started >&3; while :; do sleep 0.1; done"
        process = subprocess.Popen(
            arguments(f'exec 3>&1; pip() {{ ( {pip} ); }}; step "installing" eval "pip || pip"; echo went on'),
            cwd=ROOT,
            env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
        try:
            assert process.stdout
            assert process.stdout.readline() == "started\n"
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=PATIENCE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert (process.returncode, output) == (130, "")
        assert not list(tmp_path.iterdir())


def test_two_at_once_wait_for_each_other(project: Path) -> None:
    lock = os.open(project, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = subprocess.Popen(
        arguments("set_up build,horovod,tasks"), cwd=project, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    assert process.stderr.readline() == "==> waiting for another set-up in this folder\n"
    mark_as_set_up(project)
    os.close(lock)
    assert process.communicate(timeout=PATIENCE_S)[1] == ""
    assert process.returncode == 0


class TestLeftovers:
    @pytest.fixture
    def sleeper(self) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(["sleep", "300"], env={**os.environ, "SOME_MARK": "7"})
        yield process
        process.kill()
        process.wait()

    def look(self, mark: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return bash(f'. scripts/lib/leftovers.sh; nothing_is_left {mark} "{folder}" 1', SOME_MARK="8")

    def test_a_process(self, tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
        assert self.look("SOME_MARK=77", tmp_path).returncode == 0
        done = self.look("SOME_MARK=7", tmp_path)
        assert done.returncode == 1
        assert done.stderr == f"left running: {sleeper.pid} sleep 300 \n"

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "pytest-of-ada").mkdir()
        assert self.look("SOME_MARK=77", tmp_path).returncode == 0
        (tmp_path / "hvdtrain-x").mkdir()
        done = self.look("SOME_MARK=77", tmp_path)
        assert done.returncode == 1
        assert done.stderr == "left in the temporary folder: hvdtrain-x\n"
