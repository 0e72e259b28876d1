"""Whether the machines are alike and have what training needs."""

from __future__ import annotations

from hvdtrain.cluster.checks.common import Verdict, by_host, equal, ok, size
from hvdtrain.cluster.models import Evidence, Finding

MIN_OPEN_FILES = 1024
MIN_AVAILABLE_BYTES = 1 << 30
# Memory of equal machines differs by what their firmware keeps: it is compared in steps of this part.
_MEMORY_STEP = 0.05
_EQUAL = (
    ("os", "os_name", "fail", "install {value} there"),
    ("kernel", "kernel", "warn", "boot kernel {value} there"),
    ("cpu-model", "cpu_model", "warn", "use hosts with {value}; the slowest sets the pace"),
    ("cpu-cores", "cpu_cores", "warn", "use hosts with {value} cores, or switch the missing ones on"),
    ("governor", "cpu_governors", "warn", "set it to {value} with 'cpupower frequency-set -g'"),
    ("numa-balancing", "numa_balancing", "warn", "sysctl kernel.numa_balancing, to be {value}"),
)


def check(evidence: Evidence) -> list[Finding]:
    """System, processor, memory, limits and load."""
    findings: list[Finding] = []
    for name, key, status, fix in _EQUAL:
        values = {host: evidence.value(host, "system", key) for host in evidence.reached}
        values = {h: (", ".join(map(str, v)) or None) if isinstance(v, list) else v for h, v in values.items()}
        findings += equal(evidence, "machine", name, values, fix, status=status, none="none")  # type: ignore[arg-type]
    for name, judge in (
        ("memory", _memory),
        ("memory-free", _available),
        ("open-files", _open_files),
        ("locked-memory", _locked),
        ("load", _load),
        ("ecc-memory", _ecc),
    ):
        findings += by_host(evidence, "machine", name, lambda host, judge=judge: judge(evidence, host))  # type: ignore[misc]
    return findings


def _memory(evidence: Evidence, host: str) -> Verdict:
    totals = sorted(t for h in evidence.reached if isinstance(t := evidence.value(h, "system", "mem_total_bytes"), int))
    own = evidence.value(host, "system", "mem_total_bytes")
    if not isinstance(own, int):
        return "skip", "unknown", "", ""
    usual = totals[len(totals) // 2]
    if own < usual * (1 - _MEMORY_STEP):
        return "fail", size(own), f"{size(usual)}, as the others have", "look for a failed memory module"
    return ok(size(usual))


def _available(evidence: Evidence, host: str) -> Verdict:
    free = evidence.value(host, "system", "mem_available_bytes")
    limit = evidence.value(host, "limits", "cgroup_memory_limit_bytes")
    known = [number for number in (free, limit) if isinstance(number, int)]
    if known and min(known) < MIN_AVAILABLE_BYTES:
        found = f"{size(min(known))} can be used"
        return "fail", found, f"at least {size(MIN_AVAILABLE_BYTES)}", "end what uses it, or raise the cgroup's limit"
    return ok()


def _open_files(evidence: Evidence, host: str) -> Verdict:
    limit = evidence.value(host, "limits", "nofile_soft")
    if isinstance(limit, int) and 0 <= limit < MIN_OPEN_FILES:
        fix = "raise nofile in /etc/security/limits.conf there"
        return "fail", f"{limit} open files", f"at least {MIN_OPEN_FILES}", fix
    return ok()


def _locked(evidence: Evidence, host: str) -> Verdict:
    if not evidence.value(host, "infiniband", "hcas"):
        return "skip", "no RDMA adapter needs it", "", ""
    limit = evidence.value(host, "limits", "memlock_soft_bytes")
    if limit == -1 or limit is None:
        return ok()
    fix = "set memlock to unlimited in /etc/security/limits.conf there"
    return "fail", f"{size(limit)} of locked memory", "unlimited, for RDMA", fix


def _load(evidence: Evidence, host: str) -> Verdict:
    load, threads = evidence.value(host, "system", "load_1m"), evidence.value(host, "system", "cpu_threads")
    if isinstance(load, int | float) and isinstance(threads, int) and load > max(2.0, 1.5 * threads):
        return "warn", "busy with other work", f"a load under {max(2.0, 1.5 * threads):g}", "see 'top' there"
    return ok()


def _ecc(evidence: Evidence, host: str) -> Verdict:
    errors = evidence.value(host, "system", "ecc_uncorrected")
    if errors is None:
        return "skip", "no memory controller that counts errors", "", ""
    if errors:
        return "fail", f"{errors} uncorrected memory errors", "none", "have the memory replaced"
    return ok()
