"""Which pairs of hosts are measured when, and what the matrix of their rates says. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar

Pair = tuple[str, str]
# (sender, receiver) -> bit/s.
Matrix = Mapping[Pair, float]
_Name = TypeVar("_Name")
Direction = Literal["both", "out", "in"]

# Slower than this part of what the others have is slow, if it is also outside of their own spread: so many times their
# median absolute deviation, which 1.4826 makes comparable with a standard deviation. What is broken is mostly at half
# or a quarter; what only shares a busy machine or switch is above.
SLOW = 0.6
_DEVIATIONS = 3 * 1.4826
# So few values say little of their spread.
_ENOUGH = 5
_BUDGET_S = 30.0
_MAX_ROUNDS = 63
_LONGEST_S, _SHORTEST_S = 1.25, 0.24
_OVERHEAD_S = 0.15
_WARM_UP = 0.25
_MAX_STARTS = 16
# Links whose rates differ by less may be of one class.
_CLASS = 0.75


@dataclass(frozen=True)
class Timing:
    """For each direction of each pair: seconds that don't count, and seconds that do."""

    warm_up_s: float
    duration_s: float


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Every pair once, each host in at most one pair of a round: N-1 rounds for even N, N for odd.

    The circle method: the first stays, the others turn around it. Of more than 64 hosts, 63 rounds are given, evenly
    spread: each host with 63 others.
    """
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    if len(found) > _MAX_ROUNDS:
        found = [found[place * len(found) // _MAX_ROUNDS] for place in range(_MAX_ROUNDS)]
    return found


def timing(count: int, budget_s: float = _BUDGET_S) -> Timing:
    """How long to measure so that all rounds of so many hosts take about so many seconds; a third more for many."""
    total = min(count, _MAX_ROUNDS)
    each = (budget_s / max(1, total) - _OVERHEAD_S) / 2
    each = max(_SHORTEST_S, min(_LONGEST_S, each))
    return Timing(each * _WARM_UP, each * (1 - _WARM_UP))


# --- who is slow -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowHost:
    """A host that is slow with everybody.

    Attributes:
        host: its name.
        direction: ``out`` (it sends slowly), ``in`` or ``both``.
        bit_per_s: what was measured, by direction (``out``, ``in``); only of slow ones.
        others_bit_per_s: median of the others, likewise.
    """

    host: str
    direction: Direction
    bit_per_s: Mapping[str, float]
    others_bit_per_s: Mapping[str, float]


@dataclass(frozen=True)
class SlowLink:
    """Two hosts that are slow with each other only.

    Attributes:
        sender, receiver: names.
        both: whether the other direction is slow too.
        bit_per_s: what was measured; the slower of the directions that are slow.
        usual_bit_per_s: what the two have with others.
        settled: whether other pairs show that neither host is slow by itself.
    """

    sender: str
    receiver: str
    both: bool
    bit_per_s: float
    usual_bit_per_s: float
    settled: bool = True


@dataclass(frozen=True)
class Analysis:
    """What the matrix says; all empty where all is well.

    Attributes:
        hosts: slow ones, in order.
        links: slow ones between hosts that aren't.
        groups: hosts that are fast with each other and slow with those of other groups; none if there is only one.
        median_bit_per_s: of all pairs without slow hosts; 0 if there is none.
    """

    hosts: tuple[SlowHost, ...] = ()
    links: tuple[SlowLink, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    median_bit_per_s: float = 0.0


def analyse(hosts: Sequence[str], matrix: Matrix) -> Analysis:
    """Name the slow hosts and links.

    A host's best rate in a direction is what its own link can do; one whose best is far below the others' is slow.
    A pair far below the best of both its ends is a slow link, unless most links of one of them are: that host is slow.
    Pairs that are missing are taken to be unknown.
    """
    if not matrix:
        return Analysis()
    if len({host for pair in matrix for host in pair}) <= 2:
        return Analysis(links=_only_link(matrix), median_bit_per_s=median(matrix.values()))
    out = {host: [rate for (sender, _), rate in matrix.items() if sender == host] for host in hosts}
    into = {host: [rate for (_, receiver), rate in matrix.items() if receiver == host] for host in hosts}
    best_out, best_in = ({host: max(rates) for host, rates in side.items() if rates} for side in (out, into))
    parts = {pair: _log(rate) - _log(_reference(pair, best_out, best_in)) for pair, rate in matrix.items()}
    noise = _spread(_telling(parts))
    slow_out, slow_in = set(outliers(best_out, spread=noise)), set(outliers(best_in, spread=noise))
    groups = _groups([host for host in hosts if host not in slow_out | slow_in], matrix, best_out, best_in)
    slow = set() if groups else _slow_pairs(parts)
    slow_out |= _mostly(slow, matrix, 0)
    slow_in |= _mostly(slow, matrix, 1)
    fine = [rate for (sender, receiver), rate in matrix.items() if not {sender, receiver} & (slow_out | slow_in)]
    return Analysis(
        hosts=tuple(_slow_host(host, matrix, slow_out, slow_in) for host in hosts if host in slow_out | slow_in),
        links=_links({(a, b) for a, b in slow if a not in slow_out and b not in slow_in}, matrix, best_out, best_in),
        groups=groups,
        median_bit_per_s=median(fine) if fine else 0.0,
    )


def outliers(values: Mapping[str, float], part: float = SLOW, spread: float = 0.0) -> dict[str, float]:
    """Those far below the others: name -> the others' median.

    Args:
        values: positive, by name; of one or two nothing can be said.
        part: of the others' median, below which one is an outlier if it is outside of their spread too.
        spread: median absolute deviation of the values' logarithms that is there in any case.
    """
    found: dict[str, float] = {}
    for name, value in values.items() if len(values) > 2 else ():
        others = [other for key, other in values.items() if key != name]
        # As logarithms: rates spread by factors.
        logarithms = [_log(other) for other in others]
        middle = median(logarithms)
        usual = _DEVIATIONS * max(spread, _spread(logarithms))
        if _log(value) < middle + math.log(part) and _log(value) < middle - usual:
            found[name] = median(others)
    return found


def suspects(analysis: Analysis, matrix: Matrix) -> dict[Pair, float]:
    """The pairs that settle what is suspected: slow links again, and slow hosts with partners that aren't slow.

    Each with the rate that clears it. Measured with fewer others at the same time, a pair may do better than any did
    before, which says nothing of those.
    """
    slow = {one.host for one in analysis.hosts}
    wanted = {(link.sender, link.receiver): link.usual_bit_per_s for link in analysis.links}
    for one in analysis.hosts:
        partners = sorted({b if a == one.host else a for a, b in matrix if one.host in (a, b)} - slow)
        wanted.update({(one.host, partner): analysis.median_bit_per_s for partner in partners[:2]})
    return wanted


def packed(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Rounds in which no host is in two pairs."""
    found: list[list[Pair]] = []
    for pair in pairs:
        free = next((taken for taken in found if not set(pair) & {host for two in taken for host in two}), None)
        if free is None:
            found.append([pair])
        else:
            free.append(pair)
    return found


def _spread(values: Sequence[float]) -> float:
    """Median absolute deviation."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _log(value: float) -> float:
    return math.log(max(value, 1.0))


def _reference(pair: Pair, best_out: Mapping[str, float], best_in: Mapping[str, float]) -> float:
    """What the two hosts' own links can do."""
    return min(best_out[pair[0]], best_in[pair[1]])


def _telling(parts: Mapping[Pair, float]) -> list[float]:
    """Those that tell of noise: a host's best pair is at 0 by definition. All of them where there are few."""
    telling = [part for part in parts.values() if part < 0]
    return telling if len(telling) >= _ENOUGH else list(parts.values())


def _slow_pairs(parts: Mapping[Pair, float]) -> set[Pair]:
    """Those below what both their ends can do (logarithms of the part), and outside of what is usual among pairs."""
    telling = _telling(parts)
    limit = min(math.log(SLOW), median(telling) - _DEVIATIONS * _spread(telling))
    return {pair for pair, part in parts.items() if part < limit}


def _mostly(slow: set[Pair], matrix: Matrix, side: int) -> set[str]:
    """Hosts whose links in one direction (side of the pair) are mostly slow, though not all; of three links at least.

    The slow links of two such hosts can't be told from those of their partners where the partners have as many.
    """
    counts = {pair[side]: 0 for pair in slow}
    for pair in slow:
        counts[pair[side]] += 1
    totals = {host: sum(1 for pair in matrix if pair[side] == host) for host in counts}
    return {host for host, count in counts.items() if totals[host] >= 3 and 2 * count > totals[host]}


def _groups(
    hosts: Sequence[str], matrix: Matrix, best_out: Mapping[str, float], best_in: Mapping[str, float]
) -> tuple[tuple[str, ...], ...]:
    """Parts of the graph of fast pairs; none unless there are several, of two hosts or more each."""
    fast: dict[str, set[str]] = {host: set() for host in hosts}
    for (sender, receiver), rate in matrix.items():
        is_between = sender in fast and receiver in fast
        if is_between and rate >= SLOW * _reference((sender, receiver), best_out, best_in):
            fast[sender].add(receiver)
            fast[receiver].add(sender)
    found: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for start in hosts:
        if start in seen:
            continue
        part, waiting = {start}, [start]
        while waiting:
            new = fast[waiting.pop()] - part
            part |= new
            waiting += new
        seen |= part
        found.append(tuple(host for host in hosts if host in part))
    return tuple(found) if len(found) > 1 and all(len(part) > 1 for part in found) else ()


def _slow_host(host: str, matrix: Matrix, slow_out: set[str], slow_in: set[str]) -> SlowHost:
    """What it has with partners that aren't slow, against what these have with each other."""
    rates, others = {}, {}
    for name, side, slow, partners in (("out", 0, slow_out, slow_in), ("in", 1, slow_in, slow_out)):
        if host not in slow:
            continue
        own = {pair: rate for pair, rate in matrix.items() if pair[side] == host}
        clean = [rate for pair, rate in own.items() if pair[1 - side] not in partners]
        rates[name] = median(clean or own.values())
        rest = [rate for pair, rate in matrix.items() if pair[side] not in slow and pair[1 - side] not in partners]
        others[name] = median(rest or matrix.values())
    direction: Direction = "both" if len(rates) == 2 else "out" if "out" in rates else "in"
    return SlowHost(host, direction, rates, others)


def _links(
    slow: set[Pair], matrix: Matrix, best_out: Mapping[str, float], best_in: Mapping[str, float]
) -> tuple[SlowLink, ...]:
    found = []
    for sender, receiver in sorted(slow):
        both = (receiver, sender) in slow
        if both and receiver < sender:
            continue
        pairs = [(sender, receiver), (receiver, sender)] if both else [(sender, receiver)]
        usual = min(_reference(pair, best_out, best_in) for pair in pairs)
        found.append(SlowLink(sender, receiver, both, min(matrix[pair] for pair in pairs), usual))
    return tuple(found)


def _only_link(matrix: Matrix) -> tuple[SlowLink, ...]:
    """Of two hosts only a difference between the directions can be seen, and not whose it is."""
    (slower, rate), *faster = sorted(matrix.items(), key=lambda item: item[1])
    if not faster or rate >= SLOW * faster[-1][1]:
        return ()
    return (SlowLink(*slower, both=False, bit_per_s=rate, usual_bit_per_s=faster[-1][1], settled=False),)


# --- the order of a ring -----------------------------------------------------------------------------------------


def ring(hosts: Sequence[_Name]) -> list[tuple[_Name, _Name]]:
    """Each with the next one, and the last with the first; a single host has no ring."""
    return list(zip(hosts, [*hosts[1:], hosts[0]], strict=True)) if len(hosts) > 1 else []


def rank_order(hosts: Sequence[str], matrix: Matrix) -> list[str]:
    """The hosts as a ring that crosses slow links as seldom as possible.

    Rates are put into classes, each 3/4 of the one before. Of two rings the better one crosses fewer links of the
    slowest class in which they differ. A link is as fast as its slower direction; one that wasn't measured counts as
    the slowest. Among equally good rings the hosts' own order is kept. Greedy rings are improved by turning parts
    (2-opt) and moving hosts, so the best isn't certain for many hosts. The ring begins with the first host.
    """
    names = list(hosts)
    if len(names) < 4:
        return names
    cost = _ring_costs(names, matrix)
    starts = [list(range(len(names))), *(_greedy(first, cost) for first in range(min(len(names), _MAX_STARTS)))]
    # The first of equals.
    best = min((_improved(ring, cost) for ring in starts), key=lambda ring: _ring_cost(ring, cost))
    place = best.index(0)
    return [names[one] for one in best[place:] + best[:place]]


def _ring_costs(names: Sequence[str], matrix: Matrix) -> list[list[int]]:
    """A link of one class costs more than a whole ring of links of the next faster class."""
    fastest = max(matrix.values(), default=1.0)

    def level(one: str, other: str) -> int | None:
        rates = [matrix[pair] for pair in ((one, other), (other, one)) if pair in matrix]
        if not rates or min(rates) <= 0:
            return None
        return int(math.log(fastest / min(rates)) / -math.log(_CLASS))

    levels = [[level(one, other) for other in names] for one in names]
    present = sorted({value for row in levels for value in row if value is not None})
    ranks: dict[int | None, int] = {None: len(present)}
    ranks.update({value: place for place, value in enumerate(present)})
    return [[(len(names) + 1) ** ranks[value] - 1 for value in row] for row in levels]


def _ring_cost(ring: Sequence[int], cost: Sequence[Sequence[int]]) -> int:
    return sum(cost[ring[place - 1]][one] for place, one in enumerate(ring))


def _greedy(first: int, cost: Sequence[Sequence[int]]) -> list[int]:
    ring, left = [first], set(range(len(cost))) - {first}
    while left:
        nearest = cost[ring[-1]]
        ring.append(min(left, key=lambda one: (nearest[one], one)))
        left.remove(ring[-1])
    return ring


def _improved(ring: list[int], cost: Sequence[Sequence[int]]) -> list[int]:
    """Change the ring as long as some change makes it cheaper."""
    current = list(ring)
    while _ring_cost(current, cost) and (_turn(current, cost) or _move(current, cost)):
        pass
    return current


def _turn(ring: list[int], cost: Sequence[Sequence[int]]) -> bool:
    """Turn every part around that makes the ring cheaper; whether there was one."""
    changed = False
    for first in range(1, len(ring) - 1):
        for last in range(first + 1, len(ring)):
            before, after = ring[first - 1], ring[(last + 1) % len(ring)]
            now = cost[before][ring[first]] + cost[ring[last]][after]
            if cost[before][ring[last]] + cost[ring[first]][after] < now:
                ring[first : last + 1] = ring[first : last + 1][::-1]
                changed = True
    return changed


def _move(ring: list[int], cost: Sequence[Sequence[int]]) -> bool:
    """Move every single host that makes the ring cheaper elsewhere; whether there was one."""
    changed = False
    for host in list(ring):
        place = ring.index(host)
        rest = ring[:place] + ring[place + 1 :]
        added = [cost[rest[at - 1]][host] + cost[host][one] - cost[rest[at - 1]][one] for at, one in enumerate(rest)]
        # In its own place it stands before the one that follows it.
        cheapest = min(range(len(rest)), key=added.__getitem__)
        if added[cheapest] < added[place % len(rest)]:
            ring[:] = [*rest[:cheapest], host, *rest[cheapest:]]
            changed = True
    return changed
