"""The machine itself: its names, user, operating system, processors, memory and clock."""

from __future__ import annotations

import os
import pwd
import socket
import time
from pathlib import Path

from hvdtrain.probe.annotations import Any
from hvdtrain.probe.reading import integer, text, to_integer

_THREAD_FOLDERS = "sys/devices/system/cpu"


def collect(root: Path = Path("/")) -> dict[str, Any]:
    """Facts of section ``system``; the package's docstring names them."""
    return {
        **_identity(root),
        **_operating_system(root),
        **_processors(root),
        **_load(root),
        **_memory(root),
        **_ecc(root),
        "time_unix_s": time.time(),
    }


def _identity(root: Path) -> dict[str, Any]:
    uid = os.getuid()
    try:
        entry = pwd.getpwuid(uid)
        user, home = entry.pw_name, entry.pw_dir
    except KeyError:
        user, home = str(uid), os.environ.get("HOME", "")
    hostname = text(root / "proc/sys/kernel/hostname") or socket.gethostname()
    return {"hostname": hostname, "fqdn": _full_name(hostname), "user": user, "home": home, "uid": uid,
            "gid": os.getgid()}  # fmt: skip


def _full_name(hostname: str) -> str:
    """The name with its domain, from /etc/hosts and the like only: a DNS server that is down takes many seconds."""
    for line in (text(Path("/etc/hosts")) or "").splitlines():
        names = line.partition("#")[0].split()[1:]
        if hostname in names:
            return next((name for name in names if name.startswith(hostname + ".")), hostname)
    return hostname


def _operating_system(root: Path) -> dict[str, Any]:
    release = {}
    for line in (text(root / "etc/os-release") or text(root / "usr/lib/os-release") or "").splitlines():
        name, _, value = line.partition("=")
        release[name] = value.strip("\"'")
    uptime = (text(root / "proc/uptime") or "").split()
    return {
        "os_id": release.get("ID"),
        "os_version": release.get("VERSION_ID"),
        "os_name": release.get("PRETTY_NAME"),
        "kernel": text(root / "proc/sys/kernel/osrelease") or os.uname().release,
        "machine": os.uname().machine,
        "boot_id": text(root / "proc/sys/kernel/random/boot_id"),
        "uptime_s": float(uptime[0]) if uptime else None,
    }


def _processors(root: Path) -> dict[str, Any]:
    """From /proc/cpuinfo in one reading: machines with hundreds of threads have thousands of files of topology."""
    threads, cores, sockets = 0, set(), set()
    model = physical = None
    for line in (text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if name == "processor":
            threads += 1
        elif name == "model name" and model is None:
            model = value
        elif name == "physical id":
            physical = value
            sockets.add(value)
        elif name == "core id":
            cores.add((physical, value))
    governors = {text(path) for path in (root / _THREAD_FOLDERS / "cpufreq").glob("policy*/scaling_governor")}
    return {
        "cpu_model": model,
        "cpu_sockets": len(sockets) or 1,
        "cpu_cores": len(cores) or threads,
        "cpu_threads": threads,
        "cpu_allowed": len(os.sched_getaffinity(0)),
        "cpu_governors": sorted(governor for governor in governors if governor),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "numa_balancing": _is_on(integer(root / "proc/sys/kernel/numa_balancing")),
        "transparent_hugepages": _chosen(text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
    }


def _is_on(number: int | None) -> bool | None:
    return None if number is None else number != 0


def _chosen(modes: str | None) -> str | None:
    """``madvise`` out of ``always [madvise] never``."""
    return next((mode.strip("[]") for mode in (modes or "").split() if mode.startswith("[")), None)


def _load(root: Path) -> dict[str, Any]:
    words = (text(root / "proc/loadavg") or "").split()[:3]
    return {name: float(word) for name, word in zip(("load_1m", "load_5m", "load_15m"), words)}  # noqa: B905


def _memory(root: Path) -> dict[str, Any]:
    found = {}
    for line in (text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        number = to_integer(words[0]) if words else None
        if number is not None:
            found[name] = number * 1024 if words[1:] == ["kB"] else number
    return {
        "mem_total_bytes": found.get("MemTotal"),
        "mem_available_bytes": found.get("MemAvailable"),
        "swap_total_bytes": found.get("SwapTotal"),
        "swap_free_bytes": found.get("SwapFree"),
        "hugepages_total": found.get("HugePages_Total"),
        "hugepage_size_bytes": found.get("Hugepagesize"),
    }


def _ecc(root: Path) -> dict[str, Any]:
    controllers = list((root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))

    def total(name: str) -> int | None:
        counts = [integer(controller / name) for controller in controllers]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    return {"ecc_controllers": len(controllers), "ecc_corrected": total("ce_count"),
            "ecc_uncorrected": total("ue_count")}  # fmt: skip
