"""The slots of an elastic job's hosts: which are offered to horovodrun, and under which address.

Horovod excludes the whole host of a worker that fails, and for ever. So each worker gets a host of its own: an address
of the loopback network that no other worker had before, wherever it runs. A failed slot is offered again, under a new
one, after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# After so many failures in a row a slot's cool-down doubles no more: it is then eight times the first.
_MOST_DOUBLINGS = 3
# A worker that has run for this long had no fault of its slot's.
_SETTLED_S = 60.0
_PER_NETWORK = 250


@dataclass
class Slot:
    """Room for one worker.

    Attributes:
        host: where it is.
        number: on that host, from 0: where there are GPUs, its GPU.
        alias: the address of the worker that it has or waits for; None while it cools down.
        offered_at: when the alias was offered, monotonic seconds.
        taken: whether a worker has come.
        failures: in a row.
        free_at: when it is offered again.
    """

    host: str
    number: int
    alias: str | None = None
    offered_at: float = 0.0
    taken: bool = False
    failures: int = 0
    free_at: float = 0.0


class Slots:
    """All slots of a job's hosts. Times are monotonic seconds.

    Args:
        hosts: how many each host has now.
        maximum: how many the job takes: the first hosts' first.
        cooldown_s: from a slot's failure to its next worker; doubles with each failure in a row.
    """

    def __init__(self, hosts: Mapping[str, int], maximum: int, cooldown_s: float) -> None:
        self._maximum = maximum
        self._cooldown_s = cooldown_s
        self._slots: list[Slot] = []
        self._aliases = 0
        self.resize(hosts)

    def resize(self, hosts: Mapping[str, int]) -> None:
        """The hosts have so many slots from now on; of each the last ones go first."""
        known = {(slot.host, slot.number): slot for slot in self._slots}
        wanted = [(host, number) for host, count in hosts.items() for number in range(count)]
        self._slots = [known.get(place) or Slot(*place) for place in wanted[: self._maximum]]

    @property
    def count(self) -> int:
        """How many there are, offered or not."""
        return len(self._slots)

    def count_on(self, host: str) -> int:
        """How many of them a host has."""
        return sum(slot.host == host for slot in self._slots)

    def offer(self, now: float, usable: Callable[[str], bool] = lambda host: True) -> None:
        """Offer what has cooled down, on hosts that can be used, and no more what can't be."""
        for slot in self._slots:
            if slot.alias is None and now >= slot.free_at and usable(slot.host):
                slot.alias, slot.offered_at, slot.taken = self._new_alias(), now, False
            elif slot.alias is not None and not slot.taken and not usable(slot.host):
                slot.alias = None

    def aliases(self) -> list[str]:
        """Addresses that are offered or in use."""
        return [slot.alias for slot in self._slots if slot.alias is not None]

    def find(self, alias: str) -> Slot | None:
        """The slot that has this address."""
        return next((slot for slot in self._slots if slot.alias == alias), None)

    def failed(self, slot: Slot, now: float) -> None:
        """Its worker has ended badly."""
        settled = slot.taken and now - slot.offered_at > _SETTLED_S
        slot.failures = 1 if settled else slot.failures + 1
        slot.free_at = now + self._cooldown_s * 2 ** min(slot.failures - 1, _MOST_DOUBLINGS)
        slot.alias = None

    def renew(self, now: float, patience_s: float) -> None:
        """Give a slot whose worker hasn't come for so long another address: horovodrun may have missed the first."""
        for slot in self._slots:
            if slot.alias is not None and not slot.taken and now - slot.offered_at > patience_s:
                slot.alias, slot.offered_at = self._new_alias(), now

    def _new_alias(self) -> str:
        number = self._aliases
        self._aliases += 1
        # 127.0.0.1 itself would be this machine for horovodrun, without a worker of its own.
        return (
            f"127.{1 + number // _PER_NETWORK**2}.{number // _PER_NETWORK % _PER_NETWORK}.{2 + number % _PER_NETWORK}"
        )
