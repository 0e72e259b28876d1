"""`hvdtrain horovod build` for real, in an environment of its own on top of this one's frameworks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from horovod_parts import guard, headers, made_frameworks, program, toolchain
from real_processes import heed_interrupts

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import source
from hvdtrain.horovod.edits import EDITS, apply_edits
from hvdtrain.horovod.toolchain import Tool, inspect_toolchain

pytestmark = [pytest.mark.build, pytest.mark.timeout(3000)]
ROOT = Path(__file__).parents[1]


class Environment:
    """A virtual environment that sees this one's packages, but installs into itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.python = folder / "bin" / "python"
        self.packages = Path(
            subprocess.run(
                [self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                check=True, capture_output=True, text=True,
            ).stdout.strip()
        )  # fmt: skip
        (self.packages / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        self.variables = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def hvdtrain(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, "-m", "hvdtrain", *arguments],
            env=self.variables | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )

    def findings(self) -> tuple[int, dict[str, Any]]:
        done = self.hvdtrain("horovod", "check", "--format", "json")
        return done.returncode, {part["part"]: part for part in json.loads(done.stdout)["parts"]}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    if "torch" not in {framework.name for framework in inspect_toolchain().frameworks}:
        pytest.skip("PyTorch isn't installed")
    return Environment(tmp_path_factory.mktemp("build") / "env")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source.download(tmp_path_factory.mktemp("package"))


def test_the_edits_fit_the_real_sources(tmp_path: Path, package: Path) -> None:
    frameworks = made_frameworks(tmp_path)
    headers(frameworks[0].folder, "ATen/ATen.h", guard("202002L"))
    tools = toolchain(*frameworks, nccl=Tool(Path("/nccl"), "2.27.3"))
    folder = source.unpack(package, tmp_path)
    assert apply_edits(folder, tools) == list(EDITS)
    with pytest.raises(HvdtrainError, match="these aren't the sources of Horovod that the edits are made for"):
        apply_edits(folder, tools)


# Compilers that work as far as CMake looks, and fail at the first file of Gloo's; and one that never works.
@pytest.mark.parametrize(
    ("at_gloo", "elsewhere", "line", "remedy"),
    [
        (
            'echo "/h/types.cc:7:1: error: planted fault" >&2; exit 1',
            'exec g++ "$@"',
            "/h/types.cc:7:1: error: planted fault",
            "see the log for what came before",
        ),
        (
            'ulimit -v 60000; exec g++ "$@"',
            'exec g++ "$@"',
            "memory",
            "memory ran out: build with fewer jobs, MAKEFLAGS=-j1 hvdtrain horovod build",
        ),
        (
            "exit 1",
            "exit 1",
            "is not able to compile a simple test program",
            "the C++ compiler doesn't work: check CXX and CXXFLAGS",
        ),
    ],
    ids=["a fault in the source", "too little memory", "no working compiler"],
)
def test_a_failed_build_shows_the_first_error_and_leaves_no_wheel(
    environment: Environment, tmp_path: Path, package: Path, at_gloo: str, elsewhere: str, line: str, remedy: str
) -> None:
    compiler = program(
        tmp_path,
        "compiler",
        f'case "$*" in --version) exec g++ --version;; *gloo/gloo/*.cc*) {at_gloo};; *) {elsewhere};; esac',
    )
    done = environment.hvdtrain(
        "horovod", "build", "--with", "torch", "--without-mpi", "--sdist", str(package), CXX=str(compiler)
    )
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :]
    assert error.startswith("error: the build failed:\n")
    assert line in error
    assert f"\n  fix: {remedy}\n" in error
    assert len(error.splitlines()) < 10
    log = Path(error.splitlines()[-1].removeprefix("  log: "))
    assert line in log.read_text()
    assert not list((environment.folder / "cache").rglob("*.whl"))


def test_a_full_disk_is_named(environment: Environment, tmp_path: Path, package: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", disk], capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        arguments = ("horovod", "build", "--with", "torch", "--without-mpi", "--sdist", str(package))
        done = environment.hvdtrain(*arguments, TMPDIR=str(disk))
        left = list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)
    assert done.returncode in (1, 3)
    assert "No space left on device" in done.stderr
    assert "(TMPDIR)" in done.stderr
    assert "Traceback" not in done.stderr
    assert left == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_ended_leaves_nothing(
    environment: Environment, tmp_path: Path, package: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [environment.python, "-m", "hvdtrain", "horovod", "build", "--with", "torch", "--sdist", package],
        env=environment.variables | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert process.stderr
    for line in process.stderr:
        if "compiled" in line:
            break
    process.send_signal(number)
    process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    limit = time.monotonic() + 60
    while processes_with(f"TMPDIR={tmp_path}"):
        assert time.monotonic() < limit, processes_with(f"TMPDIR={tmp_path}")
        time.sleep(0.1)
    assert not list((environment.folder / "cache").rglob("*.whl"))
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def processes_with(variable: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            # A process that has ended and waits for its parent has no command line.
            if variable in path.read_text(errors="replace").split("\0"):
                found.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return [command for command in found if command]


def test_a_build_its_cache_and_its_checks(environment: Environment) -> None:
    """In one test, since each part needs the one before."""
    done = environment.hvdtrain("horovod", "build", "--with", "torch", "--without-mpi")
    assert done.returncode == 0, done.stderr
    assert "allreduce of two processes, torch over gloo: ok" in done.stderr
    assert "Horovod 0.28.1 is ready: torch, gloo (" in done.stderr

    status, found = environment.findings()
    assert found["torch"]["ok"] is True
    assert found["mpi"]["ok"] is None
    assert found["tensorflow"]["ok"] is None  # left out on purpose, if it is installed at all
    assert status == 0

    # The same, found in the libraries, as for a Horovod that hvdtrain didn't build.
    record = environment.packages / "horovod" / "hvdtrain_build.py"
    record.rename(record.with_suffix(".hidden"))
    _, read = environment.findings()
    record.with_suffix(".hidden").rename(record)
    assert {part: read[part]["ok"] for part in read} == {part: found[part]["ok"] for part in found}

    started = time.monotonic()
    again = environment.hvdtrain("horovod", "build", "--with", "torch", "--without-mpi")
    assert "this build is installed already" in again.stderr
    subprocess.run([environment.python, "-m", "pip", "uninstall", "-qy", "horovod"], check=True)
    again = environment.hvdtrain("horovod", "build", "--with", "torch", "--without-mpi")
    assert again.returncode == 0
    assert "found in the cache: " in again.stderr
    assert "compiling" not in again.stderr
    assert time.monotonic() - started < 120

    # Another PyTorch, as far as its metadata tells: said before the import fails.
    (environment.packages / "torch-2.99.0.dist-info").mkdir()
    (environment.packages / "torch-2.99.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.99.0\n")
    status, found = environment.findings()
    assert status == 1
    assert found["torch"]["advice"] == "built against another version: hvdtrain horovod build"
    (environment.folder / "job.yaml").write_text("command: [python, -c, pass]\n")
    launched = environment.hvdtrain("launch", "job.yaml")
    assert launched.returncode == 3
    assert "but 2.99.0 is installed" in launched.stderr
    assert "fix: run 'hvdtrain horovod build'" in launched.stderr
