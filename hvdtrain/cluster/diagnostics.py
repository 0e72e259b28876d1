"""What the owners' own tools say: nvidia-smi and DCGM of each host's GPUs, ib_write_bw of pairs of RDMA ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdtrain.cluster.bandwidth import ring
from hvdtrain.cluster.checks.common import Verdict, by_host
from hvdtrain.cluster.dcgm import judge_dcgm
from hvdtrain.cluster.models import Evidence, Finding
from hvdtrain.cluster.nvidia_smi import judge_nvidia_smi
from hvdtrain.cluster.units import rate
from hvdtrain.fabric.models import INFINIBAND, HostFabric, Port
from hvdtrain.fabric.rdma import LackError, find_infiniband, find_roce
from hvdtrain.fabric.routes import ChosenNetwork
from hvdtrain.plan.facts import NetworkFacts
from hvdtrain.remote.fanout import Answer, HostFailure, Outcome, Session

# Of a host that answers nothing, no more than this and the request's timeout is lost.
_SMI_LIMIT_S, _DCGM_LIMIT_S, _RDMA_LIMIT_S = 60.0, 180.0, 20.0
_RDMA_S = 3
# Of a port's rate: headers, and switches that share, cost a tenth at most; an adapter in a slot of half the lanes, or a
# link that came up narrower, is at half.
_FULL_RATE = 0.8
# Gbit/s; what a host tells may be any number.
_NO_RATE = 1e6
_NO_ANSWER_FIX = "see whether the host still answers, and its kernel log ('dmesg') for a driver that hangs"
_SLOW_FIX = (
    "check the adapter's PCIe link (LnkSta of 'lspci -vv'), the cable and the switch's port ('ibstat', 'mlxlink'), "
    "and other traffic"
)
_NO_DATA_FIX = (
    "run ib_write_bw between them by hand; check 'ibstat', the subnet manager or the RoCE network, firewalls for TCP, "
    "and the limit of locked memory ('ulimit -l')"
)


def diagnose(
    session: Session, hosts: Sequence[str], network: NetworkFacts | None, evidence: Evidence
) -> tuple[Finding, ...]:
    """Run the tools that are installed, and judge what they say: ``nvidia-smi``, ``dcgm-diag`` and ``ib-write-bw``.

    Args:
        session: with the hosts' probes.
        hosts: that answer, in order.
        network: of those hosts that share one; None where there is none.
        evidence: the hosts' facts, of sections ``gpus`` and ``software``; its request's timeout is the dialogue's.
    """
    dialogue = _Dialogue(session, evidence.request.timeout_s)
    return (
        *_tool(dialogue, hosts, evidence, "nvidia-smi", "nvidia-smi", _SMI_LIMIT_S, judge_nvidia_smi),
        *_tool(dialogue, hosts, evidence, "dcgmi", "dcgm-diag", _DCGM_LIMIT_S, judge_dcgm),
        *_rdma(dialogue, hosts, network, evidence),
    )


class _Dialogue:
    """A session that asks no host again that fell silent."""

    def __init__(self, session: Session, timeout_s: float) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self.lost: set[str] = set()

    def ask(self, requests: Mapping[str, Answer], limit_s: float) -> dict[str, Outcome]:
        """What each answered within so many seconds and the dialogue's timeout; silent hosts are absent."""
        asked = {host: {**request, "limit_s": limit_s} for host, request in requests.items() if host not in self.lost}
        outcomes = self._session.ask(asked, limit_s + self._timeout_s)
        self.lost |= {
            host for host, outcome in outcomes.items() if isinstance(outcome, HostFailure) and outcome.kind != "refused"
        }
        return outcomes


# --- GPUs --------------------------------------------------------------------------------------------------------


def _tool(
    dialogue: _Dialogue,
    hosts: Sequence[str],
    evidence: Evidence,
    program: str,
    check: str,
    limit_s: float,
    judge: Callable[[int, str], Verdict],
) -> list[Finding]:
    silent = set(dialogue.lost)
    with_gpus = [host for host in hosts if not _has_no_gpu(evidence, host)]
    outcomes = dialogue.ask({host: {"ask": "tool", "name": program} for host in with_gpus}, limit_s)

    def verdict(host: str) -> Verdict:
        if host in silent:
            return "skip", "it fell silent before", "", ""
        if host not in outcomes:
            return "skip", "no GPU", "", ""
        return _tool_verdict(outcomes[host], program, judge)

    return by_host(evidence, "gpus", check, verdict, hosts)


def _has_no_gpu(evidence: Evidence, host: str) -> bool:
    # A driver that can't be asked counts none too, and is worth a look.
    return evidence.value(host, "gpus", "count") == 0 and not evidence.value(host, "gpus", "error")


def _tool_verdict(outcome: Outcome, program: str, judge: Callable[[int, str], Verdict]) -> Verdict:
    if isinstance(outcome, HostFailure):
        if outcome.kind == "refused":
            return "warn", f"{program} can't be run: {outcome.text}", "its answer", f"run {program} there by hand"
        return "fail", f"the host fell silent meanwhile: {outcome.text}", f"an answer of {program}", _NO_ANSWER_FIX
    if outcome.get("absent"):
        return "skip", f"{program} isn't installed", "", ""
    if "error" in outcome:
        return "fail", str(outcome["error"])[:300], f"an answer of {program}", _NO_ANSWER_FIX
    status, output = outcome.get("exit_status"), outcome.get("output")
    if not isinstance(status, int) or not isinstance(output, str):
        return "warn", "its answer is none", f"an answer of {program}", f"run {program} there by hand"
    return judge(status, output)


# --- RDMA --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rails:
    """A host's ports that would carry a job."""

    kind: str
    ports: tuple[Port, ...]
    gid_index: int | None


@dataclass(frozen=True)
class _Link:
    """The sender's and the receiver's ports of the same place."""

    sender: str
    receiver: str
    ports: tuple[Port, Port]

    @property
    def hosts(self) -> tuple[str, str]:
        return self.sender, self.receiver

    @property
    def bit_per_s(self) -> float | None:
        """What the slower of the two ports is rated at; None if unknown."""
        slower = min(port.gbit_per_s or 0 for port in self.ports)
        return slower * 1e9 if 0 < slower < _NO_RATE else None

    def __str__(self) -> str:
        return f"{self.sender} ({self.ports[0].name}) to {self.receiver} ({self.ports[1].name})"


def _rdma(
    dialogue: _Dialogue, hosts: Sequence[str], network: NetworkFacts | None, evidence: Evidence
) -> Iterator[Finding]:
    skipped: dict[str, str] = {}
    rails: dict[str, _Rails] = {}
    for host in hosts:
        try:
            rails[host] = _rails(dialogue, host, network, evidence)
        except LackError as lack:
            skipped[host] = lack.found
    for kind in dict.fromkeys(own.kind for own in rails.values()):
        alike = [host for host in rails if rails[host].kind == kind]
        if len(alike) == 1:
            skipped[alike[0]] = f"no other host has {kind} and ib_write_bw"
        elif network is not None:
            yield from _judge(alike, _measure(dialogue, alike, rails, network.chosen), dialogue.lost)
    for why in dict.fromkeys(skipped.values()):
        alike = [host for host in hosts if skipped.get(host) == why]
        yield Finding("fabric", "ib-write-bw", tuple(alike), "skip", why)


def _rails(dialogue: _Dialogue, host: str, network: NetworkFacts | None, evidence: Evidence) -> _Rails:
    """The host's ports; LackError says why it isn't measured."""
    if host in dialogue.lost:
        raise LackError(host, "it fell silent before", "")
    if network is None or host not in network.chosen.per_host:
        why = "there is only one host" if len(evidence.hosts) == 1 else "it shares no network with the others"
        raise LackError(host, why, "")
    fabric = network.fabrics[host]
    if not fabric.ports:
        raise LackError(host, "it has no InfiniBand or RoCE adapter", "")
    if not isinstance(evidence.value(host, "software", "ib_write_bw"), str):
        raise LackError(host, "ib_write_bw isn't installed (package perftest)", "")
    if ":" in network.chosen.per_host[host].address:
        raise LackError(host, "ib_write_bw needs IPv4 to begin, and the hosts share IPv6 only", "")
    return _ports(fabric, network.chosen)


def _ports(fabric: HostFabric, chosen: ChosenNetwork) -> _Rails:
    try:
        return _Rails(INFINIBAND, find_infiniband([fabric], (), nccl=True).ports[fabric.host], None)
    except LackError:
        found = find_roce([fabric], chosen, (), nccl=True)
        return _Rails("RoCE", found.ports[fabric.host], found.gid_index[fabric.host])


def _ring(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Each host sends to the next one, in two rounds, or three for an odd number; none is in two pairs of a round."""
    pairs = ring(hosts)
    last = [pairs.pop()] if len(pairs) % 2 else []
    return [found for found in (pairs[::2], pairs[1::2], last) if found]


def _measure(
    dialogue: _Dialogue, hosts: Sequence[str], rails: Mapping[str, _Rails], chosen: ChosenNetwork
) -> dict[_Link, float | str]:
    """Each link's bit/s, or why there is none; links of hosts that fell silent are absent."""
    found: dict[_Link, float | str] = {}
    for pairs in _ring(hosts):
        links = {pair: list(zip(rails[pair[0]].ports, rails[pair[1]].ports, strict=False)) for pair in pairs}
        for place in range(max(map(len, links.values()))):
            this = [_Link(*pair, ports[place]) for pair, ports in links.items() if place < len(ports)]
            found |= _measure_round(dialogue, this, rails, chosen)
    return found


def _measure_round(
    dialogue: _Dialogue, links: Sequence[_Link], rails: Mapping[str, _Rails], chosen: ChosenNetwork
) -> dict[_Link, float | str]:
    def request(verb: str, host: str, port: Port) -> Answer:
        return {"ask": verb, "device": port.hca, "port": port.number, "gid_index": rails[host].gid_index,
                "duration_s": _RDMA_S}  # fmt: skip

    links = [link for link in links if not dialogue.lost & {*link.hosts}]
    serving = dialogue.ask(
        {link.receiver: request("ib-write-bw-serve", link.receiver, link.ports[1]) for link in links}, _RDMA_LIMIT_S
    )
    ports = {host: _told(outcome, "port", int) for host, outcome in serving.items()}
    measured = dialogue.ask(
        {
            link.sender: {
                **request("ib-write-bw", link.sender, link.ports[0]),
                "address": chosen.per_host[link.receiver].address,
                "tcp_port": ports[link.receiver],
            }
            for link in links
            if isinstance(ports[link.receiver], int)
        },
        _RDMA_LIMIT_S,
    )
    found: dict[_Link, float | str] = {}
    for link in links:
        if not dialogue.lost & {*link.hosts}:
            outcome = measured.get(link.sender)
            found[link] = str(ports[link.receiver]) if outcome is None else _told(outcome, "bit_per_s", float)
    return found


def _told(outcome: Outcome, name: str, kind: type[int] | type[float]) -> Any:
    """The named number of an answer, or in words why it isn't there."""
    if isinstance(outcome, HostFailure):
        return outcome.text
    value = outcome.get(name)
    if isinstance(value, kind) and not isinstance(value, bool) and value > 0:
        return value
    if outcome.get("absent"):
        return "ib_write_bw isn't installed"
    return str(outcome.get("error") or "its answer is no measurement")[:500]


def _judge(hosts: Sequence[str], measured: Mapping[_Link, float | str], lost: set[str]) -> Iterator[Finding]:
    """A host all of whose links are slow is named alone, and both hosts of other slow links."""
    named: set[str] = set()
    for host in hosts:
        if host in lost:
            named.add(host)
            found = "the host fell silent meanwhile"
            yield Finding("fabric", "ib-write-bw", (host,), "fail", found, "an answer of ib_write_bw", _NO_ANSWER_FIX)
    for link, result in measured.items():
        if isinstance(result, str):
            named |= {*link.hosts}
            found = f"no data from {link}: {result}"
            both = tuple(host for host in hosts if host in link.hosts)
            yield Finding("fabric", "ib-write-bw", both, "fail", found, "data", _NO_DATA_FIX)
    rates = {link: result for link, result in measured.items() if not isinstance(result, str)}
    slow = [link for link, found in rates.items() if link.bit_per_s and found < _FULL_RATE * link.bit_per_s]
    for blamed, links in _blamed(hosts, rates, slow).items():
        named |= {*blamed}
        found = ", ".join(f"{rate(rates[link])} from {link}" for link in links)
        nominal = max(link.bit_per_s or 0 for link in links)
        expected = f"at least {rate(_FULL_RATE * nominal)}, {_FULL_RATE:.0%} of the port's {rate(nominal)}"
        yield Finding("fabric", "ib-write-bw", blamed, "warn", found, expected, _SLOW_FIX)
    if rates and (fine := tuple(host for host in hosts if host not in named)):
        yield Finding("fabric", "ib-write-bw", fine, "ok", f"{rate(median(rates.values()))} is usual")


def _blamed(
    hosts: Sequence[str], rates: Mapping[_Link, float], slow: Sequence[_Link]
) -> dict[tuple[str, ...], list[_Link]]:
    """Hosts -> their slow links."""

    def is_slow(host: str) -> bool:
        own = [link for link in rates if host in link.hosts]
        return len({link.hosts for link in own}) > 1 and all(link in slow for link in own)

    alone = [host for host in hosts if is_slow(host)]
    found: dict[tuple[str, ...], list[_Link]] = {}
    for link in slow:
        both = tuple(host for host in hosts if host in link.hosts)
        guilty = tuple(host for host in both if host in alone)
        found.setdefault(guilty if len(guilty) == 1 else both, []).append(link)
    return found
