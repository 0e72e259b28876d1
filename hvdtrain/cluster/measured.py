"""What was measured, as a type, and what it says of the hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from hvdtrain.cluster import allreduce
from hvdtrain.cluster.allreduce import Allreduces
from hvdtrain.cluster.bandwidth import Analysis, Pair, SlowHost, SlowLink, analyse, outliers, rank_order
from hvdtrain.cluster.groups import fold
from hvdtrain.cluster.models import Finding, Status
from hvdtrain.cluster.units import bytes_rate, duration, rate
from hvdtrain.plan.facts import NetworkFacts

# Of the others' median. Disks are compared over file systems that several hosts may share, memory by few processors
# that may have other work.
_SLOW_DISK, _SLOW_MEMORY = 1 / 3, 0.5
# A round trip that is longer than twice the others' and by so much more is worth a look.
_LATE, _LATE_S = 0.5, 200e-6
# Of what an adapter says of itself; TCP from one process needs not reach all of a fast one.
_NOMINAL = 0.5
# The speed that others say is invented (veth, virtio).
_PHYSICAL = {"ethernet", "bond", "infiniband"}
_LINK_FIX = "check cable, switch port and negotiated speed (ethtool {interface}), and other traffic on it"
_SPEEDS = (
    ("disk-write", "files", _SLOW_DISK, "see what else writes there (iostat), and the disk's health (smartctl)"),
    ("disk-read", "files", _SLOW_DISK, "see what else reads there (iostat), and the disk's health (smartctl)"),
    ("memory-bandwidth", "machine", _SLOW_MEMORY,
     "see that all memory channels are filled (dmidecode -t memory) and nothing else runs"),
)  # fmt: skip


@dataclass
class Measured:
    """What was measured; what couldn't be is absent.

    Attributes:
        hosts: that were asked, in order.
        network: that was measured, of those hosts that share it; None where there is none.
        bit_per_s: (sender, receiver) -> TCP payload.
        rtt_s: of one pair each, seconds.
        failures: pairs that couldn't be measured, and why.
        lost: hosts that fell silent, and how.
        speeds: ``disk-write``, ``disk-read`` and ``memory-bandwidth``: host -> bytes/s.
        skipped: likewise, host -> why it wasn't measured.
        errors: likewise, host -> why it couldn't be.
        allreduces: what Horovod itself did; None where it wasn't tried.
    """

    hosts: tuple[str, ...]
    network: NetworkFacts | None = None
    bit_per_s: dict[Pair, float] = field(default_factory=dict)
    rtt_s: dict[Pair, float] = field(default_factory=dict)
    failures: dict[Pair, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)
    allreduces: Allreduces | None = None

    def to_json(self) -> dict[str, Any]:
        """For a report: plain data, units in the names."""
        told: dict[str, Any] = {
            "links": [
                {"sender": sender, "receiver": receiver, "bit_per_s": bit_per_s,
                 "rtt_s": self.rtt_s.get((sender, receiver), self.rtt_s.get((receiver, sender)))}
                for (sender, receiver), bit_per_s in self.bit_per_s.items()
            ],
            "rank_order": self.rank_order,
            **{f"{name.replace('-', '_')}_bytes_per_s": speeds for name, speeds in self.speeds.items()},
        }  # fmt: skip
        if self.allreduces is not None:
            told["gpus"] = self.allreduces.gpus
            told["allreduces"] = [
                asdict(timing) | {"bus_bit_per_s": timing.bus_bit_per_s} for timing in self.allreduces.timings
            ]
        return told

    @property
    def rank_order(self) -> list[str]:
        """The hosts in the order in which a ring crosses slow links as seldom as possible."""
        return rank_order(self.hosts, self.bit_per_s)


def judge(measured: Measured) -> tuple[Finding, ...]:
    """All findings: the network's, then disks and memory."""
    findings = [_lost(host, how) for host, how in measured.lost.items()]
    networked: tuple[str, ...] = ()
    if measured.network is not None:
        networked = tuple(measured.network.chosen.per_host)
        findings += [*_bandwidth(measured, networked), *_latency(measured)]
    if measured.allreduces is not None:
        findings += allreduce.judge(measured.allreduces, _links(measured, findings))
    if apart := tuple(host for host in measured.hosts if host not in networked):
        why = "there is only one host" if len(measured.hosts) == 1 else "it shares no network with the others"
        findings += [Finding("network", name, apart, "skip", why) for name in ("bandwidth", "latency")]
    for check, subject, part, fix in _SPEEDS:
        findings += _speed(measured, subject, check, part, fix)
    return tuple(findings)


def _links(measured: Measured, findings: Iterable[Finding]) -> allreduce.Links:
    hosts = () if measured.network is None else measured.network.chosen.per_host
    physical = bool(hosts) and all(_nominal(measured, host) for host in hosts)
    slow = frozenset(host for f in findings if f.check == "bandwidth" and f.status == "fail" for host in f.hosts)
    return allreduce.Links(measured.bit_per_s, physical, slow)


def _lost(host: str, how: str) -> Finding:
    fix = f"see whether 'ssh {host} true' works, and whether it was restarted or ran out of memory"
    return Finding("reach", "measurements", (host,), "fail", f"it fell silent meanwhile: {how}", "answers", fix)


# --- network -----------------------------------------------------------------------------------------------------


def _bandwidth(measured: Measured, hosts: Sequence[str]) -> Iterator[Finding]:
    analysis = analyse(hosts, measured.bit_per_s)
    findings = [
        *_failures(measured),
        *(_slow_host(measured, one) for one in analysis.hosts),
        *(_slow_link(measured, link) for link in analysis.links),
    ]
    named = {host for finding in findings for host in finding.hosts} | set(measured.lost)
    findings += _below_nominal(measured, [host for host in hosts if host not in named])
    findings += _groups(analysis)
    yield from findings
    named |= {host for finding in findings for host in finding.hosts}
    if fine := tuple(host for host in hosts if host not in named):
        yield Finding("network", "bandwidth", fine, "ok", f"{rate(analysis.median_bit_per_s)} is usual")


def _failures(measured: Measured) -> Iterator[Finding]:
    """Hosts that could exchange data with nobody, and single pairs that couldn't."""
    measured_hosts = {host for pair in measured.bit_per_s for host in pair}
    partners: dict[str, set[str]] = {}
    for one, other in measured.failures:
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
    deaf = {host for host in partners if host not in measured_hosts and (len(partners[host]) > 1 or not measured_hosts)}
    fix = "let the hosts open TCP connections to each other on all ports, and check the path's MTU ('ping -M do -s …')"
    for host in (host for host in measured.hosts if host in deaf):
        why = next(reason for pair, reason in measured.failures.items() if host in pair)
        yield Finding("network", "bandwidth", (host,), "fail", f"no data with any host: {why}", "data", fix)
    for (one, other), why in measured.failures.items():
        if not deaf & {one, other}:
            yield Finding("network", "bandwidth", (one, other), "fail", f"no data between them: {why}", "data", fix)


def _slow_host(measured: Measured, slow: SlowHost) -> Finding:
    found = ", ".join(f"{rate(value)} {name}" for name, value in slow.bit_per_s.items())
    others = ", ".join(f"{rate(value)} {name}" for name, value in slow.others_bit_per_s.items())
    only = "" if slow.direction == "both" else f" only it {'sends' if slow.direction == 'out' else 'receives'} slowly;"
    interface, said = _interface(measured, slow.host)
    fix = _LINK_FIX.format(interface=interface) + said
    return Finding("network", "bandwidth", (slow.host,), "fail", found, f"{others}, the others' median",
                   f"{only} {fix}".strip())  # fmt: skip


def _slow_link(measured: Measured, link: SlowLink) -> Finding:
    ends = (link.sender, link.receiver)
    way = f"{link.sender} with {link.receiver}" if link.both else f"{link.sender} to {link.receiver}"
    usual = f"{rate(link.usual_bit_per_s)}, as both have with others"
    fix = "check the switches and routes between the two"
    if not link.settled:
        usual = f"{rate(link.usual_bit_per_s)}, as the other way"
        interfaces = ", ".join(dict.fromkeys(_interface(measured, host)[0] for host in ends))
        fix = f"a third host would tell which of the two is slow; {_LINK_FIX.format(interface=interfaces)}"
    hosts = tuple(host for host in measured.hosts if host in ends)
    return Finding("network", "bandwidth", hosts, "fail", f"{rate(link.bit_per_s)} from {way}", usual, fix)


def _groups(analysis: Analysis) -> Iterator[Finding]:
    if analysis.groups:
        shown = " and ".join(fold(group) for group in analysis.groups)
        hosts = tuple(host for group in analysis.groups for host in group)
        fix = "see the link between their switches; network.rank_order: measured crosses it as seldom as possible"
        expected = "one rate between all hosts"
        yield Finding("network", "bandwidth", hosts, "warn", f"fast within {shown}, slow between them", expected, fix)


def _below_nominal(measured: Measured, hosts: Iterable[str]) -> Iterator[Finding]:
    """Where all are alike, what their adapters say of themselves still tells."""
    for host in hosts:
        nominal = _nominal(measured, host)
        best = max((value for pair, value in measured.bit_per_s.items() if host in pair), default=None)
        if nominal and best is not None and best < _NOMINAL * nominal:
            interface = _interface(measured, host)[0]
            fix = _LINK_FIX.format(interface=interface)
            yield Finding("network", "bandwidth", (host,), "warn", f"{rate(best)} at best",
                          f"nearly {rate(nominal)}, the speed of {interface}", fix)  # fmt: skip


def _interface(measured: Measured, host: str) -> tuple[str, str]:
    """Its name, and a remark on its speed where that is known."""
    assert measured.network is not None
    name = measured.network.chosen.per_host[host].interface
    nominal = _nominal(measured, host)
    return name, f"; {name} says {rate(nominal)}" if nominal else ""


def _nominal(measured: Measured, host: str) -> float | None:
    """What a physical adapter says of its speed, bit/s."""
    assert measured.network is not None
    own = measured.network.chosen.per_host[host]
    interface = measured.network.fabrics[host].interface(own.interface)
    if interface is None or interface.kind not in _PHYSICAL or interface.driver == "virtio_net" or not own.speed_mbit:
        return None
    return own.speed_mbit * 1e6


def _latency(measured: Measured) -> Iterator[Finding]:
    rtts = host_rtts(measured)
    quickness = {host: 1 / rtt_s for host, rtt_s in rtts.items()}
    late = {host: 1 / usual for host, usual in outliers(quickness, _LATE).items() if rtts[host] - 1 / usual > _LATE_S}
    fix = "look for power saving of CPU or adapter, a busy host, and a longer way through the network"
    for host, usual_s in late.items():
        yield Finding("network", "latency", (host,), "warn", f"round trip {duration(rtts[host])}",
                      f"{duration(usual_s)}, the others' median", fix)  # fmt: skip
    if fine := tuple(host for host in rtts if host not in late):
        yield Finding("network", "latency", fine, "ok", f"round trip {duration(median(rtts[host] for host in fine))}")


# --- disk and memory ---------------------------------------------------------------------------------------------


def _speed(measured: Measured, subject: str, check: str, part: float, fix: str) -> Iterator[Finding]:
    speeds = measured.speeds.get(check)
    if speeds is None:
        yield Finding(subject, check, measured.hosts, "skip", "no working directory is given")
        return
    slow = outliers(speeds, part)
    for host, usual in slow.items():
        expected = f"{bytes_rate(usual)}, the others' median"
        yield Finding(subject, check, (host,), "warn", bytes_rate(speeds[host]), expected, fix)
    if fine := tuple(host for host in measured.hosts if host in speeds and host not in slow):
        yield Finding(subject, check, fine, "ok", f"{bytes_rate(median(speeds[host] for host in fine))} is usual")
    yield from _without(measured.skipped.get(check, {}), subject, check, "skip")
    yield from _without(measured.errors.get(check, {}), subject, check, "warn")


def _without(reasons: Mapping[str, str], subject: str, check: str, status: Status) -> Iterator[Finding]:
    hosts: dict[str, list[str]] = {}
    for host, why in reasons.items():
        hosts.setdefault(why, []).append(host)
    # What is skipped needs no advice.
    advice = ("a measurement", "see whether this user may do it there by hand") if status == "warn" else ()
    for why, names in hosts.items():
        yield Finding(subject, check, tuple(names), status, why, *advice)


def host_rtts(measured: Measured) -> dict[str, float]:
    """Each host's median round trip with the others."""
    found: dict[str, list[float]] = {}
    for pair, rtt_s in measured.rtt_s.items():
        for host in pair:
            found.setdefault(host, []).append(rtt_s)
    return {host: median(found[host]) for host in measured.hosts if host in found}
