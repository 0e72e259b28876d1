"""What the user's processes may use: resource limits, cgroups and shared memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hvdtrain.probe.annotations import Any
from hvdtrain.probe.reading import integer, text, to_integer

_LIMITS = (
    ("nofile", "", resource.RLIMIT_NOFILE),
    ("memlock", "_bytes", resource.RLIMIT_MEMLOCK),
    ("nproc", "", resource.RLIMIT_NPROC),
    ("core", "_bytes", resource.RLIMIT_CORE),
)
# Version 1 writes "no limit" as the largest number of pages.
_NO_LIMIT_BYTES = 1 << 60


def collect(root: Path = Path("/")) -> dict[str, Any]:
    """Facts of section ``limits``; the package's docstring names them."""
    found: dict[str, Any] = {}
    for name, unit, number in _LIMITS:
        soft, hard = resource.getrlimit(number)
        found[f"{name}_soft{unit}"] = -1 if soft == resource.RLIM_INFINITY else soft
        found[f"{name}_hard{unit}"] = -1 if hard == resource.RLIM_INFINITY else hard
    return {**found, **_cgroups(root), **_shared_memory(root)}


def _cgroups(root: Path) -> dict[str, Any]:
    """The least limit on the way from this process's group to the top."""
    places = {}
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            places[controller] = path.strip("/")
    top = root / "sys/fs/cgroup"
    if "memory" in places or "cpu" in places:
        cpu_folder = next((name for name in ("cpu", "cpu,cpuacct", "cpuacct,cpu") if (top / name).is_dir()), "cpu")
        memory = _memory_limits(top / "memory", places.get("memory", ""), "memory.limit_in_bytes")
        cpu = [_v1_cpus(folder) for folder in _upward(top / cpu_folder, places.get("cpu", ""))]
        version = 1
    else:
        memory = _memory_limits(top, places.get("", ""), "memory.max")
        cpu = [_v2_cpus(folder) for folder in _upward(top, places.get("", ""))]
        version = 2
    return {
        "cgroup_version": version,
        "cgroup_memory_limit_bytes": min(memory, default=None),
        "cgroup_cpu_limit": min((count for count in cpu if count), default=None),
    }


def _upward(top: Path, path: str) -> list[Path]:
    folders = [top]
    for name in path.split("/"):
        if name and name != "..":
            folders.append(folders[-1] / name)
    return folders


def _memory_limits(top: Path, path: str, name: str) -> list[int]:
    limits = [integer(folder / name) for folder in _upward(top, path)]
    return [limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES]


def _v1_cpus(folder: Path) -> float | None:
    quota, period = integer(folder / "cpu.cfs_quota_us"), integer(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _v2_cpus(folder: Path) -> float | None:
    words = (text(folder / "cpu.max") or "").split()
    quota, period = (to_integer(word) for word in words) if len(words) == 2 else (None, None)
    return quota / period if quota and period else None


def _shared_memory(root: Path) -> dict[str, Any]:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return {"shm_total_bytes": None, "shm_free_bytes": None}
    return {"shm_total_bytes": found.f_blocks * found.f_frsize, "shm_free_bytes": found.f_bavail * found.f_frsize}
