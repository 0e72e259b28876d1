"""Whether the RDMA adapters are alike and their links well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hvdtrain.cluster.checks.common import Verdict, by_host, equal, ok
from hvdtrain.cluster.models import Evidence, Finding

# Links correct some errors all the time; so many since the driver was loaded are a bad cable's.
MAX_LINK_ERRORS = 100
_ERRORS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
_NONE = "no RDMA adapter"


def check(evidence: Evidence) -> list[Finding]:
    """Count, rates and firmware equal; ports' states and errors."""
    counts = {host: len(_hcas(evidence, host)) for host in evidence.reached}
    rates = {host: _joined(port.get("rate") for _, port in _ports(evidence, host)) for host in counts}
    firmware = {host: _joined(hca.get("firmware") for hca in _hcas(evidence, host)) for host in counts}
    return [
        *equal(evidence, "fabric", "hca-count", counts, "look for an adapter that is missing: {value} belong there"),
        *equal(evidence, "fabric", "hca-rate", rates, "check cable and switch port: {value} is usual", none=_NONE),
        *equal(evidence, "fabric", "hca-firmware", firmware, "flash {value}", status="warn", none=_NONE),
        *by_host(evidence, "fabric", "hca-state", lambda host: _state(evidence, host, counts)),
        *by_host(evidence, "fabric", "link-errors", lambda host: _errors(evidence, host)),
    ]


def _hcas(evidence: Evidence, host: str) -> list[dict[str, Any]]:
    return evidence.value(host, "infiniband", "hcas") or []


def _ports(evidence: Evidence, host: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ports with their names."""
    for hca in _hcas(evidence, host):
        for port in hca.get("ports") or ():
            yield f"{hca.get('name')}:{port.get('port')}", port


def _joined(values: Any) -> str | None:
    return ", ".join(sorted({str(value) for value in values if value})) or None


def _state(evidence: Evidence, host: str, counts: dict[str, int]) -> Verdict:
    if not counts[host]:
        return "skip", _NONE, "", ""
    down = [f"{name} is {port.get('state')}" for name, port in _ports(evidence, host) if port.get("state") != "ACTIVE"]
    # A port that is down on every host has no cable by intent.
    everywhere = all(
        any(other == name and port.get("state") != "ACTIVE" for other, port in _ports(evidence, peer))
        for name in (text.split()[0] for text in down)
        for peer in evidence.reached
    )
    if down and not (everywhere and len(evidence.reached) > 1):
        return "fail", ", ".join(down), "ACTIVE", "check cable, switch port and subnet manager; see 'ibstat' there"
    return ok()


def _errors(evidence: Evidence, host: str) -> Verdict:
    if not _hcas(evidence, host):
        return "skip", _NONE, "", ""
    for name, port in _ports(evidence, host):
        counters = port.get("counters") or {}
        for counter in _ERRORS:
            number = counters.get(counter)
            if isinstance(number, int) and number > MAX_LINK_ERRORS:
                return "warn", f"{name} has counted many of {counter}", f"at most {MAX_LINK_ERRORS}", "check its cable"
    return ok()
