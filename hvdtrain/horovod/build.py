"""Builds Horovod against the frameworks that are installed, installs it, and proves that it works."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from hvdtrain.errors import CheckFailedError, HvdtrainError, StartError
from hvdtrain.horovod import cache, source
from hvdtrain.horovod.diagnose import first_error
from hvdtrain.horovod.edits import apply_edits
from hvdtrain.horovod.installed import Installed, installed
from hvdtrain.horovod.prove import prove
from hvdtrain.horovod.record import make_record, write_record
from hvdtrain.horovod.toolchain import Toolchain, inspect_toolchain
from hvdtrain.processes import end_with_parent

# A compiler process of Horovod's largest files takes about this much.
_MEMORY_PER_JOB = 1536 * 1024**2
_PERCENT = re.compile(r"\[\s*(\d+)%\]")
_HOROVOD_NAMES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}


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


def build(request: Request, progress: Progress) -> Installed:
    """Build or take from the cache, install, and prove. Returns what is then installed.

    Raises:
        StartError: something that a build needs isn't there.
        CheckFailedError: the build or its proof failed.
    """
    toolchain = _select(inspect_toolchain(), request)
    record = make_record(toolchain, with_mpi=request.with_mpi)
    for line in _describe(toolchain, record):
        progress.step(line)
    now = installed()
    if now is not None and now.record == record and not request.rebuild:
        progress.step("this build is installed already")
        return now
    key = cache.cache_key(record)
    with cache.locked(key):
        wheel = None if request.rebuild else cache.cached_wheel(key)
        if wheel is not None:
            progress.step(f"found in the cache: {wheel}")
        else:
            with tempfile.TemporaryDirectory(prefix="hvdtrain-build-") as name:
                wheel = cache.store(key, _compile(Path(name), toolchain, record, request, progress), record)
        _install(wheel)
        horovod = _require_installed()
        if not cache.is_proved(key):
            _prove_all(horovod, progress)
            cache.mark_proved(key)
        return horovod


def _select(toolchain: Toolchain, request: Request) -> Toolchain:
    """The toolchain with only the frameworks that are wanted, checked for what a build needs."""
    available = {framework.name: framework for framework in toolchain.frameworks}
    wanted = request.frameworks or tuple(available)
    missing = [name for name in wanted if name not in available]
    if missing or not wanted:
        what = " and ".join(missing) + (" isn't" if len(missing) == 1 else " aren't") if missing else "no framework is"
        raise StartError(
            f"{what} installed in {sys.executable}",
            fix=f"install {' and '.join(missing) or 'torch or tensorflow'} there, then build again",
        )
    if toolchain.compiler is None:
        raise StartError("no C++ compiler found", fix="install g++ (Debian: apt-get install g++), or set CXX")
    if shutil.which("make") is None and shutil.which("ninja") is None:
        raise StartError("make isn't installed", fix="install it (Debian: apt-get install make)")
    if toolchain.cmake is None:
        raise StartError("CMake isn't installed", fix=f"{sys.executable} -m pip install cmake")
    return replace(toolchain, frameworks=tuple(available[name] for name in wanted))


def _describe(toolchain: Toolchain, record: dict[str, Any]) -> Iterable[str]:
    frameworks = ", ".join(f"{each.name} {each.version}" for each in toolchain.frameworks)
    yield f"Horovod {source.VERSION} for {frameworks} on Python {toolchain.python.version} ({toolchain.python.path})"
    mpi = f"MPI ({record['mpi']})" if record["mpi"] else "no MPI"
    nccl = f"NCCL ({record['nccl']})" if record["nccl"] else f"no NCCL: {toolchain.why_no_nccl}"
    assert toolchain.compiler is not None
    yield f"Gloo, {mpi}, {nccl}; C++{toolchain.cxx_standard} by {toolchain.compiler.path} {toolchain.compiler.version}"


def _compile(folder: Path, toolchain: Toolchain, record: dict[str, Any], request: Request, progress: Progress) -> Path:
    progress.step("getting the sources" if request.sdist is None else f"unpacking {request.sdist}")
    package = request.sdist or source.download(folder)
    source.check_hash(package)
    sources = source.unpack(package, folder)
    for edit in apply_edits(sources, toolchain):
        progress.step(f"edit {edit.file}: {edit.why}")
    write_record(sources, record)
    log = cache.log_file(cache.cache_key(record))
    progress.step(f"compiling, a few minutes; log: {log}")
    command = [
        sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-build-isolation", "--no-deps",
        "--no-cache-dir", "--verbose", "--wheel-dir", str(folder / "wheel"), str(sources),
    ]  # fmt: skip
    status = _run(command, _build_environment(toolchain, record), log, progress)
    wheel = next((folder / "wheel").glob("*.whl"), None)
    if status != 0 or wheel is None:
        error = first_error(log.read_text(errors="replace"))
        raise CheckFailedError(
            "the build failed:\n" + "\n".join(f"  {line}" for line in error.lines),
            fix=f"{error.remedy}\n  log: {log}",
        )
    return wheel


def _build_environment(toolchain: Toolchain, record: dict[str, Any]) -> dict[str, str]:
    """The user's environment without what would steer Horovod's build unseen, and with every part asked for.

    A part that is asked for and can't be built fails the build; otherwise it would be left out without a word
    (horovod issue 401).
    """
    assert toolchain.cmake is not None
    assert toolchain.compiler is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    names = {framework.name for framework in toolchain.frameworks}
    for name, horovods in _HOROVOD_NAMES.items():
        environment[f"HOROVOD_{'WITH' if name in names else 'WITHOUT'}_{horovods}"] = "1"
    environment |= {
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        "HOROVOD_WITH_MPI" if record["mpi"] else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_CMAKE": str(toolchain.cmake.path),
        "CXX": str(toolchain.compiler.path),
        # CMake 4 refuses the bundled Gloo, which asks for an older one's behaviour.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    if toolchain.nccl:
        environment |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": str(toolchain.nccl)}
    environment.setdefault("MAKEFLAGS", f"-j{_jobs()}")
    return environment


def _jobs() -> int:
    by_memory = psutil.virtual_memory().available // _MEMORY_PER_JOB
    return max(1, min(len(os.sched_getaffinity(0)), int(by_memory)))


def _run(command: list[str], environment: dict[str, str], log: Path, progress: Progress) -> int:
    """Run a command with its output in a log. Whatever happens here, it doesn't outlive this function."""
    shown = -1
    with log.open("w", errors="replace") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent(signal.SIGTERM),
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                match = _PERCENT.search(line)
                if match and int(match[1]) > shown:
                    shown = int(match[1])
                    progress.percent(shown)
            return process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _install(wheel: Path) -> None:
    # Without its dependencies: pip might choose other frameworks than those that it was compiled for.
    _pip("install", "--force-reinstall", "--no-deps", str(wheel))
    _pip("install", "cloudpickle", "packaging", "psutil", "pyyaml", "cffi")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise HvdtrainError(f"pip {' '.join(arguments)} failed: {done.stderr.strip().splitlines()[-1:]}")


def _require_installed() -> Installed:
    horovod = installed()
    if horovod is None:
        raise HvdtrainError("pip installed Horovod, but it can't be found", where=sys.executable)
    return horovod


def _prove_all(horovod: Installed, progress: Progress) -> None:
    """Every framework with every controller.

    Raises:
        CheckFailedError: one of them doesn't work.
    """
    for framework in horovod.frameworks:
        for controller in horovod.controllers:
            proof = prove(horovod, framework, controller)
            progress.step(
                f"allreduce of two processes, {framework} over {controller}: {'ok' if proof.ok else 'FAILED'}"
            )
            if not proof.ok:
                raise CheckFailedError(
                    f"Horovod was built, but {framework} over {controller} doesn't work:\n"
                    + "\n".join(f"  {line}" for line in proof.error),
                    fix="see 'hvdtrain horovod check'",
                )
