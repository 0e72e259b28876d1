"""What Horovod's own allreduce did inside hosts, between pairs and over all, and what it says of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.cluster.bandwidth import Pair, analyse, outliers, ring
from hvdtrain.cluster.groups import fold
from hvdtrain.cluster.models import Finding
from hvdtrain.cluster.units import duration, rate

CHECK = "allreduce"
# A host whose ranks reduce among themselves so much slower than other hosts' do.
_SLOW_HOST = 0.4
# Of the slowest link that the ring crosses. TCP from one process needs not reach all of a fast one.
_OF_LINK = 0.25
# Many small jobs are shorter than this; a machine that is busy is slower in them.
_HEAVY_BYTES = 1 << 20


@dataclass(frozen=True)
class Timing:
    """Of one group of ranks and one size.

    Attributes:
        hosts: names, in the order of ranks.
        ranks: how many took part.
        size_bytes: of the tensor.
        seconds: median of one allreduce.
    """

    hosts: tuple[str, ...]
    ranks: int
    size_bytes: int
    seconds: float

    @property
    def bus_bit_per_s(self) -> float:
        """What each link of the ring carries: size / time * 2 (n - 1) / n (nccl-tests, doc/PERFORMANCE.md)."""
        return 8 * self.size_bytes / self.seconds * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Wrong:
    """Elements whose sum was wrong on a host, in allreduces of so many bytes."""

    host: str
    elements: int
    size_bytes: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Allreduces:
    """All of them.

    Attributes:
        hosts: that took part, in the order of their ranks.
        timings: what was measured.
        wrong: wrong sums.
        error: why the job failed, and on which of the hosts if that is known; None if it didn't.
        skipped: why there was no job; None if there was one.
        controller: ``mpi`` or ``gloo``.
        gpus: host -> what each of its ranks measured of its GPU (`hvdtrain.tasks.gpu_speed`), where that was asked for.
    """

    hosts: tuple[str, ...]
    timings: tuple[Timing, ...] = ()
    wrong: tuple[Wrong, ...] = ()
    error: tuple[str, str | None] | None = None
    skipped: str | None = None
    controller: str = ""
    gpus: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def heaviest(self, hosts: int) -> dict[tuple[str, ...], Timing]:
        """Of groups of so many hosts, the timing of the largest size."""
        found: dict[tuple[str, ...], Timing] = {}
        for timing in self.timings:
            known = found.get(timing.hosts)
            if len(timing.hosts) == hosts and (known is None or timing.size_bytes > known.size_bytes):
                found[timing.hosts] = timing
        return found

    @property
    def over_all(self) -> Timing | None:
        """All ranks, and the largest size."""
        return self.heaviest(len(self.hosts)).get(self.hosts)


@dataclass
class Links:
    """What is known of the links between the hosts.

    Attributes:
        bit_per_s: (sender, receiver) -> what TCP carried.
        physical: whether these are rates of wires, and not of a virtual switch inside one machine.
        slow: hosts that were found to be slow already.
    """

    bit_per_s: Mapping[Pair, float] = field(default_factory=dict)
    physical: bool = False
    slow: frozenset[str] = frozenset()


def judge(reduced: Allreduces, links: Links) -> Iterator[Finding]:
    """Findings of check ``allreduce``, subject ``network``."""
    if reduced.skipped:
        yield Finding("network", CHECK, reduced.hosts, "skip", reduced.skipped)
        return
    named: set[str] = set()
    for finding in (*_failed(reduced), *_wrong(reduced), *_slow_hosts(reduced, links), *_slow_pairs(reduced, links)):
        named |= set(finding.hosts)
        yield finding
    if below := _below_links(reduced, links):
        named |= set(below.hosts)
        yield below
    if fine := tuple(host for host in reduced.hosts if host not in named):
        yield Finding("network", CHECK, fine, "ok", _usual(reduced))


def _failed(reduced: Allreduces) -> Iterator[Finding]:
    if reduced.error:
        why, host = reduced.error
        hosts = (host,) if host in reduced.hosts else reduced.hosts
        fix = "run any small job there: 'hvdtrain launch' shows all of its output and what may be the cause"
        yield Finding("network", CHECK, hosts, "fail", why, "a job that runs", fix)


def _wrong(reduced: Allreduces) -> Iterator[Finding]:
    for host in dict.fromkeys(wrong.host for wrong in reduced.wrong):
        own = [wrong for wrong in reduced.wrong if wrong.host == host]
        sizes = ", ".join(dict.fromkeys(_size(wrong.size_bytes) for wrong in own))
        with_whom = fold(dict.fromkeys(name for wrong in own for name in wrong.hosts))
        found = f"{sum(wrong.elements for wrong in own)} wrong sums in allreduces of {sizes} among {with_whom}"
        fix = "look for memory errors and a faulty adapter there (check ecc-memory, link-errors), and for old firmware"
        yield Finding("network", CHECK, (host,), "fail", found, "correct sums", fix)


def _slow_hosts(reduced: Allreduces, links: Links) -> Iterator[Finding]:
    inside = {hosts[0]: timing.bus_bit_per_s for hosts, timing in reduced.heaviest(1).items()}
    for host, usual in outliers(inside, _SLOW_HOST).items():
        if host not in links.slow:
            fix = "see that nothing else runs there, and that processors and memory run at full speed"
            yield Finding("network", CHECK, (host,), "warn", f"{rate(inside[host])} among its own ranks",
                          f"{rate(usual)}, the others' median", fix)  # fmt: skip


def _slow_pairs(reduced: Allreduces, links: Links) -> Iterator[Finding]:
    """Hosts that are slow with each partner, where TCP alone didn't show it."""
    matrix = {}
    for (one, other), timing in reduced.heaviest(2).items() if len(reduced.hosts) > 2 else ():
        matrix[one, other] = matrix[other, one] = timing.bus_bit_per_s
    for slow in analyse(reduced.hosts, matrix).hosts:
        if slow.host not in links.slow:
            found, usual = (min(values.values()) for values in (slow.bit_per_s, slow.others_bit_per_s))
            fix = "compare its network settings with the others' ('hvdtrain launch --dry-run' shows them), and its load"
            yield Finding("network", CHECK, (slow.host,), "warn", f"{rate(found)} with others",
                          f"{rate(usual)}, the others' median", fix)  # fmt: skip


def _below_links(reduced: Allreduces, links: Links) -> Finding | None:
    """All ranks against the slowest link that their ring crosses."""
    limit, timing = ring_limit(reduced.hosts, links.bit_per_s), reduced.over_all
    if timing is None or limit is None or not links.physical or timing.size_bytes < _HEAVY_BYTES:
        return None
    if timing.bus_bit_per_s >= _OF_LINK * limit:
        return None
    fix = "see that Horovod uses the network that you mean ('hvdtrain launch --dry-run'), and RDMA where it is there"
    return Finding("network", CHECK, reduced.hosts, "warn", _usual(reduced),
                   f"near {rate(limit)}, which the slowest link of the ring carries", fix)  # fmt: skip


def ring_limit(hosts: Sequence[str], bit_per_s: Mapping[Pair, float]) -> float | None:
    """The slowest link of the ring that crosses the hosts in their order; None where some link isn't known."""
    rates = [bit_per_s.get(pair) for pair in ring(hosts)]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def _usual(reduced: Allreduces) -> str:
    timing = reduced.over_all
    small = [t.seconds for t in reduced.timings if t.hosts == reduced.hosts and t.size_bytes < _HEAVY_BYTES]
    if timing is None:
        return ""
    latency = f", {duration(min(small))} for small ones" if small else ""
    return f"{rate(timing.bus_bit_per_s)} over all {timing.ranks} ranks{latency} ({reduced.controller})"


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"
