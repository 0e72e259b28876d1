"""Which rank runs where: hosts are filled in their order, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.hosts.models import Host


@dataclass(frozen=True)
class Placement:
    """One rank's place, in Horovod's terms.

    Attributes:
        rank: number of the worker in the job, from 0.
        host: name of its host.
        local_rank: its number on that host, from 0.
        local_size: workers on that host.
        cross_rank: number of its host among the hosts that have a worker with this local rank.
    """

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int


def workers_per_host(hosts: Sequence[Host], processes: int, *, oversubscribe: bool, together: int = 1) -> list[int]:
    """How many workers each host gets, in the hosts' order.

    Slots are filled host by host. Beyond them (``oversubscribe``), each host in turn takes one more, as far as
    its ``max_slots`` lets it.

    Args:
        hosts: with their slots.
        processes: how many in all.
        oversubscribe: whether hosts may have more workers than slots.
        together: a host takes a multiple of so many (a tensor group), if the hosts have enough slots for that.

    Raises:
        UsageError: more workers than the hosts may take; the message shows the sum.
    """
    multiples = [host.slots // together * together for host in hosts]
    usable = multiples if sum(multiples) >= processes else [host.slots for host in hosts]
    counts: list[int] = []
    for slots_of_host in usable:
        counts.append(min(slots_of_host, processes - sum(counts)))
    if sum(counts) == processes:
        return counts
    slots = _sum([host.slots for host in hosts])
    if not oversubscribe:
        raise UsageError(
            f"{processes} processes, but the hosts have {slots}",
            fix="ask for fewer processes, add hosts or slots, or set 'oversubscribe: true'",
        )
    while sum(counts) < processes:
        before = sum(counts)
        for index, host in enumerate(hosts):
            if sum(counts) < processes and (host.max_slots is None or counts[index] < host.max_slots):
                counts[index] += 1
        if sum(counts) == before:
            raise UsageError(
                f"{processes} processes, but the hosts' max_slots allow {_sum(counts)}",
                fix="ask for fewer processes, or raise max_slots in the hostfile",
            )
    return counts


def _sum(slots: Sequence[int]) -> str:
    """``2 + 4 = 6 slots``, so that the user sees where a total comes from."""
    noun = "slot" if sum(slots) == 1 else "slots"
    if 1 < len(slots) <= 8:
        return f"{' + '.join(map(str, slots))} = {sum(slots)} {noun}"
    return f"{sum(slots)} {noun}"


def place(hosts: Sequence[Host], counts: Sequence[int]) -> tuple[Placement, ...]:
    """Ranks in order: all of the first host's, then all of the second's, as horovodrun and mpirun assign them."""
    placements: list[Placement] = []
    for index, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        for local_rank in range(count):
            cross_rank = sum(other > local_rank for other in counts[:index])
            placements.append(Placement(len(placements), host.name, local_rank, count, cross_rank))
    return tuple(placements)
