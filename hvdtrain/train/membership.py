"""Which ranks train together: joining them, and doing so anew when one has left or wants to come (Horovod elastic)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from horovod.common.elastic import notification_manager
from horovod.common.exceptions import HorovodInternalError

from hvdtrain import contract
from hvdtrain.heartbeat import JOINING, Heartbeat
from hvdtrain.parallel.groups import Groups, init

# A rank may be lost while the others join. Each time costs Gloo's timeout (30 s) at most.
_MOST_TRIES = 20
_BETWEEN_TRIES_S = 0.5


class Member:
    """The part of a backend that is this process's place among the ranks. It takes part from the beginning (all ranks).

    Args:
        horovod: the framework's module of Horovod, which has ``init``, ``shutdown``, ``rank`` and ``size``.

    Attributes:
        heartbeat: is told while it waits.
        elastic: whether ranks may come and go.
        rank, size: as Horovod says.
        hosts: how many have a rank.
        groups: this process's place on the grid of ranks.
    """

    def __init__(self, horovod: Any) -> None:
        self._horovod = horovod
        self.heartbeat = Heartbeat.connect()
        self._changed = threading.Event()
        self.elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        self._join()

    @property
    def resize_wanted(self) -> bool:
        """Whether horovodrun has told this rank that the hosts have changed: it tells rank 0 alone."""
        return self._changed.is_set()

    def _join(self) -> None:
        """Take part (all ranks). In an elastic job it is tried again where another rank was lost meanwhile."""
        for attempt in range(1, _MOST_TRIES + 1):
            try:
                with self.heartbeat.collective(JOINING):
                    self.groups: Groups = init(self._horovod)
                break
            except (ValueError, RuntimeError) as error:
                if not self.elastic or attempt == _MOST_TRIES:
                    raise
                sys.stderr.write(f"warning: the ranks didn't find each other, trying again: {error}\n")
                self._horovod.shutdown()
                time.sleep(_BETWEEN_TRIES_S)
        if self.elastic:
            # Both do nothing the second time.
            notification_manager.init()
            notification_manager.register_listener(self)
        self.rank: int = self.groups.rank
        self.size: int = self._horovod.size()
        self.hosts: int = max(1, self.size // self.local_size())

    @property
    def replicas(self) -> int:
        """Into how many parts the samples of a step are shared out."""
        return self.groups.grid.replicas

    @property
    def replica(self) -> int:
        """Which of those parts is this rank's."""
        return self.groups.replicas.rank

    @property
    def stream(self) -> int:
        """Number of this rank's random stream: tensor groups share one."""
        return self.groups.tensor.ranks[0]

    @property
    def parts(self) -> Sequence[int]:
        """Ranks that together have one copy of what is saved; none where rank 0 has it all."""
        grid = self.groups.grid
        if grid.is_data_parallel:
            return ()
        return [rank for rank in range(grid.size) if grid.coordinates(rank)["data"] == 0]

    def rejoin(self) -> None:
        """Leave, and take part with the ranks that are there now (all ranks): rank and size may have changed."""
        self._horovod.shutdown()
        # Whatever was told before is part of what comes now.
        self._changed.clear()
        self._join()

    def is_lost_rank(self, error: Exception) -> bool:
        """Whether an error of a collective says that another rank of an elastic job has left."""
        return self.elastic and isinstance(error, HorovodInternalError)

    def findings(self) -> list[str]:
        """Nothing, where nothing is tried out."""
        return []

    def local_size(self) -> int:
        """Ranks on this host, as the launcher knows: for Horovod each rank of an elastic job is a host of its own."""
        return int(os.environ.get(contract.LOCAL_SIZE) or self._horovod.local_size())

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        """Called by Horovod, in a thread of its own."""
        self._changed.set()
