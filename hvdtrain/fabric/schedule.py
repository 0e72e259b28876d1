"""Which connections to try between hosts, and what came of them: what is between the probes and the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.fabric.candidates import candidates
from hvdtrain.fabric.models import HostFabric

# With so few hosts every pair is tried.
_ALL_PAIRS_UP_TO = 16


@dataclass(frozen=True)
class Reach:
    """What came of one connection.

    Attributes:
        tester: the host that tried.
        target: the host that it wanted.
        address: the target's, that was tried.
        ok: the target itself answered.
        reason: otherwise ``refused``, ``timeout``, ``unreachable``, ``other-host`` or another.
        rtt_s: time that connecting took.
        local_address: the tester's own, that the connection came from.
    """

    tester: str
    target: str
    address: str
    ok: bool
    reason: str | None = None
    rtt_s: float | None = None
    local_address: str | None = None


def pairs(hosts: Sequence[str], launcher: str | None = None) -> tuple[tuple[str, str], ...]:
    """Which host tries to reach which: (tester, target), each pair once.

    All pairs of few hosts. Of many, about N log N: the first host and all others both ways, and from each host those
    that are 1, 2, 4 … places further on. Each host also tries the launching machine.
    """
    count = len(hosts)
    found: dict[tuple[str, str], None] = {}
    if count <= _ALL_PAIRS_UP_TO:
        found.update({(tester, target): None for tester in hosts for target in hosts if tester != target})
    else:
        for host in hosts[1:]:
            found[hosts[0], host] = found[host, hosts[0]] = None
        step = 1
        while step <= count // 2:
            found.update({(hosts[place], hosts[(place + step) % count]): None for place in range(count)})
            step *= 2
    if launcher is not None:
        found.update({(host, launcher): None for host in hosts if host != launcher})
    return tuple(found)


def targets(
    wanted: Sequence[tuple[str, str]],
    fabrics: Mapping[str, HostFabric],
    listeners: Mapping[str, Mapping[str, Any]],
    interfaces: Sequence[str] = (),
) -> dict[str, list[dict[str, Any]]]:
    """For each tester the ``targets`` of the probe's verb ``connect``: every address that may carry the job.

    Args:
        wanted: what `pairs` gave.
        fabrics: by host; a host without one is left out.
        listeners: by host, what its probe answered to ``listen``; a host without one is left out.
        interfaces: ``network.interfaces`` of the job spec. The launching machine's aren't restricted by it.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    testers = {tester for tester, _ in wanted}
    for tester, target in wanted:
        if target not in fabrics or target not in listeners:
            continue
        listener = listeners[target]
        # A machine that tests nothing is the launching one.
        allowed = interfaces if target in testers else ()
        for candidate in candidates(fabrics[target], allowed):
            ip = candidate.address.ip
            if port := listener.get("ports", {}).get(str(ip.version)):
                found.setdefault(tester, []).append(
                    {"key": f"{target} {ip}", "address": str(ip), "port": port, "identity": listener["identity"]}
                )
    return found


def reaches(tester: str, results: Mapping[str, Mapping[str, Any]]) -> list[Reach]:
    """What the tester's probe answered to ``connect``.

    Raises:
        ValueError: it isn't an answer to `targets`.
    """
    found = []
    for key, result in results.items():
        target, _, address = key.rpartition(" ")
        rtt_s, local = result.get("rtt_s"), result.get("local_address")
        if not target or not isinstance(result.get("ok"), bool):
            raise ValueError(f"{tester}: connect: {key!r}: {result!r} is no result")
        found.append(
            Reach(
                tester=tester,
                target=target,
                address=address,
                ok=result["ok"],
                reason=str(result["reason"]) if result.get("reason") else None,
                rtt_s=rtt_s if isinstance(rtt_s, float) else None,
                local_address=local if isinstance(local, str) else None,
            )
        )
    return found
