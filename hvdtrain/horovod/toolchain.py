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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Horovod's own choice, where no installed header asks for more.
DEFAULT_CXX_STANDARD = 14
_CXX_STANDARDS = {201402: 14, 201703: 17, 202002: 20, 202302: 23}
# Headers that refuse older standards, relative to a framework's include folder: PyTorch's, and TensorFlow's absl.
# Not all headers are read: those for CUDA kernels may ask for more than Horovod, which doesn't include them, needs.
_GUARDED_HEADERS = (
    "ATen/ATen.h",
    "c10/util/C++17.h",
    "c10/macros/Macros.h",
    "torch/all.h",
    "torch/headeronly/macros/Macros.h",
    "torch/csrc/api/include/torch/all.h",
    "absl/base/policy_checks.h",
)
# `#if … __cplusplus < 201703L …` right before an `#error`.
_GUARD = re.compile(r"^[ \t]*#[ \t]*(?:el)?if([^\n]*__cplusplus[^\n]*)\n[ \t]*#[ \t]*error", re.MULTILINE)
_DEMAND = re.compile(r"(?:__cplusplus|_MSVC_LANG)\s*<\s*(\d{6})L?")
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "intel-tensorflow", "tf-nightly"),
}
# The instruction sets that Horovod uses for its 16-bit sums, where the processor has them.
_INSTRUCTION_SETS = ("f16c", "avx", "fma")


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
    """A program or a library: where it is, and its version."""

    path: Path
    version: str


@dataclass(frozen=True)
class Toolchain:
    """Everything that a build of Horovod depends on.

    Attributes:
        python: the interpreter that runs hvdtrain; Horovod is built for it.
        frameworks: those to build for.
        compiler: the C++ compiler, or None.
        cmake: CMake, of the interpreter's environment or on PATH, or None.
        mpi: MPI's C++ compiler wrapper, with the version of MPI, or None.
        cuda: the CUDA toolkit's folder, where every framework is a CUDA build, or None.
        nccl: the folder of NCCL's headers and library, where ``cuda`` is there, or None.
        why_no_nccl: the reason, where ``nccl`` is None.
        instruction_sets: of the processor, those that Horovod can use.
    """

    python: Tool
    frameworks: tuple[Framework, ...]
    compiler: Tool | None
    cmake: Tool | None
    mpi: Tool | None
    cuda: Tool | None
    nccl: Tool | None
    why_no_nccl: str
    instruction_sets: tuple[str, ...]

    @property
    def cxx_standard(self) -> int:
        """The C++ standard that the frameworks' headers ask for, at least Horovod's own."""
        return max([DEFAULT_CXX_STANDARD, *(required_cxx_standard(each.include) for each in self.frameworks)])


def inspect_toolchain(names: Collection[str] = ()) -> Toolchain:
    """Look at this machine and interpreter, for these frameworks or for all that are installed."""
    frameworks = tuple(filter(None, (find_framework(name) for name in names or _DISTRIBUTIONS)))
    cuda, nccl, why_no_nccl = _find_gpu_parts(frameworks)
    own_programs = sysconfig.get_path("scripts")
    return Toolchain(
        python=Tool(Path(sys.executable), platform.python_version()),
        frameworks=frameworks,
        compiler=_find_compiler(),
        cmake=_find_program(["cmake"], r"version (\S+)", first_in=own_programs),
        mpi=_find_mpi(),
        cuda=cuda,
        nccl=nccl,
        why_no_nccl=why_no_nccl,
        instruction_sets=_instruction_sets(),
    )


# --- frameworks --------------------------------------------------------------------------------------------------


def find_framework(name: str) -> Framework | None:
    """The framework of that name in this interpreter, or None."""
    spec = importlib.util.find_spec(name)
    version = framework_version(name)
    if spec is None or spec.origin is None or version is None:
        return None
    folder = Path(spec.origin).parent
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
        for condition in _GUARD.findall(_read(include / name).replace("\\\n", " ")):
            found += [_CXX_STANDARDS.get(int(value), DEFAULT_CXX_STANDARD) for value in _DEMAND.findall(condition)]
    return max(found)


def _is_cuda_build(name: str, folder: Path) -> bool:
    if name == "torch":
        return bool(re.search(r"^cuda[^=]*= *'", _read(folder / "version.py"), re.MULTILINE))
    return bool(re.search(r"'is_cuda_build'[,:] *True", _read(folder / "python" / "platform" / "build_info.py")))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- programs ----------------------------------------------------------------------------------------------------


def _find_compiler() -> Tool | None:
    """The compiler that CXX names, arguments and all, and no other; without CXX, the system's."""
    chosen = os.environ.get("CXX", "").strip()
    if not chosen:
        return _find_program(["g++", "c++", "clang++"], r"(.+)")
    words = chosen.split()
    located = shutil.which(words[0])
    shown = _output([located, *words[1:], "--version"]) if located else None
    return Tool(Path(located), shown.splitlines()[0].strip()) if located and shown else None


def _find_mpi() -> Tool | None:
    """MPI is there when programs can be compiled for it and started with it."""
    wrapper = shutil.which("mpicxx")
    launcher = shutil.which("mpirun")
    shown = _output([launcher, "--version"]) if launcher else None
    return Tool(Path(wrapper), mpi_version(shown)) if wrapper and shown else None


def mpi_version(shown: str) -> str:
    """Name and version of an MPI, such as ``Open MPI 4.1.4``, from what ``mpirun --version`` shows."""
    for pattern, name in (
        (r"\(Open MPI\) (\S+)", "Open MPI"),
        (r"Intel\(R\) MPI Library.* Version (\S+(?: Update \d+)?)", "Intel MPI"),
        (r"HYDRA build details:\s*Version: *(\S+)", "MPICH"),
    ):
        if match := re.search(pattern, shown):
            return f"{name} {match[1]}"
    return shown.strip().splitlines()[0]


def _find_program(names: Sequence[str], pattern: str, *, first_in: str | None = None) -> Tool | None:
    """The first of these programs on PATH that runs, with its version as the pattern finds it.

    One that is found but doesn't run, such as a pyenv shim for another Python's program, is passed over.
    """
    for name in names:
        for located in _located(name, first_in):
            shown = _output([located, "--version"])
            match = re.search(pattern, shown) if shown else None
            if match:
                return Tool(Path(located), match[1].strip())
    return None


def _located(name: str, first_in: str | None) -> Iterator[str]:
    for folder in filter(None, [first_in, *os.environ.get("PATH", "").split(os.pathsep)]):
        located = shutil.which(name, path=folder)
        if located:
            yield located


def _output(command: list[str]) -> str | None:
    """What a program shows, or None if it fails or shows nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip() or done.stderr.strip() or None) if done.returncode == 0 else None


def _instruction_sets() -> tuple[str, ...]:
    match = re.search(r"^flags\s*:(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    has = match[1].split() if match else []
    return tuple(name for name in _INSTRUCTION_SETS if name in has)


# --- CUDA and NCCL -----------------------------------------------------------------------------------------------


def _find_gpu_parts(frameworks: tuple[Framework, ...]) -> tuple[Tool | None, Tool | None, str]:
    """CUDA and NCCL, or why not. Horovod compiles all its parts with NCCL or none, so one CPU build rules it out."""
    of_cpu = [framework.name for framework in frameworks if not framework.cuda]
    if len(of_cpu) == len(frameworks):
        return None, None, "no installed framework is a CUDA build"
    if of_cpu:
        return None, None, f"{of_cpu[0]} is a CPU build, and Horovod compiles all parts with NCCL or none (see --with)"
    cuda = _find_cuda()
    if cuda is None:
        return None, None, "no CUDA toolkit: nvcc isn't in CUDA_HOME, on PATH or in /usr/local/cuda"
    folders = [os.environ.get("NCCL_HOME"), *_nccl_of_pip(), "/usr", "/usr/local", str(cuda.path)]
    for folder in map(Path, filter(None, folders)):
        version = re.findall(r"^#define NCCL_(?:MAJOR|MINOR|PATCH) +(\d+)", _read(folder / "include/nccl.h"), re.M)
        if version:
            return cuda, Tool(folder, ".".join(version)), ""
    return cuda, None, "no nccl.h found; install libnccl-dev or set NCCL_HOME"


def _find_cuda() -> Tool | None:
    on_path = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), on_path and str(Path(on_path).resolve().parents[1]), "/usr/local/cuda"]
    for home in map(Path, filter(None, homes)):
        shown = _output([str(home / "bin" / "nvcc"), "--version"])
        match = re.search(r"release ([\d.]+)", shown) if shown else None
        if match:
            return Tool(home, match[1])
    return None


def _nccl_of_pip() -> list[str]:
    """NCCL as PyTorch's CUDA builds bring it."""
    spec = importlib.util.find_spec("nvidia")
    return [str(Path(place) / "nccl") for place in (spec.submodule_search_locations or ())] if spec else []
