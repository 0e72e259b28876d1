"""What this machine and interpreter have to build Horovod with. Imports no framework."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Horovod's own choice, where no installed header asks for more.
DEFAULT_CXX_STANDARD = 14
_CXX_STANDARDS = {201402: 14, 201703: 17, 202002: 20, 202302: 23}
# Headers that refuse older standards, relative to a framework's include folder: PyTorch's, and TensorFlow's absl.
_GUARDED_HEADERS = (
    "ATen/ATen.h",
    "c10/util/C++17.h",
    "c10/macros/Macros.h",
    "torch/all.h",
    "torch/headeronly/macros/Macros.h",
    "torch/csrc/api/include/torch/all.h",
    "absl/base/policy_checks.h",
)
_GUARD = re.compile(r"^\s*#\s*if[^\n]*__cplusplus\s*<\s*(\d{6})L?[^\n]*\n\s*#\s*error", re.MULTILINE)
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "intel-tensorflow", "tf-nightly"),
}


@dataclass(frozen=True)
class Framework:
    """An installed framework.

    Attributes:
        name: ``torch`` or ``tensorflow``.
        version: with its local part, such as ``2.13.0+cpu``.
        folder: its package.
        cuda: whether it is a CUDA build.
    """

    name: str
    version: str
    folder: Path
    cuda: bool

    @property
    def include(self) -> Path:
        """Folder of its headers."""
        return self.folder / "include"


@dataclass(frozen=True)
class Tool:
    """A program: its path, and the version that it tells."""

    path: Path
    version: str


@dataclass(frozen=True)
class Toolchain:
    """Everything that a build of Horovod depends on.

    Attributes:
        python: the interpreter that runs hvdtrain; Horovod is built for it.
        frameworks: those that are installed in it.
        compiler: the C++ compiler, or None.
        cmake: CMake, of the interpreter's environment or on PATH, or None.
        mpi: MPI's C++ compiler wrapper, or None.
        nccl: folder of NCCL's headers and library, where a CUDA build of a framework and CUDA are there too.
        why_no_nccl: the reason, where ``nccl`` is None.
    """

    python: Tool
    frameworks: tuple[Framework, ...]
    compiler: Tool | None
    cmake: Tool | None
    mpi: Tool | None
    nccl: Path | None
    why_no_nccl: str

    @property
    def cxx_standard(self) -> int:
        """The C++ standard that the frameworks' headers ask for, at least Horovod's own."""
        return max([DEFAULT_CXX_STANDARD, *(required_cxx_standard(each.include) for each in self.frameworks)])


def inspect_toolchain() -> Toolchain:
    """Look at this machine and interpreter."""
    frameworks = tuple(filter(None, (find_framework(name) for name in _DISTRIBUTIONS)))
    nccl, why_no_nccl = _find_nccl(frameworks)
    scripts = sysconfig.get_path("scripts")
    return Toolchain(
        python=Tool(Path(sys.executable), platform.python_version()),
        frameworks=frameworks,
        compiler=_tool([os.environ.get("CXX", ""), "g++", "c++"], "--version", r"(\S+)\s*$"),
        cmake=_tool(
            ["cmake"], "--version", r"version (\S+)", path=f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"
        ),
        mpi=_find_mpi(),
        nccl=nccl,
        why_no_nccl=why_no_nccl,
    )


def find_framework(name: str) -> Framework | None:
    """The framework of that name in this interpreter, or None."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    version = framework_version(name)
    if version is None:
        return None
    return Framework(name, version, folder, _is_cuda_build(name, folder))


def framework_version(name: str) -> str | None:
    """The installed version, from the distribution's metadata; None where it isn't installed."""
    for distribution in _DISTRIBUTIONS[name]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def required_cxx_standard(include: Path) -> int:
    """The C++ standard that headers below this folder ask for by ``#if __cplusplus < …`` with ``#error``.

    Returns:
        14, 17, 20 or 23; 14 where no header asks.
    """
    found = [DEFAULT_CXX_STANDARD]
    for name in _GUARDED_HEADERS:
        try:
            text = (include / name).read_text(errors="replace")
        except OSError:
            continue
        found += [_CXX_STANDARDS.get(int(value), DEFAULT_CXX_STANDARD) for value in _GUARD.findall(text)]
    return max(found)


def _is_cuda_build(name: str, folder: Path) -> bool:
    if name == "torch":
        return bool(re.search(r"^cuda[^=]*= *'", _read(folder / "version.py"), re.MULTILINE))
    return "'is_cuda_build', True" in _read(folder / "python" / "platform" / "build_info.py")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tool(names: Iterable[str], flag: str, pattern: str, *, path: str | None = None) -> Tool | None:
    """The first of these programs that is there and runs, with its version from the first line that it prints."""
    for name in names:
        located = shutil.which(name, path=path) if name else None
        if located is None:
            continue
        try:
            shown = subprocess.run([located, flag], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        first_line = next(iter((shown.stdout or shown.stderr).splitlines()), "")
        if shown.returncode == 0:
            match = re.search(pattern, first_line)
            return Tool(Path(located), match[1] if match else first_line.strip())
    return None


def _find_mpi() -> Tool | None:
    """MPI is there when programs can be compiled for it and started with it."""
    wrapper = shutil.which("mpicxx")
    launcher = _tool(["mpirun"], "--version", r"(.*)")
    return Tool(Path(wrapper), launcher.version) if wrapper and launcher else None


def _find_nccl(frameworks: tuple[Framework, ...]) -> tuple[Path | None, str]:
    if not any(framework.cuda for framework in frameworks):
        return None, "no installed framework is a CUDA build"
    if shutil.which("nvcc") is None and not os.environ.get("CUDA_HOME"):
        return None, "no CUDA toolkit: nvcc isn't on PATH and CUDA_HOME isn't set"
    folders = [os.environ.get("HOROVOD_NCCL_HOME"), os.environ.get("NCCL_HOME"), *_nccl_of_pip(), "/usr", "/usr/local"]
    for folder in map(Path, filter(None, folders)):
        if (folder / "include" / "nccl.h").is_file():
            return folder, ""
    return None, "no nccl.h found; install libnccl-dev or set NCCL_HOME"


def _nccl_of_pip() -> list[str]:
    """NCCL as PyTorch's CUDA builds bring it."""
    spec = importlib.util.find_spec("nvidia")
    return [str(Path(place) / "nccl") for place in (spec.submodule_search_locations or ())] if spec else []
