"""What Horovod this interpreter has, found in milliseconds: nothing of it is imported and no process is started."""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.horovod.record import read_record
from hvdtrain.horovod.toolchain import framework_version

_EXTENSIONS = {"torch": "torch/mpi_lib*.so", "tensorflow": "tensorflow/mpi_lib*.so"}
# Text that a library has only if the part was compiled in: a symbol of Gloo's and NCCL's, MPI's library by name.
_MARKS = {"gloo": b"GlooAllreduce", "mpi": b"libmpi", "nccl": b"ncclAllReduce"}


@dataclass(frozen=True)
class Installed:
    """The installed Horovod.

    Attributes:
        version: such as ``0.28.1``.
        frameworks: what it was compiled for, with the version where that is known.
        controllers: of ``gloo`` and ``mpi``.
        nccl: whether it can reduce on GPUs by NCCL.
        horovodrun: its launcher.
        record: what it was built against, if hvdtrain built it.
    """

    version: str
    frameworks: dict[str, str | None]
    controllers: tuple[str, ...]
    nccl: bool
    horovodrun: Path
    record: dict[str, Any] | None


def installed() -> Installed | None:
    """The Horovod in this interpreter's environment; None without one."""
    try:
        distribution = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    package = Path(str(distribution.locate_file("horovod")))
    libraries = {name: next(package.glob(pattern), None) for name, pattern in _EXTENSIONS.items()}
    built = {name: library for name, library in libraries.items() if library is not None}
    record = read_record(package)
    if record is not None:
        parts = {part: bool(record.get(part)) for part in _MARKS}
    else:
        marks = [_marks_of(library) for library in built.values()]
        parts = {part: any(found[part] for found in marks) for part in _MARKS}
    versions = record.get("frameworks", {}) if record else _versions_of(package)
    return Installed(
        version=distribution.version,
        frameworks={name: versions.get(name) for name in sorted(built)},
        controllers=tuple(name for name in ("gloo", "mpi") if parts[name]),
        nccl=parts["nccl"],
        horovodrun=Path(sysconfig.get_path("scripts")) / "horovodrun",
        record=record,
    )


def fits(horovod: Installed, framework: str, now: str) -> bool:
    """Whether an installed framework's version is the one that Horovod was compiled against.

    The local part counts where hvdtrain recorded it: ``2.13.0+cpu`` and ``2.13.0+cu130`` are different libraries.
    Horovod's own notes tell the module's version, which may have another local part than the distribution's.
    """
    built_against = horovod.frameworks[framework]
    if built_against is None or built_against == now:
        return True
    return horovod.record is None and built_against.partition("+")[0] == now.partition("+")[0]


def mismatches(horovod: Installed) -> list[str]:
    """What the installed Horovod no longer fits, one sentence each; empty if all is well.

    A Horovod wheel works with the very versions that it was compiled against: with another PyTorch it fails at import
    with an undefined symbol.
    """
    faults = []
    for name, built_against in horovod.frameworks.items():
        now = framework_version(name)
        if now is None:
            faults.append(f"Horovod was built for {name}, which isn't installed any more")
        elif not fits(horovod, name, now):
            faults.append(f"Horovod was built against {name} {built_against}, but {now} is installed")
    if horovod.record is not None:
        python = ".".join(platform.python_version_tuple()[:2])
        built_for = horovod.record.get("python", python)
        if built_for != python:
            faults.append(f"Horovod was built for Python {built_for}, but this is {python}")
    if not horovod.frameworks:
        faults.append("Horovod is installed without any framework's part")
    if not horovod.horovodrun.is_file():
        faults.append(f"horovodrun is missing: {horovod.horovodrun}")
    return faults


def _marks_of(library: Path) -> dict[str, bool]:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {part: content.find(mark) >= 0 for part, mark in _MARKS.items()}


def _versions_of(package: Path) -> dict[str, str]:
    """Framework versions as Horovod's own build notes them."""
    try:
        noted = json.loads((package / "metadata.json").read_text())
    except (OSError, ValueError):
        return {}
    names = {"torch": "pytorch", "tensorflow": "tensorflow"}
    return {name: str(noted[key]) for name, key in names.items() if key in noted}
