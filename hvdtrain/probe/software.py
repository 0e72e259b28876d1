"""Pythons, packages and tools, read from files: no package is imported, and next to no program started."""

from __future__ import annotations

import ast
import hashlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.probe.annotations import Any
from hvdtrain.probe.reading import output, text, which

PACKAGES = ("hvdtrain", "horovod", "torch", "torchvision", "tensorflow", "tensorflow-cpu", "keras", "numpy", "mpi4py",
            "protobuf", "pydantic")  # fmt: skip
_PACKAGE_PREFIXES = ("nvidia-nccl-cu", "nvidia-cudnn-cu")
_TOOLS = ("horovodrun", "ssh", "ib_write_bw", "dcgmi", "nvidia_smi")
_TOOL_TIMEOUT_S = 5.0
_MAX_HASHED_BYTES = 1 << 30
# What hvdtrain's own build of Horovod leaves inside the package (hvdtrain/horovod/record.py writes it).
_RECORD = "horovod/hvdtrain_build.py"
# Text that a library has only if the part was compiled in (see hvdtrain/horovod/installed.py).
_MARKS = {"gloo": b"GlooAllreduce", "mpi": b"libmpi", "nccl": b"ncclAllReduce"}
_FRAMEWORKS = {"torch": "pytorch", "tensorflow": "tensorflow"}


def collect(root: Path = Path("/"), python: str | None = None, files: Iterable[str] = ()) -> dict[str, Any]:
    """Facts of section ``software``; the package's docstring names them.

    Args:
        root: where ``/proc`` is found; packages and tools are this machine's.
        python: the interpreter that the job is to run in.
        files: to hash, such as the job's script.
    """
    found = _distributions()
    folders = {name: folder for name, (_, folder) in found.items()}
    return {
        **_pythons(python),
        "packages": {name: version for name, (version, _) in sorted(found.items()) if _is_wanted(name)},
        "torch_cuda": _torch_cuda(folders.get("torch")),
        "tensorflow_cuda": _tensorflow_cuda(folders.get("tensorflow") or folders.get("tensorflow-cpu")),
        "horovod": _horovod(*found["horovod"]) if "horovod" in found else None,
        "hvdtrain_version": found["hvdtrain"][0] if "hvdtrain" in found else None,
        "hvdtrain_sha256": _hvdtrain_hash(folders.get("hvdtrain")),
        **_tools(),
        "cuda_driver_version": _driver_version(root),
        "files": {file: _file(file) for file in files},
    }


def sources_hash(package: Path) -> str:
    """SHA-256 over the names and contents of a package's Python files."""
    digest = hashlib.sha256()
    names: list[str] = []
    # Without pathlib, which takes as long for each file as all the rest.
    for folder, folders, files in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        inner = os.path.relpath(folder, package)
        names += [name if inner == "." else f"{inner}/{name}" for name in files if name.endswith(".py")]
    for name in sorted(names):
        with open(f"{package}/{name}", "rb") as file:  # noqa: PTH123
            content = file.read()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _pythons(asked: str | None) -> dict[str, Any]:
    return {
        "python_executable": sys.executable,
        "python_version": sys.version.split()[0],
        "python_asked": asked,
        "python_asked_executable": os.access(asked, os.X_OK) and Path(asked).is_file() if asked else None,
        # Links aren't followed: a virtual environment's Python is a link to the system's.
        "python_asked_is_running": bool(asked) and os.path.abspath(str(asked)) == os.path.abspath(sys.executable),  # noqa: PTH100
    }


def site_folders() -> list[Path]:
    """Where this interpreter would find packages; it runs without module ``site``, which takes longer than this."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefix = Path(sys.executable).parent.parent
    settings = text(prefix / "pyvenv.cfg")
    local = Path("~/.local").expanduser() / "lib" / version / "site-packages"
    # Debian has dist-packages, Fedora and its kin lib64.
    places = (f"lib/{version}/site-packages", f"lib64/{version}/site-packages", f"lib/{version}/dist-packages",
              "lib/python3/dist-packages")  # fmt: skip
    bases = [Path("/usr/local"), Path("/usr")] if sys.prefix == "/usr" else [Path(sys.prefix)]
    everywhere = [local, *(base / place for base in bases for place in places)]
    if settings is None:
        own = everywhere
    else:
        own = [prefix / "lib" / version / "site-packages", prefix / "lib64" / version / "site-packages"]
        if "include-system-site-packages = true" in settings.lower():
            own += everywhere
    asked = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    return [folder for folder in dict.fromkeys([*asked, *own]) if folder.is_dir()]


def _distributions() -> dict[str, tuple[str, Path]]:
    """Version and folder of each installed distribution, from the names of their metadata folders."""
    found: dict[str, tuple[str, Path]] = {}
    for folder in site_folders():
        try:
            entries = os.listdir(folder)  # noqa: PTH208 -- names are all that is needed of thousands of files
        except OSError:
            continue
        for entry in entries:
            stem, _, ending = entry.rpartition(".")
            name, _, version = stem.partition("-")
            if ending == "dist-info" or (ending == "egg-info" and version):
                version = version.split("-py3")[0]
                found.setdefault(name.lower().replace("_", "-").replace(".", "-"), (version, folder))
    return found


def _is_wanted(name: str) -> bool:
    return name in PACKAGES or name.startswith(_PACKAGE_PREFIXES)


def _torch_cuda(folder: Path | None) -> str | None:
    for line in (text(folder / "torch/version.py") or "").splitlines() if folder else ():
        name, _, value = line.partition("=")
        if name.partition(":")[0].strip() == "cuda":
            return None if value.strip() == "None" else value.strip().strip("'\"")
    return None


def _tensorflow_cuda(folder: Path | None) -> str | None:
    """From the file that its build writes: ``("cuda_version", "12.5.1")``."""
    written = text(folder / "tensorflow/python/platform/build_info.py") if folder else None
    found = re.search(r"""["']cuda_version["'],\s*["']([^"']+)["']""", written or "")
    return found.group(1) if found else None


def _horovod(version: str, folder: Path) -> dict[str, Any]:
    package = folder / "horovod"
    libraries = {name: next(package.glob(f"{name}/mpi_lib*.so"), None) for name in _FRAMEWORKS}
    built = {name: library for name, library in libraries.items() if library is not None}
    record = _literal(folder / _RECORD)
    if record is not None:
        parts: dict[str, bool] = {part: bool(record.get(part)) for part in _MARKS}
        versions = record.get("frameworks") or {}
    else:
        marks = [_marks(library) for library in built.values()]
        parts = {part: any(found[part] for found in marks) for part in _MARKS}
        noted = _noted(package)
        versions = {name: noted.get(key) for name, key in _FRAMEWORKS.items()}
    return {
        "version": version,
        "frameworks": {name: versions.get(name) for name in built},
        "controllers": [name for name in ("gloo", "mpi") if parts[name]],
        "nccl": parts["nccl"],
        "record": record,
    }


def _literal(path: Path) -> dict[str, Any] | None:
    """The dictionary that a Python file's last statement assigns; None if it does no such thing."""
    try:
        value = ast.literal_eval(ast.parse(text(path) or "").body[-1].value)  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, AttributeError, IndexError):
        return None
    return value if isinstance(value, dict) else None


def _noted(package: Path) -> dict[str, Any]:
    try:
        noted = json.loads(text(package / "metadata.json") or "{}")
    except ValueError:
        return {}
    return noted if isinstance(noted, dict) else {}


def _marks(library: Path) -> dict[str, bool]:
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return {part: content.find(mark) >= 0 for part, mark in _MARKS.items()}
    except (OSError, ValueError):
        return dict.fromkeys(_MARKS, False)


def _hvdtrain_hash(folder: Path | None) -> str | None:
    package = folder / "hvdtrain" if folder else None
    if folder and package and not package.is_dir():
        package = _editable(folder)
    try:
        return sources_hash(package) if package else None
    except OSError:
        return None


def _editable(folder: Path) -> Path | None:
    """Where an installation for development has its sources (setuptools' ``.pth`` or finder)."""
    for link in folder.glob("__editable__*hvdtrain*.pth"):
        for line in (text(link) or "").splitlines():
            if (Path(line) / "hvdtrain").is_dir():
                return Path(line) / "hvdtrain"
    for finder in folder.glob("__editable___hvdtrain*_finder.py"):
        for line in (text(finder) or "").splitlines():
            name, _, mapping = line.partition("=")
            if name.partition(":")[0].strip() == "MAPPING":
                place = ast.literal_eval(mapping.strip()).get("hvdtrain")
                return Path(place) if place else None
    return None


def _tools() -> dict[str, Any]:
    found: dict[str, Any] = {tool: which(tool.replace("nvidia_smi", "nvidia-smi")) for tool in _TOOLS}
    # A job's environment has its Python's folder first.
    beside = Path(sys.executable).parent / "horovodrun"
    if beside.is_file():
        found["horovodrun"] = str(beside)
    mpirun = which("mpirun")
    return {**found, "mpirun": mpirun, "mpirun_version": _mpi_version(mpirun)}


def _mpi_version(mpirun: str | None) -> str | None:
    """``Open MPI 4.1.4``, or the first line of what another MPI's mpirun says."""
    said, _ = output([mpirun, "--version"], _TOOL_TIMEOUT_S) if mpirun else (None, None)
    first = (said or "").partition("\n")[0]
    name, mark, version = first.partition("(Open MPI) ")
    return f"Open MPI {version}" if mark and name.startswith("mpirun") else first[:200] or None


def _driver_version(root: Path) -> str | None:
    """From ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct …``."""
    first = (text(root / "proc/driver/nvidia/version") or "").partition("\n")[0]
    return next((word for word in first.split() if word[0].isdigit() and word.count(".") >= 1), None)


def _file(asked: str) -> dict[str, Any]:
    path = Path(asked).expanduser() if asked.startswith("~") else Path(asked)
    try:
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as file:
            left = _MAX_HASHED_BYTES
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                digest.update(piece)
                left -= len(piece)
    except OSError:
        return {"exists": path.exists(), "size_bytes": None, "sha256": None}
    return {"exists": True, "size_bytes": size, "sha256": digest.hexdigest()}
