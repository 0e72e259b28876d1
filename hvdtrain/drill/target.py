"""What a fault can get hold of: processes and links of the launch that the drill started, and no others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import psutil

from hvdtrain import contract
from hvdtrain.drill.hand import Hand
from hvdtrain.drill.on_host import GoneError
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.supervise.records import RankStatus

# What is done at the word.
Deed = Callable[[], object]


@dataclass(frozen=True)
class Target:
    """A launch, and what of it is to be hit.

    Attributes:
        supervisor: the process of `hvdtrain launch`.
        plan: of the launch itself.
        rank: the rank that is hit, or one on the host that is.
        host: the host that is hit.
        step_s: seconds that a step takes; None where unknown.
        rate: what a slowed link lets through, as tc takes it.
        hold: has a hand get ready, and let go at the end.
        pause: waits so many seconds.
    """

    supervisor: psutil.Process
    plan: LaunchPlan
    rank: RankStatus
    host: str
    step_s: float | None
    rate: str
    hold: Callable[[Hand], AbstractContextManager[Hand]]
    pause: Callable[[float], None]

    @contextlib.contextmanager
    def on_rank(self, action: str, **details: Any) -> Iterator[Deed]:
        """An action of `hvdtrain.drill.on_host` on the rank, ready to be done; undone at the end.

        Raises:
            GoneError: it has ended.
        """
        with self._hand(self.rank.host, action, pid=self.rank.pid, **details) as hand:
            yield hand.act

    @contextlib.contextmanager
    def on_link(self, action: str) -> Iterator[Deed]:
        """The same on the host's link.

        Raises:
            RefusedError: it can't be done there.
        """
        environment = self.plan.environment | self.plan.host_environment.get(self.host, {})
        interface = environment.get(contract.GLOO_INTERFACE)
        with self._hand(self.host, action, interface=interface, rate=self.rate) as hand:
            yield hand.act

    def launcher(self) -> psutil.Process:
        """Horovodrun: the supervisor's first child after its connections; later ones are orphans that it adopted.

        Raises:
            GoneError: it has none.
        """
        connections = {argv[-1] for argv in self.plan.agents.values()}
        try:
            children = [each for each in self.supervisor.children() if not connections & set(each.cmdline())]
            return min(children, key=psutil.Process.create_time)
        except (psutil.NoSuchProcess, ValueError) as error:
            raise GoneError from error

    def _hand(self, host: str, action: str, **details: Any) -> AbstractContextManager[Hand]:
        request = {"action": action, "run_directory": self.plan.run_directory, **details}
        return self.hold(Hand(self.plan, host, request, self.pause))
