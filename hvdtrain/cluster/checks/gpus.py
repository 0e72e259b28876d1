"""Whether the GPUs are there, alike and well."""

from __future__ import annotations

from hvdtrain.cluster.checks.common import Verdict, by_host, equal, ok
from hvdtrain.cluster.models import Evidence, Finding

_THERMAL = {"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"}


def check(evidence: Evidence) -> list[Finding]:
    """Count, model and driver equal; ECC and XID errors, heat, and processes that use them."""
    counts = {host: evidence.value(host, "gpus", "count") for host in evidence.reached}
    findings = equal(
        evidence, "gpus", "gpu-count", counts, "look for a GPU that fell off the bus: {value} belong there"
    )
    models = {host: ", ".join(sorted({str(gpu.get("model")) for gpu in _gpus(evidence, host)})) for host in counts}
    present = {host: text or None for host, text in models.items()}
    findings += equal(evidence, "gpus", "gpu-model", present, "use hosts with {value}", status="warn", none="no GPU")
    drivers = {host: evidence.value(host, "gpus", "driver_version") for host in counts}
    findings += equal(evidence, "gpus", "gpu-driver", drivers, "install driver {value} there", none="no GPU")
    for name, judge in (("gpu-ecc", _ecc), ("gpu-xid", _xid), ("gpu-heat", _heat), ("gpu-processes", _strays)):
        findings += by_host(evidence, "gpus", name, lambda host, judge=judge: judge(evidence, host))  # type: ignore[misc]
    return findings


def _gpus(evidence: Evidence, host: str) -> list[dict[str, object]]:
    return evidence.value(host, "gpus", "gpus") or []


def _ecc(evidence: Evidence, host: str) -> Verdict:
    if error := evidence.value(host, "gpus", "error"):
        return "fail", f"the driver can't be asked: {error}", "an answer of NVML", "see 'nvidia-smi' there"
    bad = [gpu.get("index") for gpu in _gpus(evidence, host) if gpu.get("ecc_uncorrected")]
    if bad:
        return "fail", f"uncorrected ECC errors on GPU {bad}", "none", "reset or replace it"
    return ok() if _gpus(evidence, host) else ("skip", "no GPU", "", "")


def _xid(evidence: Evidence, host: str) -> Verdict:
    xids = evidence.value(host, "gpus", "xids")
    if not _gpus(evidence, host):
        return "skip", "no GPU", "", ""
    if xids is None:
        return "skip", "the kernel log can't be read", "", ""
    if xids:
        numbers = sorted({str(entry.get("xid")) for entry in xids})
        return "warn", f"XID {', '.join(numbers)} in the kernel log", "none", "see 'dmesg' there"
    return ok()


def _heat(evidence: Evidence, host: str) -> Verdict:
    hot = [g.get("index") for g in _gpus(evidence, host) if _THERMAL & set(g.get("throttle_reasons") or ())]  # type: ignore[call-overload]
    if hot:
        return "fail", f"GPU {hot} is slowed down by heat or power", "full clocks", "check cooling and power there"
    return ok() if _gpus(evidence, host) else ("skip", "no GPU", "", "")


def _strays(evidence: Evidence, host: str) -> Verdict:
    processes = evidence.value(host, "gpus", "processes") or []
    if processes:
        first = processes[0]
        found = f"process {first.get('pid')} of {first.get('user')} uses a GPU ({len(processes)} in all)"
        return "warn", found, "idle GPUs", "end it if it is a leftover"
    return ok() if _gpus(evidence, host) else ("skip", "no GPU", "", "")
