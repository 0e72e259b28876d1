"""Which slots of an elastic job are offered, and under which address."""

from __future__ import annotations

from hvdtrain.hosts.local import is_this_machine
from hvdtrain.supervise.slots import Slots


def offered(slots: Slots, now: float) -> list[str]:
    slots.offer(now)
    return slots.aliases()


def test_every_worker_has_a_host_of_its_own() -> None:
    aliases = offered(Slots({"a": 600, "b": 400}, 1000, 10), 0)
    assert len(set(aliases)) == 1000
    assert all(is_this_machine(alias) for alias in aliases)
    assert "127.0.0.1" not in aliases


def test_a_failed_slot_comes_back_under_another_address() -> None:
    slots = Slots({"a": 2}, 8, cooldown_s=10)
    first, second = offered(slots, 0)
    slot = slots.find(second)
    assert slot
    slots.failed(slot, 1)
    assert offered(slots, 10.9) == [first]
    assert slots.find(second) is None
    again = offered(slots, 11)
    assert again[0] == first
    assert again[1] not in (first, second)


def test_cool_downs_double_until_a_worker_has_settled() -> None:
    slots = Slots({"a": 1}, 1, cooldown_s=10)
    now, waits = 0.0, []
    for _ in range(6):
        (alias,) = offered(slots, now)
        slot = slots.find(alias)
        assert slot
        slot.taken = True
        slots.failed(slot, now + 1)
        waits.append(slot.free_at - now - 1)
        now = slot.free_at
    assert waits == [10, 20, 40, 80, 80, 80]
    (alias,) = offered(slots, now)
    slot = slots.find(alias)
    assert slot
    slot.taken = True
    slots.failed(slot, now + 100)
    assert slot.free_at == now + 110


def test_hosts_that_grow_and_shrink() -> None:
    slots = Slots({"a": 2}, 3, cooldown_s=10)
    before = offered(slots, 0)
    slots.resize({"a": 5})
    assert slots.count == 3
    grown = offered(slots, 1)
    assert grown[:2] == before
    slots.resize({"a": 1})
    assert offered(slots, 2) == before[:1]
    assert slots.find(grown[2]) is None


def test_a_worker_that_never_comes_gets_another_address() -> None:
    slots = Slots({"a": 2}, 2, cooldown_s=10)
    first, second = offered(slots, 0)
    taken = slots.find(first)
    assert taken
    taken.taken = True
    slots.renew(59, patience_s=60)
    assert slots.aliases() == [first, second]
    slots.renew(61, patience_s=60)
    assert slots.aliases()[0] == first
    assert slots.aliases()[1] != second


def test_slots_of_a_host_that_cannot_be_used_are_not_offered() -> None:
    slots = Slots({"a": 1, "b": 2}, 8, cooldown_s=10)
    slots.offer(0, lambda host: host == "a")
    assert [slot.host for alias in slots.aliases() if (slot := slots.find(alias))] == ["a"]
    slots.offer(1, lambda host: True)
    assert len(slots.aliases()) == 3
    assert slots.count_on("b") == 2
    one, two, three = slots.aliases()
    taken = slots.find(two)
    assert taken
    taken.taken = True
    # One worker is there, and its host is seen to be gone when it ends; nobody shall start the other one there.
    slots.offer(2, lambda host: host == "a")
    assert slots.aliases() == [one, two]
    slots.resize({"b": 1})
    assert slots.aliases() == [two]
    assert slots.find(three) is None
