"""Schedule, analysis and order of the bandwidth matrix, on matrices whose faults are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import pytest

from hvdtrain.cluster.bandwidth import Pair, analyse, outliers, packed, rank_order, rounds, suspects, timing

FAST, SLOW_RATE = 9.4e9, 0.19e9


def names(count: int) -> list[str]:
    return [f"h{number}" for number in range(1, count + 1)]


def matrix(
    count: int,
    *,
    out: Mapping[str, float] | None = None,
    into: Mapping[str, float] | None = None,
    links: Mapping[Pair, float] | None = None,
    noise: float = 0.05,
    seed: int = 0,
) -> dict[Pair, float]:
    """Each rate is the least of both hosts' and the link's; noise only takes away."""
    chance = random.Random(seed)  # noqa: S311
    return {
        pair: min((out or {}).get(pair[0], FAST), (into or {}).get(pair[1], FAST), (links or {}).get(pair, FAST))
        * (1 - noise * chance.random())
        for pair in itertools.permutations(names(count), 2)
    }


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16, 33, 64])
def test_each_pair_is_measured_once_and_each_host_is_in_one_pair_at_a_time(count: int) -> None:
    found = rounds(names(count))
    assert len(found) == (count if count % 2 else count - 1)
    for pairs in found:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts)) == count - count % 2
    met = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2


def test_the_time_is_bounded_for_any_number_of_hosts() -> None:
    for count in (2, 4, 16, 64, 65, 256, 1000):
        each = timing(count)
        assert len(rounds(names(count))) * 2 * (each.warm_up_s + each.duration_s) <= 40, count
        assert each.duration_s >= 0.15
    assert timing(4).duration_s > 0.9
    met = [frozenset(pair) for pairs in rounds(names(100)) for pair in pairs]
    assert len(met) == len(set(met)) == 63 * 50


@pytest.mark.parametrize(
    ("count", "noise"),
    # Few hosts that vary by more are measured again.
    [*itertools.product([2, 3, 4, 8, 16, 33], [0.0, 0.05, 0.2]), (16, 0.5), (33, 0.5)],
)
def test_equal_hosts_are_not_blamed(count: int, noise: float) -> None:
    for seed in range(20):
        found = analyse(names(count), matrix(count, noise=noise, seed=seed))
        assert (found.hosts, found.links, found.groups) == ((), (), ())


@pytest.mark.parametrize("count", [3, 4, 5, 16])
@pytest.mark.parametrize("direction", ["out", "in", "both"])
def test_a_slow_host_and_its_direction(count: int, direction: str) -> None:
    slow = {"h2": SLOW_RATE}
    rates = matrix(
        count, out=slow if direction in ("out", "both") else {}, into=slow if direction in ("in", "both") else {}
    )
    found = analyse(names(count), rates)
    assert [(one.host, one.direction) for one in found.hosts] == [("h2", direction)]
    assert set(found.hosts[0].bit_per_s) == ({"out", "in"} if direction == "both" else {direction})
    for name, rate in found.hosts[0].bit_per_s.items():
        assert rate == pytest.approx(SLOW_RATE, rel=0.05)
        assert found.hosts[0].others_bit_per_s[name] == pytest.approx(FAST, rel=0.05)
    assert (found.links, found.groups) == ((), ())


def test_a_slow_host_among_others_that_vary_much() -> None:
    for seed in range(20):
        found = analyse(names(4), matrix(4, out={"h3": 2e8}, into={"h3": 2e8}, noise=0.3, seed=seed))
        assert [one.host for one in found.hosts] == ["h3"], seed


def test_several_slow_hosts_of_different_rates() -> None:
    slow = {"h2": 1e8, "h7": 1e9}
    found = analyse(names(9), matrix(9, out=slow, into=slow))
    assert [(one.host, one.direction) for one in found.hosts] == [("h2", "both"), ("h7", "both")]
    # What it has with the one that is slower still says nothing of it.
    assert found.hosts[1].bit_per_s["out"] == pytest.approx(1e9, rel=0.05)
    assert found.links == ()


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_slow_link_is_told_from_its_hosts(count: int) -> None:
    found = analyse(names(count), matrix(count, links={("h1", "h3"): 1e9, ("h3", "h1"): 1e9}))
    assert found.hosts == ()
    assert [(link.sender, link.receiver, link.both, link.settled) for link in found.links] == [("h1", "h3", True, True)]
    assert found.links[0].bit_per_s == pytest.approx(1e9, rel=0.06)
    assert found.links[0].usual_bit_per_s == pytest.approx(FAST, rel=0.06)
    one_way = analyse(names(count), matrix(count, links={("h3", "h1"): 1e9}))
    assert [(link.sender, link.receiver, link.both) for link in one_way.links] == [("h3", "h1", False)]


def test_a_host_with_one_fast_link_left_is_slow() -> None:
    links = {pair: 1e9 for pair in itertools.permutations(names(6), 2) if "h4" in pair and "h1" not in pair}
    found = analyse(names(6), matrix(6, links=links))
    assert [(one.host, one.direction) for one in found.hosts] == [("h4", "both")]
    assert found.links == ()


def test_of_two_hosts_nobody_can_say_which() -> None:
    (link,) = analyse(names(2), {("h1", "h2"): 9e9, ("h2", "h1"): 2e8}).links
    assert (link.sender, link.receiver, link.both, link.settled) == ("h2", "h1", False, False)


def test_two_switches_with_a_slow_way_between_them() -> None:
    groups = ("h1", "h2", "h5"), ("h3", "h4")
    across = {
        pair: 1e9 for pair in itertools.permutations(names(5), 2) if (pair[0] in groups[0]) != (pair[1] in groups[0])
    }
    found = analyse(names(5), matrix(5, links=across))
    assert (found.hosts, found.links, found.groups) == ((), (), groups)


def test_what_is_missing_is_unknown() -> None:
    rates = matrix(5, out={"h2": SLOW_RATE})
    for pair in (("h1", "h2"), ("h3", "h4"), ("h4", "h3")):
        del rates[pair]
    assert [one.host for one in analyse(names(5), rates).hosts] == ["h2"]
    assert analyse(names(3), {}).hosts == ()


def test_outliers_are_below_the_others_and_outside_their_spread() -> None:
    assert outliers({"a": 10.0, "b": 10.1, "c": 5.0}) == {"c": 10.05}
    assert outliers({"a": 10.0, "b": 10.1, "c": 8.0, "d": 9.9}) == {}
    assert outliers({"a": 10.0, "b": 3.0, "c": 5.0, "d": 7.0}) == {}
    assert outliers({"a": 10.0, "b": 1.0}) == {}


def test_suspects_meet_partners_that_are_well() -> None:
    slow = {"h2": SLOW_RATE, "h3": SLOW_RATE}
    rates = matrix(6, out=slow, into=slow, links={("h1", "h5"): 1e9})
    wanted = suspects(analyse(names(6), rates), rates)
    again = packed(wanted)
    assert sorted(pair for pairs in again for pair in pairs) == sorted(wanted)
    for pairs in again:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))
    assert ("h1", "h5") in wanted
    assert sum("h2" in pair for pair in wanted) == 2
    assert ("h2", "h3") not in wanted
    assert wanted["h1", "h5"] == pytest.approx(FAST, rel=0.06)
    assert suspects(analyse(names(6), matrix(6)), matrix(6)) == {}


# --- the ring ----------------------------------------------------------------------------------------------------


def links(ring: list[str], rates: Mapping[Pair, float]) -> list[float]:
    """The ring's links, slowest first."""
    pairs = zip(ring, ring[1:] + ring[:1], strict=True)
    return sorted(min(rates[one, other], rates[other, one]) for one, other in pairs)


def best(count: int, rates: Mapping[Pair, float]) -> list[float]:
    """Of all rings the one that crosses the slowest links least."""
    first, *others = names(count)
    return max(links([first, *order], rates) for order in itertools.permutations(others))


def tiers(chance: random.Random) -> float:
    return chance.choice([1e8, 1e9, 1e10])


def two_rates(chance: random.Random) -> float:
    return 1e8 if chance.random() < 0.5 else 1e10


def many(chance: random.Random) -> float:
    return 1e10 * 0.7 ** chance.randrange(10)


@pytest.mark.parametrize("rate", [tiers, two_rates, many])
@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_no_ring_is_better(count: int, rate: Callable[[random.Random], float]) -> None:
    chance = random.Random(count)  # noqa: S311
    for _ in range(25):
        rates = {}
        for one, other in itertools.combinations(names(count), 2):
            rates[one, other] = rates[other, one] = rate(chance)
        ring = rank_order(names(count), rates)
        assert sorted(ring) == names(count)
        assert ring[0] == "h1"
        assert links(ring, rates) == best(count, rates)


def test_the_order_stays_where_no_other_is_better() -> None:
    assert rank_order(names(8), matrix(8)) == names(8)
    slow = {"h3": SLOW_RATE}
    assert rank_order(names(8), matrix(8, out=slow, into=slow)) == names(8)
    assert rank_order(names(3), matrix(3)) == names(3)


def test_each_switch_is_entered_once() -> None:
    hosts = names(16)
    across = {(a, b): 1e9 for a, b in itertools.permutations(hosts, 2) if hosts.index(a) % 2 != hosts.index(b) % 2}
    ring = rank_order(hosts, matrix(16, links=across))
    crossed = sum((one, other) in across for one, other in zip(ring, ring[1:] + ring[:1], strict=True))
    assert crossed == 2


def test_a_link_that_failed_is_avoided() -> None:
    rates = matrix(5)
    del rates["h1", "h2"], rates["h2", "h1"]
    ring = rank_order(names(5), rates)
    assert abs(ring.index("h1") - ring.index("h2")) not in (1, 4)


def test_the_order_of_many_hosts_is_found_in_seconds() -> None:
    chance = random.Random(3)  # noqa: S311
    rates = {pair: tiers(chance) for pair in itertools.permutations(names(128), 2)}
    assert sorted(rank_order(names(128), rates)) == sorted(names(128))
