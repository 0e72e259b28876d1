"""A profile made from what a cluster that is known to be good has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.cluster.groups import fold
from hvdtrain.cluster.kept import write_own
from hvdtrain.cluster.profiles.facts import Has
from hvdtrain.cluster.profiles.quantities import numbers
from hvdtrain.cluster.quick import Looked

# Of what was measured, so much is expected later: disks and memory are shared with more than a network is.
_BANDWIDTH, _DISK, _MEMORY = 0.8, 0.5, 0.7
# A round trip may take so many times as long, and this long in any case.
_LATENCY, _LATENCY_S = 2.0, 100e-6
_CLOCK = "at most 1 s"
# Rounded down to so many digits.
_DIGITS = 2


def write_profile(looked: Looked, path: Path) -> None:
    """Write what the hosts have as a profile that they hold; in place of a file that is there.

    Raises:
        StartError: the file can't be written.
    """
    write_own(path, profile_text(looked, path.stem), "the profile", "--write-profile")


def profile_text(looked: Looked, name: str) -> str:
    """The profile as YAML."""
    has = [Has(looked.evidence, host, looked.measured) for host in looked.evidence.reached]
    content = {"name": name, "hosts": len(has), **_pruned(_contents(has))}
    level = looked.report.level
    head = f"# What {fold(looked.report.hosts)} had ('hvdtrain validate-cluster --level {level} --write-profile').\n"
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)


def _contents(has: Sequence[Has]) -> dict[str, Any]:
    def each(value: Callable[[Has], Any]) -> list[Any]:
        return [value(one) for one in has]

    def value(*path: str) -> list[Any]:
        return [one.evidence.value(one.host, *path) for one in has]

    return {
        "os": _names(each(_os)),
        "kernel": _versions(value("system", "kernel"), 2),
        "clock": _CLOCK if any(one.host in one.evidence.clocks for one in has) else None,
        "cpu": {
            "models": _names(value("system", "cpu_model")),
            "sockets": _count(value("system", "cpu_sockets")),
            "cores": _count(value("system", "cpu_cores")),
            "threads": _count(value("system", "cpu_threads")),
            "governor": _same([(found or [None])[0] for found in value("system", "cpu_governors")]),
            "numa_balancing": _same(value("system", "numa_balancing")),
        },
        "memory": {
            "total": _least(value("system", "mem_total_bytes"), _binary),
            "ecc": True if all(value("system", "ecc_controllers")) else None,
        },
        "storage": {"nvme": _least(each(lambda one: one.nvme_bytes or None), _decimal)},
        "gpu": _gpu(has),
        "fabric": {
            "kinds": sorted({kind for one in has for kind in one.fabric_kinds}),
            "adapters": _count(each(lambda one: one.adapters or None)),
            "rate": _rates([rate for one in has for rate in one.port_rates]),
        },
        "limits": {
            "open_files": _files(value("limits", "nofile_soft")),
            "locked_memory": "unlimited" if set(value("limits", "memlock_soft_bytes")) == {-1} else None,
        },
        "software": _software(has, value),
        "measured": _measured(has),
    }


def _gpu(has: Sequence[Has]) -> dict[str, Any]:
    counts = [one.evidence.value(one.host, "gpus", "count") for one in has]
    if not any(counts):
        return {}
    return {
        "models": sorted({model for one in has for model in one.gpu_models}),
        "count": _count(counts),
        "memory": _least([one.gpu_memory_bytes for one in has], _binary),
        "ecc": _same([one.gpu_ecc for one in has]),
        "driver": _versions([one.evidence.value(one.host, "gpus", "driver_version") for one in has], 2),
    }


def _software(has: Sequence[Has], value: Callable[..., list[Any]]) -> dict[str, Any]:
    return {
        "python": _versions(value("software", "python_version"), 2),
        **{name: _versions([one.package(name) for one in has], 2) for name in ("torch", "tensorflow", "horovod")},
        "frameworks": _common([one.horovod("frameworks") for one in has]),
        "controllers": _common([one.horovod("controllers") for one in has]),
        "nccl": True if all(one.horovod("nccl") for one in has) else None,
        "mpi": _versions(value("software", "mpirun_version"), 2),
        "cuda": _versions(value("software", "cuda_driver_version"), 2),
    }


def _measured(has: Sequence[Has]) -> dict[str, Any]:
    latencies = [one.latency_s for one in has if one.latency_s is not None]
    longest_us = max((max(_LATENCY * latency, _LATENCY_S) * 1e6 for latency in latencies), default=None)
    return {
        "bandwidth": _least([one.bandwidth for one in has], _rate, _BANDWIDTH),
        "latency": f"at most {math.ceil(longest_us)} us" if longest_us else None,
        "allreduce": _least([one.allreduce for one in has], _rate, _BANDWIDTH),
        "disk_write": _least([one.speed("disk-write") for one in has], _speed, _DISK),
        "disk_read": _least([one.speed("disk-read") for one in has], _speed, _DISK),
        "memory": _least([one.speed("memory-bandwidth") for one in has], _speed, _MEMORY),
    }


# --- one expectation for all hosts; None where not every host tells ----------------------------------------------


def _names(values: Iterable[str | None]) -> list[str]:
    return sorted({value for value in values if value})


def _os(one: Has) -> str | None:
    """``Ubuntu 22.04``: updates change what follows."""
    name, version = one.system("os_name"), one.system("os_version")
    return " ".join(filter(None, (str(name).split()[0], version))) if name else None


def _same(values: Sequence[Any]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else None


def _common(values: Sequence[Any]) -> list[str]:
    return sorted(set.intersection(*(set(value or ()) for value in values))) if values else []


def _count(values: Sequence[Any]) -> int | str | None:
    if not values or not all(isinstance(value, int) for value in values):
        return None
    low, high = min(values), max(values)
    return int(low) if low == high else f"{low} to {high}"


def _files(limits: Sequence[int | None]) -> str | None:
    if not limits or None in limits:
        return None
    bounded = [limit for limit in limits if limit is not None and limit >= 0]
    return f"at least {min(bounded)}" if bounded else None


def _rates(values: Sequence[float]) -> str | None:
    if not values:
        return None
    low, high = min(values) / 1e9, max(values) / 1e9
    return f"{low:g} Gbit/s" if low == high else f"{low:g} to {high:g} Gbit/s"


def _least(values: Sequence[Any], shown: Callable[[float], str], part: float = 1.0) -> str | None:
    known = [value for value in values if isinstance(value, int | float) and value > 0]
    if not known or len(known) < len(values):
        return None
    number = min(known) * part
    return f"at least {shown(number)}"


def _versions(values: Sequence[Any], count: int) -> str | None:
    """So many numbers of them: updates change what follows."""
    found = [numbers(str(value)) if value else None for value in values]
    if not found or None in found:
        return None
    low, high = (".".join(map(str, pick(found)[:count])) for pick in (min, max))  # type: ignore[type-var,index]
    return low if low == high else f"{low} to {high}"


def _down(number: float) -> float:
    """Rounded down to two digits."""
    step = 10.0 ** (math.floor(math.log10(number)) - _DIGITS + 1)
    return math.floor(number / step) * step


def _in(number: float, units: Sequence[str], base: int) -> str:
    place = min(len(units) - 1, int(math.log(max(number, 1), base)))
    return f"{_down(number / base**place):g} {units[place]}"


def _binary(number: float) -> str:
    return _in(number, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def _decimal(number: float) -> str:
    return _in(number, ("B", "kB", "MB", "GB", "TB"), 1000)


def _speed(number: float) -> str:
    return f"{_decimal(number)}/s"


def _rate(number: float) -> str:
    return f"{_down(number / 1e6):g} Mbit/s" if number < 1e9 else f"{_down(number / 1e9):g} Gbit/s"


def _pruned(content: dict[str, Any]) -> dict[str, Any]:
    """Without what nothing is expected of."""
    inner = {key: _pruned(value) if isinstance(value, dict) else value for key, value in content.items()}
    return {key: value for key, value in inner.items() if value not in (None, [], {})}
