"""Checking Horovod, keeping its wheels and reading a build's log; test_horovod_build.py builds for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from horovod_parts import made_frameworks, toolchain

from hvdtrain.cli import horovod as cli
from hvdtrain.errors import StartError
from hvdtrain.horovod import cache, source
from hvdtrain.horovod import check as checking
from hvdtrain.horovod import installed as installing
from hvdtrain.horovod import prove as proving
from hvdtrain.horovod.check import check
from hvdtrain.horovod.diagnose import first_error
from hvdtrain.horovod.installed import Installed, mismatches
from hvdtrain.horovod.record import make_record, read_record, write_record
from hvdtrain.horovod.toolchain import Framework, Tool, Toolchain


@pytest.fixture
def frameworks(tmp_path: Path) -> list[Framework]:
    return made_frameworks(tmp_path)


# --- the first real error ----------------------------------------------------------------------------------------

NOISE = "[  1%] Building CXX object a.o\n" * 500 + "warning: something deprecated\n"


@pytest.mark.parametrize(
    ("log", "line", "remedy"),
    [
        (
            f"{NOISE}/t/ATen/ATen.h:5:2: error: #error C++17 or later compatible compiler is required to use ATen.\n"
            "    5 | #error C++17\nmake[2]: *** [a.o] Error 1\nsubprocess.CalledProcessError: Command 'cmake' failed\n",
            "/t/ATen/ATen.h:5:2: error: #error C++17 or later compatible compiler is required to use ATen.",
            "see the log for what came before",
        ),
        (
            f"{NOISE}/h/x.cc:3:10: fatal error: mpi.h: No such file or directory\n",
            "/h/x.cc:3:10: fatal error: mpi.h: No such file or directory",
            "install MPI's headers (Debian: libopenmpi-dev), or build --without-mpi",
        ),
        (
            f"{NOISE}/h/x.cc:3:10: fatal error: Python.h: No such file or directory\n",
            "/h/x.cc:3:10: fatal error: Python.h: No such file or directory",
            "install Python's headers (Debian: python3-dev)",
        ),
        (
            f"{NOISE}c++: fatal error: Killed signal terminated program cc1plus\nmake: *** Error 1\n",
            "c++: fatal error: Killed signal terminated program cc1plus",
            "memory ran out: build with fewer jobs, MAKEFLAGS=-j1 hvdtrain horovod build",
        ),
        (
            f"{NOISE}cc1plus: out of memory allocating 65536 bytes after a total of 1234 bytes\n",
            "cc1plus: out of memory allocating 65536 bytes after a total of 1234 bytes",
            "memory ran out: build with fewer jobs, MAKEFLAGS=-j1 hvdtrain horovod build",
        ),
        (
            f"{NOISE}fatal error: error writing to /tmp/c.s: No space left on device\n",
            "fatal error: error writing to /tmp/c.s: No space left on device",
            "free some space in the temporary folder (TMPDIR) and in the cache, then build again",
        ),
        (
            "CMake Error at CMakeLists.txt:9 (cmake_minimum_required):\n"
            "  Compatibility with CMake < 3.5 has been removed from CMake.\n",
            "  Compatibility with CMake < 3.5 has been removed from CMake.",
            "set CMAKE_POLICY_VERSION_MINIMUM=3.5 and build again",
        ),
        (
            f"{NOISE}CMake Error at third_party/x/CMakeLists.txt:3 (foo):\n  Unknown command\n",
            "CMake Error at third_party/x/CMakeLists.txt:3 (foo):",
            "see the log for what came before",
        ),
        (
            f"{NOISE}/usr/bin/ld: a.o: undefined reference to `MPI_Init'\ncollect2: error: ld returned 1\n",
            "/usr/bin/ld: a.o: undefined reference to `MPI_Init'",
            "see the log for what came before",
        ),
        (
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'setuptools'\n",
            "ModuleNotFoundError: No module named 'setuptools'",
            "pip install setuptools wheel packaging",
        ),
        ("nothing that is known\nthe end\n", "nothing that is known", "see the log"),
    ],
)
@pytest.mark.parametrize("indent", ["", "  "], ids=["plain", "indented by pip"])
def test_the_first_real_error(log: str, line: str, remedy: str, indent: str) -> None:
    error = first_error(textwrap.indent(log, indent))
    assert error.lines[0] == line.strip()
    assert error.remedy == remedy
    assert len(error.lines) <= 4


# --- cache and record --------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hvdtrain" / "horovod"


def test_everything_that_is_compiled_against_changes_the_key(
    frameworks: list[Framework], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, flow = frameworks
    tools = toolchain(torch, flow)
    variants = [
        make_record(tools, with_mpi=True),
        make_record(tools, with_mpi=False),
        make_record(toolchain(torch), with_mpi=True),
        make_record(toolchain(Framework("torch", "2.14.0+cpu", torch.folder, cuda=False), flow), with_mpi=True),
        make_record(toolchain(torch, flow, compiler=Tool(Path("/usr/bin/g++"), "g++ 13.2.0")), with_mpi=True),
        make_record(toolchain(torch, flow, mpi=Tool(Path("/usr/bin/mpicxx"), "Open MPI 5.0.1")), with_mpi=True),
        make_record(toolchain(torch, flow, instruction_sets=("avx", "fma")), with_mpi=True),
        make_record(toolchain(torch, flow, cuda=Tool(Path("/cuda"), "13.0")), with_mpi=True),
        make_record(toolchain(torch, flow, python=Tool(Path("/env/bin/python"), "3.12.1")), with_mpi=True),
        make_record(toolchain(torch, flow, nccl=Tool(Path("/usr"), "2.27.3")), with_mpi=True),
        make_record(toolchain(torch, flow, nccl=Tool(Path("/usr"), "2.28.0")), with_mpi=True),
    ]
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    variants.append(make_record(tools, with_mpi=True))
    monkeypatch.delenv("CXXFLAGS")
    assert len({cache.cache_key(record) for record in variants}) == len(variants)
    assert cache.cache_key(make_record(tools, with_mpi=True)) == cache.cache_key(variants[0])
    # A patch release of Python has the same ABI.
    patched = toolchain(torch, flow, python=Tool(Path("/env/bin/python"), "3.11.9"))
    assert cache.cache_key(make_record(patched, with_mpi=True)) == cache.cache_key(variants[0])


def unasked() -> None:
    raise AssertionError("nobody else holds the lock")


def test_a_stored_wheel_is_found(tmp_path: Path, own_cache: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with cache.locked("key", unasked):
        (own_cache / ".key-of-a-killed-build").mkdir()
        assert cache.cached_wheel("key") is None
        for content in ("first", "second"):
            wheel.write_text(content)
            assert cache.store("key", wheel, {"a": 1}).read_text() == content
    found = cache.cached_wheel("key")
    assert found is not None
    assert found.read_text() == "second"
    assert not cache.is_proved("key")
    cache.mark_proved("key")
    assert cache.is_proved("key")
    cache.store("key", wheel, {"a": 1})
    assert not cache.is_proved("key")
    assert sorted(path.name for path in own_cache.iterdir()) == ["key", "key.lock"]


def test_a_second_build_of_the_same_waits_and_says_so(own_cache: Path) -> None:
    code = """if True:
        from hvdtrain.horovod import cache
        with cache.locked("key", lambda: print("waiting", flush=True)):
            print("has it", flush=True)
    """
    with cache.locked("key", unasked):
        second = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert second.stdout
        assert second.stdout.readline() == "waiting\n"
    assert second.communicate(timeout=60)[0] == "has it\n"


def test_the_record_is_read_as_data(tmp_path: Path, frameworks: list[Framework]) -> None:
    record = make_record(toolchain(*frameworks), with_mpi=True)
    (tmp_path / "horovod").mkdir()
    write_record(tmp_path, record)
    assert read_record(tmp_path / "horovod") == record
    for text in ("", "RECORD = __import__('os').getcwd()", "RECORD = [1]", "not python (", "x"):
        (tmp_path / "horovod" / "hvdtrain_build.py").write_text(text)
        assert read_record(tmp_path / "horovod") is None


# --- what is installed, and what no longer matches ---------------------------------------------------------------


def horovod(**parts: Any) -> Installed:
    defaults: dict[str, Any] = {
        "version": "0.28.1",
        "frameworks": {"torch": "2.13.0+cpu"},
        "controllers": ("gloo", "mpi"),
        "nccl": False,
        "horovodrun": Path(sys.executable),
        "record": None,
    }
    return Installed(**(defaults | parts))


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What is installed, for the code that asks."""
    now: dict[str, str | None] = {"torch": "2.13.0+cpu", "tensorflow": None}
    for module in (installing, checking):
        monkeypatch.setattr(module, "framework_version", now.get)
    return now


def test_all_is_well(versions: dict[str, str | None]) -> None:
    assert mismatches(horovod()) == []


@pytest.mark.parametrize(
    ("parts", "now", "fault"),
    [
        ({}, "2.14.1+cpu", "Horovod was built against torch 2.13.0+cpu, but 2.14.1+cpu is installed"),
        ({}, None, "Horovod was built for torch, which isn't installed any more"),
        ({"frameworks": {}}, "2.13.0", "Horovod is installed without any framework's part"),
        ({"horovodrun": Path("/nonexistent")}, "2.13.0", "horovodrun is missing: /nonexistent"),
        (
            {"record": {"python": "3.9", "frameworks": {}}},
            "2.13.0+cpu",
            f"Horovod was built for Python 3.9, but this is {sys.version_info[0]}.{sys.version_info[1]}",
        ),
    ],
)
def test_a_mismatch_is_said(versions: dict[str, str | None], parts: Any, now: str | None, fault: str) -> None:
    versions["torch"] = now
    assert mismatches(horovod(**parts)) == [fault]


def test_a_local_version_alone_is_no_mismatch(versions: dict[str, str | None]) -> None:
    versions["torch"] = "2.13.0"
    assert mismatches(horovod()) == []


def test_a_local_version_is_a_mismatch_where_it_was_recorded(versions: dict[str, str | None]) -> None:
    record = {"frameworks": {"torch": "2.13.0+cpu"}}
    assert mismatches(horovod(record=record)) == []
    versions["torch"] = "2.13.0+cu130"
    assert mismatches(horovod(record=record)) == [
        "Horovod was built against torch 2.13.0+cpu, but 2.13.0+cu130 is installed"
    ]


def test_a_horovod_that_was_built_by_hand_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What distinguishes the parts was looked at in real wheels; test_horovod_build.py looks at new ones."""
    package = tmp_path / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "torch" / "mpi_lib_v2.so").write_bytes(b"..GlooAllreduce..")
    (package / "metadata.json").write_text('{"pytorch": "2.13.0+cpu", "dummy": "none"}')
    information = tmp_path / "horovod-0.28.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = installing.installed()
    assert found is not None
    assert (found.version, found.frameworks, found.controllers, found.nccl, found.record) == (
        "0.28.1",
        {"torch": "2.13.0+cpu"},
        ("gloo",),
        False,
        None,
    )
    (package / "torch" / "mpi_lib_v2.so").write_bytes(b"GlooAllreduce..libmpi_cxx.so.40..ncclAllReduce")
    (package / "metadata.json").write_text("not json")
    found = installing.installed()
    assert found is not None
    assert (found.frameworks, found.controllers, found.nccl) == ({"torch": None}, ("gloo", "mpi"), True)
    (information / "METADATA").unlink()
    information.rmdir()
    assert installing.installed() is None


def verdicts(found: Installed | None, tools: Toolchain) -> dict[str, tuple[bool | None, str]]:
    return {finding.part: (finding.ok, finding.advice) for finding in check(found, tools, run=False)}


def test_check_without_horovod() -> None:
    assert verdicts(None, toolchain()) == {"horovod": (False, "hvdtrain horovod build")}


def test_check_of_what_fits(versions: dict[str, str | None]) -> None:
    found = verdicts(horovod(), toolchain())
    assert found["torch"] == (True, "")
    assert found["tensorflow"] == (None, "not installed")
    assert found["mpi"] == (True, "")
    assert found["nccl"] == (None, "no installed framework is a CUDA build")
    assert all(ok is not False for ok, _ in found.values())


def test_check_of_what_does_not(versions: dict[str, str | None]) -> None:
    versions |= {"torch": "2.14.1", "tensorflow": "2.21.0"}
    found = verdicts(horovod(controllers=("mpi",)), toolchain(nccl=Tool(Path("/usr"), "2.27.3")))
    assert found["torch"] == (False, "built against another version: hvdtrain horovod build")
    assert found["tensorflow"] == (None, "to use it with Horovod: hvdtrain horovod build")
    assert found["gloo"] == (False, "hvdtrain horovod build")
    assert found["nccl"] == (False, "GPUs would reduce over the CPU: hvdtrain horovod build")
    record = {"python": "3.11", "mpi": "Open MPI 4.0.3", "frameworks": {}}
    assert verdicts(horovod(record=record), toolchain())["mpi"] == (
        False,
        "built against another MPI: hvdtrain horovod build",
    )


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "noise\n[1]<stderr>:Traceback\n[1]<stderr>:ValueError: x\n[0]<stdout>:a\nTraceback of horovodrun\n",
            "ValueError: x",
        ),
        ("noise\n[1,0]<stderr>:ImportError: y\n--------\nmpirun detected\n", "ImportError: y"),
        ("could not find mpirun\n", "could not find mpirun"),
    ],
)
def test_a_failed_proof_shows_the_worker(output: str, expected: str) -> None:
    assert proving._evidence(output)[-1] == expected


# --- the sources -------------------------------------------------------------------------------------------------


def test_another_file_is_not_the_source_package(tmp_path: Path) -> None:
    (tmp_path / "horovod.tar.gz").write_bytes(b"something else")
    with pytest.raises(
        StartError, match=r"this isn't Horovod 0.28.1's source package: its SHA-256 is [0-9a-f]{64}, not"
    ):
        source.check_hash(tmp_path / "horovod.tar.gz")
    with pytest.raises(StartError, match="can't read the source package: No such file"):
        source.check_hash(tmp_path / "missing")


def test_pip_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(StartError) as caught:
        source.download(tmp_path)
    assert caught.value.what.startswith("pip can't download Horovod 0.28.1: ERROR: ")
    assert caught.value.fix == "check the network and pip's index, or give its source package with --sdist FILE"


# --- the command -------------------------------------------------------------------------------------------------


def test_an_unknown_framework() -> None:
    result = CliRunner().invoke(cli.command, ["build", "--with", "torch,jax"])
    assert result.exit_code == 2
    assert "unknown framework 'jax'" in result.output


def test_check_for_programs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "horovod", "check", "--format", "json"], capture_output=True, text=True
    )
    shown = json.loads(result.stdout)
    assert shown["python"] == sys.executable
    assert result.returncode == (0 if shown["ok"] else 1)
    assert {part["part"] for part in shown["parts"]} >= {"horovod"}
