"""What a rank is doing, in a page of memory that it shares with its wrapper: written at every step, at almost no cost.

A heartbeat must be seen from outside also when its writer hangs or is stopped, so nothing has to be sent: the wrapper
looks at the page from time to time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain import contract

# Beat's fields, in their order.
_LAYOUT = struct.Struct("<dqqqqqdq64s")
PAGE = mmap.PAGESIZE
# What a rank is doing while the ranks find each other.
JOINING = "start of Horovod"
# That a training has ended orderly, but not at its end.
STOPPED = "stopped"


@dataclass(frozen=True)
class Beat:
    """The newest state of one rank.

    Attributes:
        time: when the rank wrote last, Unix seconds; 0 where it never did.
        step: steps done since the job's first start.
        steps: steps of the whole training; 0 where unknown.
        size: number of ranks that train together now; 0 where unknown.
        epoch: the epoch that it is in, from 1.
        samples: samples that all ranks have trained on since the job's first start.
        waited_s: seconds that this process has spent in collectives.
        waiting: whether it is in a collective now, where the other ranks may keep it.
        activity: what it is doing now, such as ``gradients`` or ``evaluation``; empty for the step's own computation.
    """

    time: float = 0.0
    step: int = 0
    steps: int = 0
    size: int = 0
    epoch: int = 0
    samples: int = 0
    waited_s: float = 0.0
    waiting: bool = False
    activity: str = ""


class Heartbeat:
    """The rank's end of the page. One for each process, from `connect`; for the thread that trains."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._steps = 0
        self._size = 0
        self._step = 0
        self._epoch = 0
        self._samples = 0
        self._waited_s = 0.0
        self._waiting = False
        self._activity = b""

    @classmethod
    def connect(cls, environment: Mapping[str, str] = os.environ) -> Heartbeat:
        """The page that the wrapper made, or one of its own that nobody reads where there is no wrapper."""
        path = environment.get(contract.HEARTBEAT)
        if path is None:
            return cls(mmap.mmap(-1, PAGE))
        try:
            with Path(path).open("r+b") as file:
                return cls(mmap.mmap(file.fileno(), PAGE))
        except (OSError, ValueError):
            return cls(mmap.mmap(-1, PAGE))

    def training(self, steps: int, size: int) -> None:
        """The training has so many steps in all, on so many ranks."""
        self._steps, self._size = steps, size
        self._write()

    def step(self, step: int, epoch: int, samples: int) -> None:
        """A step is done (see `Beat` for the numbers)."""
        self._step, self._epoch, self._samples = step, epoch, samples
        self._activity = b""
        self._write()

    def doing(self, activity: str) -> None:
        """Something other than the step's own computation begins, such as ``evaluation``; at most 64 bytes are kept."""
        self._activity = activity.encode()
        self._write()

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Inside, the rank waits for the others in the collective of that name."""
        before, started = (self._activity, self._waiting), time.monotonic()
        self._activity, self._waiting = name.encode(), True
        self._write()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - started
            self._activity, self._waiting = before
            self._write()

    def _write(self) -> None:
        _LAYOUT.pack_into(
            self._page, 0, time.time(), self._step, self._steps, self._size, self._epoch, self._samples,
            self._waited_s, self._waiting, self._activity,
        )  # fmt: skip


def read(page: mmap.mmap) -> Beat:
    """What the page says. A name that is being written just now may come out torn; the numbers don't."""
    moment, step, steps, size, epoch, samples, waited_s, waiting, activity = _LAYOUT.unpack_from(page)
    text = activity.rstrip(b"\0").decode(errors="replace")
    return Beat(moment, step, steps, size, epoch, samples, waited_s, bool(waiting), text)
