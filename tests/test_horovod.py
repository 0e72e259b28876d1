"""Building and checking Horovod, as far as it needs no compiler; test_horovod_build.py has the rest."""

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

from hvdtrain.cli import horovod as cli
from hvdtrain.errors import HvdtrainError, StartError
from hvdtrain.horovod import build as building
from hvdtrain.horovod import cache, source
from hvdtrain.horovod import check as checking
from hvdtrain.horovod import installed as installing
from hvdtrain.horovod import prove as proving
from hvdtrain.horovod.check import check
from hvdtrain.horovod.diagnose import first_error
from hvdtrain.horovod.edits import EDITS, apply_edits
from hvdtrain.horovod.installed import Installed, mismatches
from hvdtrain.horovod.record import make_record, read_record, write_record
from hvdtrain.horovod.toolchain import (
    Framework,
    Tool,
    Toolchain,
    framework_version,
    inspect_toolchain,
    required_cxx_standard,
)


def guard(value: str) -> str:
    return f"#pragma once\n#if !defined(_MSC_VER) && __cplusplus < {value}\n#error newer compiler required\n#endif\n"


def headers(folder: Path, name: str, text: str) -> Path:
    path = folder / "include" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


def toolchain(*frameworks: Framework, **parts: Any) -> Toolchain:
    defaults: dict[str, Any] = {
        "python": Tool(Path("/env/bin/python"), "3.11.7"),
        "compiler": Tool(Path("/usr/bin/g++"), "12.2.0"),
        "cmake": Tool(Path("/env/bin/cmake"), "3.31.0"),
        "mpi": Tool(Path("/usr/bin/mpicxx"), "mpirun (Open MPI) 4.1.4"),
        "nccl": None,
        "why_no_nccl": "no installed framework is a CUDA build",
    }
    return Toolchain(frameworks=frameworks, **(defaults | parts))


# --- what the frameworks ask for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ATen/ATen.h", guard("201402L"), 14),
        ("ATen/ATen.h", guard("201703L"), 17),
        ("torch/csrc/api/include/torch/all.h", guard("202002L"), 20),
        ("absl/base/policy_checks.h", '#if __cplusplus < 201703L\n#error "C++17"\n#endif\n', 17),
        ("absl/base/policy_checks.h", "#  if __cplusplus < 202002\n#  error old\n#  endif\n", 20),
        ("c10/macros/Macros.h", guard("202302L"), 23),
        # A choice between two ways is no demand.
        ("c10/macros/Macros.h", "#if __cplusplus < 202002L\n#define X\n#endif\n", 14),
        ("unrelated.h", guard("202002L"), 14),
    ],
)
def test_the_standard_that_headers_ask_for(tmp_path: Path, name: str, text: str, expected: int) -> None:
    assert required_cxx_standard(headers(tmp_path, name, text) / "include") == expected


def test_the_highest_demand_counts(tmp_path: Path) -> None:
    torch = Framework("torch", "2.9", headers(tmp_path / "t", "ATen/ATen.h", guard("202002L")), cuda=False)
    flow = Framework(
        "tensorflow", "2.21", headers(tmp_path / "f", "absl/base/policy_checks.h", guard("201703L")), cuda=False
    )
    assert toolchain(torch, flow).cxx_standard == 20
    assert toolchain(flow).cxx_standard == 17
    assert toolchain().cxx_standard == 14


def test_this_machine() -> None:
    """The installed frameworks, as they really are; skipped where there are none."""
    found = inspect_toolchain()
    assert found.python == Tool(Path(sys.executable), ".".join(map(str, sys.version_info[:3])))
    if not found.frameworks:
        pytest.skip("no framework is installed")
    for framework in found.frameworks:
        assert framework.version == framework_version(framework.name)
        assert required_cxx_standard(framework.include) >= 17
    if not any(framework.cuda for framework in found.frameworks):
        assert found.nccl is None
        assert found.why_no_nccl == "no installed framework is a CUDA build"


# --- edits -------------------------------------------------------------------------------------------------------


def sources(folder: Path) -> Path:
    """Files with what the edits look for, as Horovod 0.28.1 has it."""
    for edit in EDITS:
        path = folder / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"before\n{edit.old}\nafter\n")
    return folder


@pytest.fixture
def frameworks(tmp_path: Path) -> list[Framework]:
    torch = headers(tmp_path / "torch", "ATen/ATen.h", guard("201703L"))
    flow = headers(tmp_path / "tensorflow", "absl/base/policy_checks.h", guard("201703L"))
    return [Framework("torch", "2.13.0+cpu", torch, cuda=False), Framework("tensorflow", "2.21.0", flow, cuda=False)]


def test_the_edits_for_both_frameworks(tmp_path: Path, frameworks: list[Framework]) -> None:
    folder = sources(tmp_path / "sources")
    made = apply_edits(folder, toolchain(*frameworks))
    assert [edit.file for edit in made] == [
        "CMakeLists.txt",
        "horovod/torch/CMakeLists.txt",
        "horovod/tensorflow/CMakeLists.txt",
        "horovod/runner/js_run.py",
    ]
    assert "set(CMAKE_CXX_STANDARD 17)" in (folder / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in (folder / "horovod/torch/CMakeLists.txt").read_text()
    assert "xla_mpi_ops" not in (folder / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "distutils" not in (folder / "horovod/runner/js_run.py").read_text()


def test_a_tensorflow_that_still_has_the_header_keeps_xla(tmp_path: Path, frameworks: list[Framework]) -> None:
    headers(frameworks[1].folder, "highwayhash/arch_specific.h", "")
    folder = sources(tmp_path / "sources")
    apply_edits(folder, toolchain(*frameworks))
    assert "xla_mpi_ops" in (folder / "horovod/tensorflow/CMakeLists.txt").read_text()


def test_a_newer_standard_reaches_all_three_files(tmp_path: Path, frameworks: list[Framework]) -> None:
    headers(frameworks[0].folder, "ATen/ATen.h", guard("202002L"))
    folder = sources(tmp_path / "sources")
    apply_edits(folder, toolchain(*frameworks))
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt", "horovod/tensorflow/CMakeLists.txt"):
        assert "set(CMAKE_CXX_STANDARD 20)" in (folder / name).read_text()


@pytest.mark.parametrize("edit", EDITS[:2], ids=lambda edit: edit.file)
def test_unknown_sources_are_refused_unchanged(tmp_path: Path, frameworks: list[Framework], edit: Any) -> None:
    folder = sources(tmp_path / "sources")
    (folder / edit.file).write_text("set(CMAKE_CXX_STANDARD 11)\n")
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(HvdtrainError, match="these aren't the sources of Horovod that the edits are made for"):
        apply_edits(folder, toolchain(*frameworks))
    assert before == {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


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


def test_everything_that_is_compiled_against_changes_the_key(frameworks: list[Framework]) -> None:
    torch, flow = frameworks
    tools = toolchain(torch, flow)
    variants = [
        make_record(tools, with_mpi=True),
        make_record(tools, with_mpi=False),
        make_record(toolchain(torch), with_mpi=True),
        make_record(toolchain(Framework("torch", "2.14.0+cpu", torch.folder, cuda=False), flow), with_mpi=True),
        make_record(toolchain(torch, flow, compiler=Tool(Path("/usr/bin/g++"), "13.2.0")), with_mpi=True),
        make_record(
            toolchain(torch, flow, mpi=Tool(Path("/usr/bin/mpicxx"), "mpirun (Open MPI) 5.0.1")), with_mpi=True
        ),
        make_record(toolchain(torch, flow, python=Tool(Path("/env/bin/python"), "3.12.1")), with_mpi=True),
        make_record(toolchain(torch, flow, nccl=Path("/usr")), with_mpi=True),
    ]
    assert len({cache.cache_key(record) for record in variants}) == len(variants)
    assert cache.cache_key(make_record(tools, with_mpi=True)) == cache.cache_key(variants[0])
    # A patch release of Python has the same ABI.
    patched = toolchain(torch, flow, python=Tool(Path("/env/bin/python"), "3.11.9"))
    assert cache.cache_key(make_record(patched, with_mpi=True)) == cache.cache_key(variants[0])


def test_a_stored_wheel_is_found(tmp_path: Path, own_cache: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with cache.locked("key"):
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


def test_a_second_build_of_the_same_waits(own_cache: Path) -> None:
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    attempt = [sys.executable, "-c", code, str(own_cache / "key.lock")]
    with cache.locked("key"):
        assert "BlockingIOError" in subprocess.run(attempt, capture_output=True, text=True).stderr
    subprocess.run(attempt, check=True)


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
    monkeypatch.setattr(installing.shutil, "which", lambda name: f"/usr/bin/{name}")
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
            "2.13.0",
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


def test_mpi_that_is_gone(versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing.shutil, "which", lambda _: None)
    assert mismatches(horovod()) == ["Horovod was built with MPI, but there is no mpirun on PATH"]
    assert mismatches(horovod(controllers=("gloo",))) == []


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
    found = verdicts(horovod(controllers=("mpi",)), toolchain(nccl=Path("/usr")))
    assert found["torch"] == (False, "built against another version: hvdtrain horovod build")
    assert found["tensorflow"] == (False, "installed, but Horovod has no part for it: hvdtrain horovod build")
    assert found["gloo"] == (False, "hvdtrain horovod build")
    assert found["nccl"] == (False, "GPUs would reduce over the CPU: hvdtrain horovod build")
    record = {"python": "3.11", "mpi": "mpirun (Open MPI) 4.0.3", "frameworks": {}}
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


# --- what a build refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "request_", "message"),
    [
        ({}, building.Request(), "no framework is installed in"),
        ({}, building.Request(("torch",)), "torch isn't installed in"),
        ({}, building.Request(("torch", "tensorflow")), "torch and tensorflow aren't installed in"),
    ],
)
def test_a_build_without_its_framework(parts: Any, request_: building.Request, message: str) -> None:
    with pytest.raises(StartError, match=message):
        building._select(toolchain(**parts), request_)


@pytest.mark.parametrize(
    ("part", "message"), [("compiler", r"no C\+\+ compiler found"), ("cmake", "CMake isn't installed")]
)
def test_a_build_without_its_tool(frameworks: list[Framework], part: str, message: str) -> None:
    with pytest.raises(StartError, match=message) as caught:
        building._select(toolchain(*frameworks, **{part: None}), building.Request())
    assert caught.value.fix


def test_every_part_is_asked_for(frameworks: list[Framework], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    tools = toolchain(frameworks[0])
    made = building._build_environment(tools, make_record(tools, with_mpi=False))
    assert {name: value for name, value in made.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        "HOROVOD_CMAKE": "/env/bin/cmake",
    }
    with_nccl = toolchain(*frameworks, nccl=Path("/opt/nccl"))
    made = building._build_environment(with_nccl, make_record(with_nccl, with_mpi=True))
    assert (made["HOROVOD_GPU_OPERATIONS"], made["HOROVOD_NCCL_HOME"]) == ("NCCL", "/opt/nccl")
    assert (made["HOROVOD_WITH_TENSORFLOW"], made["HOROVOD_WITH_MPI"]) == ("1", "1")


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
