"""Builds Horovod against the frameworks that are installed, installs it, and proves that it works."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from hvdtrain.errors import CheckFailedError, StartError
from hvdtrain.horovod import cache, source
from hvdtrain.horovod.diagnose import first_error
from hvdtrain.horovod.edits import apply_edits
from hvdtrain.horovod.guard import guarded
from hvdtrain.horovod.installed import Installed, installed, mismatches
from hvdtrain.horovod.prove import proofs
from hvdtrain.horovod.record import make_record, write_record
from hvdtrain.horovod.toolchain import Toolchain, inspect_toolchain

# A compiler process of Horovod's largest files takes about this much.
_MEMORY_PER_JOB = 1536 * 1024**2
_PERCENT = re.compile(r"\[\s*(\d+)%\]")
_HOROVOD_NAMES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}
# What the build imports, and what Horovod imports. Its own setup would fetch them in a way of its own.
_NEEDED = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "PyYAML", "cffi")
# Variables that would steer the build unseen: MPI's are to be found on PATH, as here, and oneCCL isn't asked for.
_STEERING = {"MPI_HOME", "MPI_ROOT", "CCL_ROOT", "CCL_CONFIGURATION"}
# Which of CUDA's architectures to compile for is the user's own business, and part of the record.
_KEPT = {"HOROVOD_BUILD_CUDA_CC_LIST"}


@dataclass(frozen=True)
class Request:
    """What to build.

    Attributes:
        frameworks: names of the frameworks; empty for all that are installed.
        with_mpi: whether to build with MPI where it is found.
        sdist: Horovod's source package; None to download it.
        rebuild: build even if the cache has the wheel.
    """

    frameworks: tuple[str, ...] = ()
    with_mpi: bool = True
    sdist: Path | None = None
    rebuild: bool = False


class Progress(Protocol):
    """What a build tells while it goes on; ``cli`` shows it."""

    def step(self, text: str) -> None:
        """Something begins, or is done."""

    def percent(self, value: int) -> None:
        """How much is compiled."""

    def output(self, line: str) -> None:
        """A line of the build's own output, as it also stands in the log."""


def build(request: Request, progress: Progress) -> Installed:
    """Build or take from the cache, install, and prove. Returns what is then installed.

    Raises:
        StartError: something that a build needs isn't there.
        CheckFailedError: the build or its proof failed.
    """
    toolchain = inspect_toolchain(request.frameworks)
    _require(toolchain, request)
    record = make_record(toolchain, with_mpi=request.with_mpi)
    for line in _describe(toolchain, record):
        progress.step(line)
    key = cache.cache_key(record)
    try:
        with cache.locked(key, lambda: progress.step("another build of the same is running; waiting for it")):
            if _is_installed(record) and not request.rebuild:
                progress.step("this build is installed already")
            else:
                _install(_wheel(key, toolchain, record, request, progress))
            horovod = _require_installed()
            if not cache.is_proved(key):
                _prove_all(horovod, progress)
                cache.mark_proved(key)
            return horovod
    except OSError as error:
        raise StartError(
            f"can't go on: {error.strerror or error}",
            where=error.filename,
            fix="see that the temporary folder (TMPDIR) and the cache (XDG_CACHE_HOME) have room and can be written to",
        ) from error


def _require(toolchain: Toolchain, request: Request) -> None:
    """Check for all that a build needs, so that it doesn't fail after minutes.

    Raises:
        StartError: something isn't there.
    """
    available = {framework.name for framework in toolchain.frameworks}
    missing = [name for name in request.frameworks if name not in available]
    if missing or not available:
        what = " and ".join(missing) + (" isn't" if len(missing) == 1 else " aren't") if missing else "no framework is"
        raise StartError(
            f"{what} installed in {sys.executable}",
            fix=f"install {' and '.join(missing) or 'torch or tensorflow'} there, then build again",
        )
    if toolchain.compiler is None:
        chosen = os.environ.get("CXX", "").strip()
        what = f"the compiler that CXX names doesn't run: {chosen}" if chosen else "no C++ compiler found"
        raise StartError(what, fix="install g++ (Debian: apt-get install g++), or set CXX to a C++ compiler")
    if shutil.which("make") is None:
        raise StartError("make isn't installed", fix="install it (Debian: apt-get install make)")
    if toolchain.cmake is None:
        raise StartError("CMake isn't installed", fix=f"{sys.executable} -m pip install cmake")
    if importlib.util.find_spec("pip") is None:
        raise StartError(f"pip isn't installed in {sys.executable}", fix=f"{sys.executable} -m ensurepip")
    packages = Path(sysconfig.get_path("purelib"))
    managed = sys.prefix == sys.base_prefix and (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").is_file()
    if managed or not os.access(packages, os.W_OK):
        raise StartError(
            "packages can't be installed there" + (": they are managed by the system" if managed else ""),
            where=str(packages),
            fix="run hvdtrain in a virtual environment of your own: python3 -m venv .venv",
        )


def _is_installed(record: dict[str, Any]) -> bool:
    now = installed()
    return (
        now is not None
        and now.record == record
        and set(now.frameworks) == set(record["frameworks"])
        and not mismatches(now)
    )


def _wheel(key: str, toolchain: Toolchain, record: dict[str, Any], request: Request, progress: Progress) -> Path:
    """The wheel of the cache, or a new one that is then in the cache."""
    cached = None if request.rebuild else cache.cached_wheel(key)
    if cached is not None:
        progress.step(f"found in the cache: {cached}")
        return cached
    with tempfile.TemporaryDirectory(prefix="hvdtrain-build-") as name:
        return cache.store(key, _compile(Path(name), toolchain, record, request, progress), record)


def _describe(toolchain: Toolchain, record: dict[str, Any]) -> Iterable[str]:
    frameworks = ", ".join(f"{each.name} {each.version}" for each in toolchain.frameworks)
    yield f"Horovod {source.VERSION} for {frameworks} on Python {toolchain.python.version} ({toolchain.python.path})"
    mpi = f"MPI ({record['mpi']})" if record["mpi"] else "no MPI"
    nccl = f"NCCL ({record['nccl']})" if record["nccl"] else f"no NCCL: {toolchain.why_no_nccl}"
    yield f"Gloo, {mpi}, {nccl}; C++{toolchain.cxx_standard} by {record['compiler']}"


def _compile(folder: Path, toolchain: Toolchain, record: dict[str, Any], request: Request, progress: Progress) -> Path:
    progress.step("getting the sources" if request.sdist is None else f"unpacking {request.sdist}")
    package = request.sdist or source.download(folder)
    source.check_hash(package)
    sources = source.unpack(package, folder)
    for edit in apply_edits(sources, toolchain):
        progress.step(f"edit {edit.file}: {edit.why}")
    write_record(sources, record)
    _install_needed()
    log = cache.log_file(cache.cache_key(record))
    progress.step(f"compiling, a few minutes; log: {log}")
    if ignored := sorted(name for name in os.environ if _steers(name)):
        progress.step(f"ignored of the environment: {', '.join(ignored)}")
    command = [
        sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-build-isolation", "--no-deps",
        "--no-cache-dir", "--verbose", "--wheel-dir", str(folder / "wheel"), str(sources),
    ]  # fmt: skip
    # pip's and the compiler's own temporary files, which they leave when they are ended.
    temporary = folder / "tmp"
    temporary.mkdir()
    status = _run(command, _build_environment(toolchain, record) | {"TMPDIR": str(temporary)}, log, progress)
    wheel = next((folder / "wheel").glob("*.whl"), None)
    if status != 0 or wheel is None:
        error = first_error(log.read_text(errors="replace"))
        raise CheckFailedError(
            "the build failed:\n" + "\n".join(f"  {line}" for line in error.lines),
            fix=f"{error.remedy}\n  log: {log}",
        )
    return wheel


def _steers(variable: str) -> bool:
    return variable in _STEERING or (variable.startswith("HOROVOD_") and variable not in _KEPT)


def _build_environment(toolchain: Toolchain, record: dict[str, Any]) -> dict[str, str]:
    """The user's environment without what would steer Horovod's build unseen, and with every part asked for.

    A part that is asked for and can't be built fails the build; otherwise it would be left out without a word
    (horovod issue 401).
    """
    assert toolchain.cmake is not None
    assert toolchain.compiler is not None
    environment = {name: value for name, value in os.environ.items() if not _steers(name)}
    for name, horovods in _HOROVOD_NAMES.items():
        environment[f"HOROVOD_{'WITH' if name in record['frameworks'] else 'WITHOUT'}_{horovods}"] = "1"
    environment |= {
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        "HOROVOD_WITH_MPI" if record["mpi"] else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": " ".join(f"-m{name}" for name in toolchain.instruction_sets),
        "HOROVOD_CMAKE": str(toolchain.cmake.path),
        # Horovod's setup hands make's own arguments on.
        "CMAKE_GENERATOR": "Unix Makefiles",
        # CMake 4 refuses the bundled Gloo, which asks for an older one's behaviour.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Newer GCCs' headers include fewer others: Gloo lacks uint8_t with 15 (gloo pull request 448), and several of
        # Horovod's files rely on the same luck for <algorithm>.
        "CXXFLAGS": f"-include cstdint -include algorithm {os.environ.get('CXXFLAGS', '')}".strip(),
        "MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{_jobs()}",
    }
    environment.setdefault("CXX", str(toolchain.compiler.path))
    if toolchain.cuda:
        environment["HOROVOD_CUDA_HOME"] = str(toolchain.cuda.path)
    if toolchain.nccl:
        environment |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": str(toolchain.nccl.path)}
    return environment


def _jobs() -> int:
    by_memory = psutil.virtual_memory().available // _MEMORY_PER_JOB
    return max(1, min(len(os.sched_getaffinity(0)), int(by_memory)))


def _run(command: list[str], environment: dict[str, str], log: Path, progress: Progress) -> int:
    """Run a command with its output in a log. Whatever happens here, it doesn't outlive this function."""
    shown = -1
    with log.open("w", errors="replace") as file, guarded(command, environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            progress.output(line)
            match = _PERCENT.search(line)
            if match and int(match[1]) > shown:
                shown = int(match[1])
                progress.percent(shown)
        return process.wait()


def _install_needed() -> None:
    missing = [name for name in _NEEDED if not _has(name)]
    if missing:
        _pip("install", *missing)


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _install(wheel: Path) -> None:
    _install_needed()
    # Without its dependencies: pip might choose other frameworks than those that it was compiled for.
    _pip("install", "--force-reinstall", "--no-deps", str(wheel))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise StartError(
            f"pip {' '.join(arguments)} failed: {' '.join(errors[-2:])}",
            fix="check the network and pip's index; --rebuild makes a damaged wheel anew",
        )


def _require_installed() -> Installed:
    importlib.invalidate_caches()
    horovod = installed()
    if horovod is None:
        raise StartError("pip installed Horovod, but it can't be found", where=sys.executable)
    return horovod


def _prove_all(horovod: Installed, progress: Progress) -> None:
    """Every framework with every controller.

    Raises:
        CheckFailedError: one of them doesn't work.
    """
    for proof in proofs(horovod):
        part = f"{proof.framework} over {proof.controller}"
        progress.step(f"allreduce of two processes, {part}: {'ok' if proof.ok else 'FAILED'}")
        if not proof.ok:
            raise CheckFailedError(
                f"Horovod was built, but {part} doesn't work:\n" + "\n".join(f"  {line}" for line in proof.error),
                fix="see 'hvdtrain horovod check'",
            )
