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

from hvdtrain.horovod.toolchain import inspect_toolchain

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


def broken_compiler(folder: Path) -> Path:
    """Compiles like the real one, until it comes to Horovod's own files."""
    compiler = folder / "g++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*horovod/common/*.cc*) echo "/h/common.cc:7:1: error: planted fault" >&2; exit 1;;\n'
        "esac\n"
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    return compiler


def test_a_failed_build_shows_the_first_error_and_leaves_no_wheel(environment: Environment, tmp_path: Path) -> None:
    done = environment.hvdtrain("horovod", "build", "--with", "torch", CXX=str(broken_compiler(tmp_path)))
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :]
    assert error.startswith("error: the build failed:\n  /h/common.cc:7:1: error: planted fault\n")
    assert len(error.splitlines()) < 10
    log = Path(error.splitlines()[-1].removeprefix("  log: "))
    assert "planted fault" in log.read_text()
    assert not list((environment.folder / "cache").rglob("*.whl"))


def test_a_build_that_is_interrupted_leaves_nothing(environment: Environment) -> None:
    process = subprocess.Popen(
        [environment.python, "-m", "hvdtrain", "horovod", "build", "--with", "torch"],
        env=environment.variables,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    for line in process.stderr:
        if "compiled" in line:
            break
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 130
    mark = f"XDG_CACHE_HOME={environment.variables['XDG_CACHE_HOME']}"
    left = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_text(errors="replace").split("\0") and (path.parent / "cmdline").read_text():
                left.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    assert left == []


def test_a_build_its_cache_and_its_checks(environment: Environment) -> None:
    """In one test, since each part needs the one before."""
    done = environment.hvdtrain("horovod", "build", "--with", "torch", "--without-mpi")
    assert done.returncode == 0, done.stderr
    assert "allreduce of two processes, torch over gloo: ok" in done.stderr
    assert "Horovod 0.28.1 is ready: torch, gloo (" in done.stderr

    status, found = environment.findings()
    assert found["torch"]["ok"] is True
    assert found["mpi"]["ok"] is None
    has_tensorflow = found["tensorflow"]["now"] != ""
    assert (status, found["tensorflow"]["ok"]) == ((1, False) if has_tensorflow else (0, None))

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
