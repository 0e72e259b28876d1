"""Holds hosts against a profile. What a profile expects and nobody can tell has failed. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hvdtrain.cluster.checks.common import Verdict, by_host, ok, size
from hvdtrain.cluster.measured import Measured
from hvdtrain.cluster.models import Evidence, Finding
from hvdtrain.cluster.profiles.facts import Has
from hvdtrain.cluster.profiles.models import Profile
from hvdtrain.cluster.profiles.quantities import Range, Versions
from hvdtrain.cluster.units import bytes_rate, duration, rate

SUBJECT = "profile"
# Of memory, firmware and kernel keep some; of a GPU's, its driver.
_KEPT = 0.06
# A rate is a nominal one, in floating point.
_EXACT = 1e-6
_UNKNOWN = "it can't be told there"
_WORDS = re.compile(r"[a-z0-9.+]+")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
Judge = Callable[[Has], Verdict]


def check(profile: Profile, evidence: Evidence, measured: Measured | None = None) -> tuple[Finding, ...]:
    """One finding or more for each expectation, named by its key in the profile.

    Args:
        profile: what is expected.
        evidence: what the hosts told.
        measured: what was measured; None: expectations of ``measured`` are skipped.
    """
    findings: list[Finding] = []
    if profile.hosts is not None:
        findings.append(_hosts(profile.hosts, evidence))
    has = {host: Has(evidence, host, measured) for host in evidence.reached}
    for key, judge in _expectations(profile, evidence):
        findings += by_host(evidence, SUBJECT, key, lambda host, judge=judge: judge(has[host]))  # type: ignore[misc]
    return tuple(findings)


def _hosts(wanted: Range, evidence: Evidence) -> Finding:
    count = len(evidence.hosts)
    said = f"{count} host{'s' if count != 1 else ''}"
    if wanted.holds(count):
        return Finding(SUBJECT, "hosts", evidence.names, "ok", said)
    fix = "give all of the cluster's hosts, or correct the profile"
    return Finding(SUBJECT, "hosts", evidence.names, "fail", said, wanted.text, fix)


def _expectations(profile: Profile, evidence: Evidence) -> Iterator[tuple[str, Judge]]:
    """Key and judge of everything that the profile expects of each host."""
    for section in (_system, _devices, _software):
        for key, judge in section(profile, evidence):
            if judge is not None:
                yield key, judge
    measured = profile.measured
    fabric_fix = "see the findings about 'network'; check cable, switch port and negotiated speed"
    for key, wanted, value, shown, fix in (
        ("bandwidth", measured.bandwidth, lambda has: has.bandwidth, rate, fabric_fix),
        ("latency", measured.latency, lambda has: has.latency_s, duration, "look for power saving and a longer way"),
        ("allreduce", measured.allreduce, lambda has: has.allreduce, rate, fabric_fix),
        ("disk_write", measured.disk_write, _speed("disk-write"), bytes_rate, "use a faster disk"),
        ("disk_read", measured.disk_read, _speed("disk-read"), bytes_rate, "use a faster disk"),
        ("memory", measured.memory, _speed("memory-bandwidth"), bytes_rate, "fill all memory channels"),
    ):
        if judge := _number(wanted, value, shown, fix):
            yield f"measured.{key}", _if_measured(judge)


def _if_measured(judge: Judge) -> Judge:
    return lambda has: judge(has) if has.measured else ("skip", "measured at level standard", "", "")


def _system(profile: Profile, evidence: Evidence) -> Iterator[tuple[str, Judge | None]]:
    cpu, memory, limits = profile.cpu, profile.memory, profile.limits
    yield "os", _one_of(profile.os, lambda has: _listed(has.system("os_name")), "install one of them there")
    yield "kernel", _version(profile.kernel, _fact("system", "kernel"), "boot such a kernel there")
    yield "clock", _number(profile.clock, lambda has: _clock(evidence, has.host), duration, "run chrony or ntpd there")
    yield "cpu.models", _one_of(cpu.models, lambda has: _listed(has.system("cpu_model")), "use hosts with one of them")
    for name, wanted in (("sockets", cpu.sockets), ("cores", cpu.cores), ("threads", cpu.threads)):
        fix = f"use hosts with so many {name}"
        yield f"cpu.{name}", _number(wanted, _fact("system", f"cpu_{name}"), _count, fix)
    yield "cpu.governor", _governor(cpu.governor)
    fix = f"sysctl kernel.numa_balancing={int(bool(cpu.numa_balancing))}"
    yield "cpu.numa_balancing", _flag(cpu.numa_balancing, _fact("system", "numa_balancing"), fix)
    fix = "add memory, or look for a module that failed"
    yield "memory.total", _number(memory.total, _fact("system", "mem_total_bytes"), size, fix, _KEPT)
    fix = "use hosts with ECC memory, and load the kernel's EDAC driver there"
    yield "memory.ecc", _flag(memory.ecc, lambda has: bool(has.system("ecc_controllers")), fix)
    fix = "raise nofile in /etc/security/limits.conf there"
    yield (
        "limits.open_files",
        _number(
            limits.open_files, lambda has: _unlimited(evidence.value(has.host, "limits", "nofile_soft")), _count, fix
        ),
    )
    yield "limits.locked_memory", _locked(limits.locked_memory, evidence)


def _devices(profile: Profile, evidence: Evidence) -> Iterator[tuple[str, Judge | None]]:
    storage, gpu, fabric = profile.storage, profile.gpu, profile.fabric
    yield "storage.nvme", _number(storage.nvme, lambda has: has.nvme_bytes, _decimal, "look for a disk that is missing")
    free = _number(storage.free, lambda has: has.free_bytes, _decimal, "make room there, or use another directory")
    if free and not evidence.request.directory:
        free = lambda has: ("skip", "no working directory is given (--directory)", "", "")  # noqa: E731
    yield "storage.free", free
    fix = "look for a GPU that fell off the bus, or use other hosts"
    yield "gpu.count", _number(gpu.count, _fact("gpus", "count"), _count, fix)
    yield "gpu.models", _one_of(gpu.models, lambda has: has.gpu_models, "use hosts with such GPUs")
    yield "gpu.memory", _number(gpu.memory, lambda has: has.gpu_memory_bytes, size, "use hosts with such GPUs", _KEPT)
    yield "gpu.ecc", _flag(gpu.ecc, lambda has: has.gpu_ecc, f"nvidia-smi -e {int(bool(gpu.ecc))}, and restart")
    yield (
        "gpu.driver",
        _version(gpu.driver, _fact("gpus", "driver_version"), "install such a driver there"),
    )
    fix = "look for an adapter that is missing or whose port is down ('ibstat' there)"
    yield "fabric.adapters", _number(fabric.adapters, lambda has: has.adapters, _count, fix)
    yield "fabric.kinds", _one_of(fabric.kinds, lambda has: has.fabric_kinds, "use hosts with such adapters")
    yield "fabric.rate", _numbers(fabric.rate, lambda has: has.port_rates, rate, "check cable and switch port")


def _software(profile: Profile, evidence: Evidence) -> Iterator[tuple[str, Judge | None]]:
    software = profile.software
    pip = "install it there in the job's Python"
    for name, wanted in (("torch", software.torch), ("tensorflow", software.tensorflow)):
        yield f"software.{name}", _version(wanted, _package(name), pip)
    fix = "build it there with 'hvdtrain horovod build'"
    yield "software.horovod", _version(software.horovod, _package("horovod"), fix)
    for name, fact, wanted, fix in (
        ("python", "python_version", software.python, "install it there, or set 'python'"),
        ("mpi", "mpirun_version", software.mpi, "install it there"),
        ("cuda", "cuda_driver_version", software.cuda, "install a driver that has it"),
    ):
        yield f"software.{name}", _version(wanted, _fact("software", fact), fix)
    fix = "build Horovod there with 'hvdtrain horovod build', with what it needs installed"
    yield "software.frameworks", _all_of(software.frameworks, _fact("software", "horovod", "frameworks"), fix)
    yield "software.controllers", _all_of(software.controllers, _fact("software", "horovod", "controllers"), fix)
    yield "software.nccl", _flag(software.nccl, _fact("software", "horovod", "nccl"), fix)


# --- what a host has


def _fact(*path: str) -> Callable[[Has], Any]:
    return lambda has: has.evidence.value(has.host, *path)


def _package(name: str) -> Callable[[Has], str | None]:
    return lambda has: has.package(name)


def _speed(name: str) -> Callable[[Has], float | None]:
    return lambda has: has.speed(name)


# --- kinds of expectations ---------------------------------------------------------------------------------------


def _number(
    wanted: Range | None,
    value: Callable[[Has], float | None],
    shown: Callable[[float], str],
    fix: str,
    spared: float = 0.0,
) -> Judge | None:
    return _numbers(wanted, lambda has: _listed(value(has)), shown, fix, spared)


def _numbers(
    wanted: Range | None,
    values: Callable[[Has], Sequence[float]],
    shown: Callable[[float], str],
    fix: str,
    spared: float = 0.0,
) -> Judge | None:
    """All of the values must be in the range, and there must be one."""
    if wanted is None:
        return None

    def judge(has: Has) -> Verdict:
        found = values(has)
        said = ", ".join(map(shown, found)) or _UNKNOWN
        if found and all(wanted.holds(number, spared or _EXACT) for number in found):
            return ok(said)
        return "fail", said, wanted.text, fix

    return judge


def _version(wanted: Versions | None, value: Callable[[Has], object], fix: str) -> Judge | None:
    if wanted is None:
        return None

    def judge(has: Has) -> Verdict:
        found = value(has)
        if found and wanted.holds(str(found)):
            return ok(found)
        return "fail", str(found or "none"), "any version" if wanted.text == "any" else wanted.text, fix

    return judge


def _one_of(wanted: Sequence[str], values: Callable[[Has], Sequence[str]], fix: str) -> Judge | None:
    """Each of the values must be one that is wanted, and there must be one."""
    if not wanted:
        return None

    def judge(has: Has) -> Verdict:
        found = values(has)
        said = ", ".join(found) or "none"
        if found and all(any(words_match(one, value) for one in wanted) for value in found):
            return ok(said)
        return "fail", said, " or ".join(wanted), fix

    return judge


def _all_of(wanted: Sequence[str], values: Callable[[Has], Iterable[str] | None], fix: str) -> Judge | None:
    if not wanted:
        return None

    def judge(has: Has) -> Verdict:
        found = values(has)
        names = sorted(found or ())
        said = ", ".join(names) or "none"
        return ok(said) if set(wanted) <= set(names) else ("fail", said, " and ".join(wanted), fix)

    return judge


def _flag(wanted: bool | None, value: Callable[[Has], bool | None], fix: str) -> Judge | None:
    if wanted is None:
        return None
    words = {True: "yes", False: "no", None: _UNKNOWN}

    def judge(has: Has) -> Verdict:
        found = value(has)
        return ok(words[found]) if found is wanted else ("fail", words[found], words[wanted], fix)

    return judge


def _governor(wanted: str | None) -> Judge | None:
    if wanted is None:
        return None

    def judge(has: Has) -> Verdict:
        found = has.system("cpu_governors") or []
        said = ", ".join(found) or "the kernel scales no frequency"
        if not set(found) - {wanted}:
            return ok(said)
        return "fail", said, wanted, f"cpupower frequency-set -g {wanted}"

    return judge


def _locked(wanted: str | None, evidence: Evidence) -> Judge | None:
    if wanted is None:
        return None

    def judge(has: Has) -> Verdict:
        found = evidence.value(has.host, "limits", "memlock_soft_bytes")
        said = "unlimited" if found == -1 else _UNKNOWN if found is None else size(found)
        return ok(said) if found == -1 else ("fail", said, wanted, "set memlock in /etc/security/limits.conf there")

    return judge


def words_match(wanted: str, found: str) -> bool:
    """Whether a name has the words of another, in their order; numbers may go on: 8 is in 8.9, and not in 80."""
    rest = iter(_WORDS.findall(found.lower()))
    return all(any(_is_word(word, other) for other in rest) for word in _WORDS.findall(wanted.lower()))


def _is_word(wanted: str, found: str) -> bool:
    return found == wanted or bool(_NUMBERS.fullmatch(wanted) and found.startswith(f"{wanted}."))


def _listed(value: object) -> list:  # type: ignore[type-arg]
    return [] if value is None else [value]


def _clock(evidence: Evidence, host: str) -> float | None:
    """Seconds that a clock differs at least: what the measurement can't tell counts for the host."""
    if host not in evidence.clocks:
        return None
    offset_s, error_s = evidence.clocks[host]
    return max(0.0, abs(offset_s) - error_s)


def _unlimited(limit: Any) -> Any:
    return float("inf") if limit == -1 else limit


def _count(number: float) -> str:
    return "unlimited" if number == float("inf") else f"{number:g}"


def _decimal(number: float) -> str:
    """Bytes as disks are sold, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
