"""What a machine has to build Horovod with, and what of Horovod's sources and build follows from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from horovod_parts import guard, headers, made_frameworks, program, toolchain

from hvdtrain.errors import HvdtrainError, StartError
from hvdtrain.horovod import build as building
from hvdtrain.horovod import toolchain as machinery
from hvdtrain.horovod.edits import EDITS, apply_edits
from hvdtrain.horovod.record import make_record
from hvdtrain.horovod.toolchain import Framework, Tool, framework_version, inspect_toolchain, required_cxx_standard


@pytest.fixture
def frameworks(tmp_path: Path) -> list[Framework]:
    return made_frameworks(tmp_path)


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
        (
            "torch/headeronly/macros/Macros.h",
            "#if (defined(_MSVC_LANG) && _MSVC_LANG < 202002L) || \\\n  (__cplusplus < 202002L)\n#error x\n#endif\n",
            20,
        ),
        ("c10/macros/Macros.h", "#ifdef X\n#elif __cplusplus < 202002L\n#error old\n#endif\n", 20),
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


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    for name in ("CXX", "CUDA_HOME", "NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(machinery.sysconfig, "get_path", lambda _: str(tmp_path / "env"))
    return tmp_path / "bin"


def test_tools_of_another_machine(machine: Path) -> None:
    gxx = program(machine, "g++", "echo 'g++ (GCC) 15.1.1 20250425 (Red Hat 15.1.1-1)'; echo Copyright")
    program(machine, "mpicxx", "")
    program(machine, "mpirun", "echo 'HYDRA build details:'; echo '    Version:           4.2.0'")
    program(machine, "cmake", "echo 'cmake version 4.1.2'")
    found = inspect_toolchain()
    assert found.compiler == Tool(gxx, "g++ (GCC) 15.1.1 20250425 (Red Hat 15.1.1-1)")
    assert found.mpi == Tool(machine / "mpicxx", "MPICH 4.2.0")
    assert found.cmake == Tool(machine / "cmake", "4.1.2")


def test_tools_that_are_not_there(machine: Path) -> None:
    found = inspect_toolchain()
    assert (found.compiler, found.cmake, found.mpi) == (None, None, None)


def test_the_environments_own_cmake_comes_first_and_a_broken_shim_is_passed_over(machine: Path) -> None:
    program(machine, "cmake", "echo 'cmake version 3.25.1'")
    own = program(machine.parent / "env", "cmake", "echo 'pyenv: cmake: command not found' >&2; exit 127")
    assert inspect_toolchain().cmake == Tool(machine / "cmake", "3.25.1")
    own.write_text("#!/bin/sh\necho 'cmake version 4.1.2'\n")
    assert inspect_toolchain().cmake == Tool(own, "4.1.2")


def test_mpirun_without_a_compiler_wrapper_is_no_mpi(machine: Path) -> None:
    program(machine, "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    assert inspect_toolchain().mpi is None


def test_the_compiler_that_is_chosen_is_the_one(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine, "g++", "echo 'g++ 12'")
    program(machine, "ccache", 'echo "wrapped $1"')
    monkeypatch.setenv("CXX", "ccache g++ -m64")
    assert inspect_toolchain().compiler == Tool(machine / "ccache", "wrapped g++")
    monkeypatch.setenv("CXX", "clang++-99")
    assert inspect_toolchain().compiler is None


@pytest.mark.parametrize(
    ("shown", "version"),
    [
        ("mpirun (Open MPI) 5.0.3\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "Open MPI 5.0.3"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n    Release", "MPICH 4.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102 (id: 9279b7d62)\n", "Intel MPI 2021.5"),
        ("Some MPI 1.2\nmore\n", "Some MPI 1.2"),
    ],
)
def test_the_version_of_an_mpi(shown: str, version: str) -> None:
    assert machinery.mpi_version(shown) == version


def test_nccl_needs_cuda_builds_cuda_and_nccl(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Framework("torch", "2.13.0", machine, cuda=True)
    flow = Framework("tensorflow", "2.21.0", machine, cuda=False)
    home = machine.parent / "cuda"
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(machinery, "_nccl_of_pip", lambda: [str(machine.parent / "pip")])
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert machinery._find_gpu_parts((torch,))[2].startswith("no CUDA toolkit")
    program(home / "bin", "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    cuda = Tool(home, "13.0")
    if not Path("/usr/include/nccl.h").exists():
        assert machinery._find_gpu_parts((torch,)) == (
            cuda,
            None,
            "no nccl.h found; install libnccl-dev or set NCCL_HOME",
        )
    headers(machine.parent / "pip", "nccl.h", "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n")
    nccl = Tool(machine.parent / "pip", "2.27.3")
    assert machinery._find_gpu_parts((torch,)) == (cuda, nccl, "")
    assert machinery._find_gpu_parts((flow,)) == (None, None, "no installed framework is a CUDA build")
    cuda_and_cpu = machinery._find_gpu_parts((torch, flow))
    assert cuda_and_cpu[:2] == (None, None)
    assert cuda_and_cpu[2].startswith("tensorflow is a CPU build, and Horovod compiles all parts with NCCL or none")


@pytest.mark.parametrize(
    ("name", "file", "text", "cuda"),
    [
        ("torch", "version.py", "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("torch", "version.py", "cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", False),
        ("tensorflow", "python/platform/build_info.py", "OrderedDict([('is_cuda_build', True), ('x', 1)])", True),
        ("tensorflow", "python/platform/build_info.py", "OrderedDict([('is_cuda_build', False)])", False),
        ("tensorflow", "missing", "", False),
    ],
)
def test_a_cuda_build_is_known_without_an_import(tmp_path: Path, name: str, file: str, text: str, cuda: bool) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert machinery._is_cuda_build(name, tmp_path) is cuda


# --- edits -------------------------------------------------------------------------------------------------------


def sources(folder: Path) -> Path:
    """Files with what the edits look for, as Horovod 0.28.1 has it."""
    for edit in EDITS:
        path = folder / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"before\n{edit.old}\nafter\n")
    return folder


def test_the_edits_for_both_frameworks(tmp_path: Path, frameworks: list[Framework]) -> None:
    folder = sources(tmp_path / "sources")
    made = apply_edits(folder, toolchain(*frameworks))
    assert [edit.file for edit in made] == [
        "CMakeLists.txt",
        "horovod/torch/CMakeLists.txt",
        "horovod/torch/CMakeLists.txt",
        "horovod/tensorflow/CMakeLists.txt",
        "horovod/common/gloo/gloo_controller.cc",
        "horovod/common/gloo/gloo_context.cc",
        "horovod/common/operations.cc",
        *["horovod/torch/handle_manager.h"] * 3,
        *["horovod/torch/handle_manager.cc"] * 3,
        "horovod/torch/mpi_ops_v2.cc",
        "third_party/gloo/gloo/alltoallv.cc",
        *["third_party/gloo/gloo/allgatherv.cc"] * 2,
        "horovod/common/util.py",
        "horovod/runner/js_run.py",
    ]
    assert "set(CMAKE_CXX_STANDARD 17)" in (folder / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in (folder / "horovod/torch/CMakeLists.txt").read_text()
    assert "xla_mpi_ops" not in (folder / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "distutils" not in (folder / "horovod/runner/js_run.py").read_text()
    assert "distutils" not in (folder / "horovod/torch/CMakeLists.txt").read_text()
    assert "libnccl.so.2" not in (folder / "cmake/Modules/FindNCCL.cmake").read_text()


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


def test_nccl_of_pip_is_found_by_its_only_name(tmp_path: Path, frameworks: list[Framework]) -> None:
    folder = sources(tmp_path / "sources")
    apply_edits(folder, toolchain(*frameworks, nccl=Tool(Path("/nccl"), "2.27.3")))
    assert 'NAMES "nccl" "libnccl.so.2"' in (folder / "cmake/Modules/FindNCCL.cmake").read_text()


@pytest.mark.parametrize(
    "edit", [edit for edit in EDITS if edit.file != "cmake/Modules/FindNCCL.cmake"][:3], ids=lambda edit: edit.file
)
def test_unknown_sources_are_refused_unchanged(tmp_path: Path, frameworks: list[Framework], edit: Any) -> None:
    folder = sources(tmp_path / "sources")
    (folder / edit.file).write_text("set(CMAKE_CXX_STANDARD 11)\n")
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(HvdtrainError, match="these aren't the sources of Horovod that the edits are made for"):
        apply_edits(folder, toolchain(*frameworks))
    assert before == {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


# --- what a build refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ((), "no framework is installed in"),
        (("torch",), "torch isn't installed in"),
        (("torch", "tensorflow"), "torch and tensorflow aren't installed in"),
    ],
)
def test_a_build_without_its_framework(wanted: tuple[str, ...], message: str) -> None:
    with pytest.raises(StartError, match=message):
        building._require(toolchain(), building.Request(wanted))


@pytest.mark.parametrize(
    ("part", "message"), [("compiler", r"no C\+\+ compiler found"), ("cmake", "CMake isn't installed")]
)
def test_a_build_without_its_tool(frameworks: list[Framework], part: str, message: str) -> None:
    with pytest.raises(StartError, match=message) as caught:
        building._require(toolchain(*frameworks, **{part: None}), building.Request())
    assert caught.value.fix


def test_a_compiler_that_is_chosen_and_not_there(frameworks: list[Framework], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++-99")
    with pytest.raises(StartError, match=r"the compiler that CXX names doesn't run: clang\+\+-99"):
        building._require(toolchain(*frameworks, compiler=None), building.Request())


def test_an_environment_that_cannot_be_installed_into(
    frameworks: list[Framework], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(building.sysconfig, "get_path", lambda _: str(tmp_path))
    building._require(toolchain(*frameworks), building.Request())
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    with pytest.raises(StartError, match="packages can't be installed there: they are managed by the system"):
        building._require(toolchain(*frameworks), building.Request())
    monkeypatch.setattr(building.sysconfig, "get_path", lambda _: "/nonexistent")
    with pytest.raises(StartError, match=r"^/nonexistent: packages can't be installed there\n"):
        building._require(toolchain(*frameworks), building.Request())


def test_every_part_is_asked_for(frameworks: list[Framework], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90")
    monkeypatch.setenv("CCL_ROOT", "/opt/oneapi")
    monkeypatch.setenv("CMAKE_GENERATOR", "Ninja")
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    monkeypatch.setenv("MAKEFLAGS", "")
    tools = toolchain(frameworks[0])
    made = building._build_environment(tools, make_record(tools, with_mpi=False))
    assert {name: value for name, value in made.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        "HOROVOD_BUILD_ARCH_FLAGS": "-mavx",
        "HOROVOD_BUILD_CUDA_CC_LIST": "90",
        "HOROVOD_CMAKE": "/env/bin/cmake",
    }
    assert "CCL_ROOT" not in made
    assert made["CMAKE_GENERATOR"] == "Unix Makefiles"
    assert made["CXXFLAGS"] == "-include cstdint -include algorithm -march=native"
    assert made["MAKEFLAGS"].startswith("-j")
    nccl = Tool(Path("/opt/nccl"), "2.27.3")
    with_nccl = toolchain(*frameworks, cuda=Tool(Path("/opt/cuda"), "13.0"), nccl=nccl)
    made = building._build_environment(with_nccl, make_record(with_nccl, with_mpi=True))
    assert (made["HOROVOD_GPU_OPERATIONS"], made["HOROVOD_NCCL_HOME"]) == ("NCCL", "/opt/nccl")
    assert made["HOROVOD_CUDA_HOME"] == "/opt/cuda"
    assert (made["HOROVOD_WITH_TENSORFLOW"], made["HOROVOD_WITH_MPI"]) == ("1", "1")
