"""The paths that a job needs, the file systems under them, and the machine's NVMe devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.probe.annotations import Any
from hvdtrain.probe.reading import integer, text

_SECTOR_BYTES = 512
_WRITTEN_BYTES = 4096


def collect(root: Path = Path("/"), paths: Iterable[str] = (), write: Iterable[str] = ()) -> dict[str, Any]:
    """Facts of section ``disks``; the package's docstring names them.

    Args:
        root: where ``/sys`` is found; the paths themselves are this machine's.
        paths: to look at; ``~`` is the user's home.
        write: those that a small file is really written to and removed from again.
    """
    mounts = _mounts(root)
    written = set(write)
    asked = {path: _path(path, mounts, write=path in written) for path in dict.fromkeys([*paths, *written])}
    return {"paths": asked, "nvme": _nvme(root)}


def _path(asked: str, mounts: list[tuple[str, str, str]], *, write: bool) -> dict[str, Any]:
    path = Path(asked).expanduser() if asked.startswith("~") else Path(asked)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return {"exists": False}
    except OSError as error:
        return {"exists": False, "error": error.strerror}
    real = os.path.realpath(str(path))
    mount_point, device, filesystem = _mount_of(real, mounts)
    facts: dict[str, Any] = {
        "exists": True,
        "is_dir": path.is_dir(),
        "readable": os.access(real, os.R_OK),
        "writable": os.access(real, os.W_OK),
        "executable": os.access(real, os.X_OK),
        "real_path": real,
        "mount_point": mount_point,
        "device": device,
        "filesystem": filesystem,
        **_space(real),
    }
    if write:
        facts["write_error"] = _write(real if path.is_dir() else str(Path(real).parent))
    return facts


def _space(real: str) -> dict[str, Any]:
    try:
        found = os.statvfs(real)
    except OSError:
        return {}
    return {
        "read_only": bool(found.f_flag & os.ST_RDONLY),
        "total_bytes": found.f_blocks * found.f_frsize,
        "free_bytes": found.f_bavail * found.f_frsize,
        "total_inodes": found.f_files,
        "free_inodes": found.f_favail,
    }


def _write(folder: str) -> str | None:
    """Write a small file for real: quotas, full disks and broken mounts aren't seen by looking at rights."""
    path = Path(folder) / f".hvdtrain-probe-{os.urandom(8).hex()}"
    try:
        with path.open("xb", buffering=0) as file:
            try:
                written = file.write(b"\0" * _WRITTEN_BYTES)
                # On a network file system, errors of writing come now.
                os.fsync(file.fileno())
            finally:
                path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None if written == _WRITTEN_BYTES else "No space left on device"


def _mounts(root: Path) -> list[tuple[str, str, str]]:
    """Mount point, device and file system of each mount, as proc_pid_mountinfo(5) gives them."""
    mounts = []
    for line in (text(root / "proc/self/mountinfo") or "").splitlines():
        place, _, source = line.partition(" - ")
        with contextlib.suppress(IndexError, ValueError):
            filesystem, device = source.split()[:2]
            mounts.append((_unescaped(place.split()[4]), _unescaped(device), filesystem))
    return mounts


def _unescaped(word: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(code, character)
    return word


def _mount_of(real: str, mounts: list[tuple[str, str, str]]) -> tuple[str | None, str | None, str | None]:
    best: tuple[str | None, str | None, str | None] = (None, None, None)
    for mount in mounts:
        point = mount[0]
        # Of two at one place the later hides the earlier.
        if (real + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best[0] or ""):
            best = mount
    return best


def _nvme(root: Path) -> list[dict[str, Any]]:
    devices = []
    for folder in sorted((root / "sys/block").glob("nvme*")):
        sectors = integer(folder / "size")
        devices.append(
            {
                "name": folder.name,
                "model": text(folder / "device/model"),
                "size_bytes": None if sectors is None else sectors * _SECTOR_BYTES,
            }
        )
    return devices
