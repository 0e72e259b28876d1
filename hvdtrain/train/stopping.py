"""An orderly stop: any rank that gets SIGTERM makes all ranks stop after the same step."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from hvdtrain.train.backend import Backend

# How often the ranks ask each other, at most. A collective of a few bytes takes 1 ms (MPI) to 10 ms (Gloo).
MEETING_INTERVAL_S = 2.0


class Stopping:
    """Catches SIGTERM while it is entered, and says after which step to stop, or to take in ranks that come.

    The ranks may get the signal at different times, or one of them alone, so they have to meet to agree. They do so
    where they meet anyway (`words`, `hear`), and else about every `MEETING_INTERVAL_S`; in between `agreed` costs
    nothing. A second SIGTERM ends this process at once.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._asked = False
        self.restart()

    def restart(self) -> None:
        """The ranks are others now, and know nothing of each other (all ranks)."""
        self._agreed = False
        # Whether the ranks are to come together anew: the hosts of an elastic job have changed.
        self.resize = False
        self._met_step: int | None = None
        self._met = time.monotonic()
        self._gap = 1
        self._next_step = 0

    def __enter__(self) -> Stopping:
        # A thread of its own reads the signals: Python's handlers run in the main thread, and not while that one waits
        # in a collective for a rank that never comes.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handler_before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._leave_child)
        self._thread = threading.Thread(target=self._listen, name="hvdtrain-sigterm", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._fd_before)
        signal.signal(signal.SIGTERM, self._handler_before)
        self._pid = 0
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def agreed(self, step: int) -> bool:
        """Whether to stop now that so many steps are done (all ranks)."""
        if self._backend.size == 1:
            self.resize = self._backend.resize_wanted
            return self._asked
        if step >= self._next_step:
            self.hear(step, self._backend.sum_over_ranks(self.words()))
        return self._agreed

    def words(self) -> list[float]:
        """What this rank says at a meeting: whether it was asked to stop or resize, microseconds since the last one.

        Whole numbers, whose sum is the same on all ranks in whatever order they are added.
        """
        since = float(round((time.monotonic() - self._met) * 1e6))
        return [float(self._asked), float(self._backend.resize_wanted), since]

    def hear(self, step: int, sums: Sequence[float]) -> None:
        """What all ranks have said, summed, after so many steps. From it follows when they meet next."""
        asked, resize, microseconds = sums
        self._agreed = asked > 0
        self.resize = resize > 0
        if self._met_step is not None and step > self._met_step:
            step_s = max(microseconds / 1e6 / self._backend.size / (step - self._met_step), 1e-6)
            # At most doubled: the first steps are slow and say little.
            self._gap = max(1, min(2 * self._gap, int(MEETING_INTERVAL_S / step_s)))
        self._met_step, self._met, self._next_step = step, time.monotonic(), step + self._gap

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):
            for _ in range(numbers.count(signal.SIGTERM)):
                if self._asked:
                    os._exit(128 + signal.SIGTERM)
                self._asked = True

    def _leave_child(self) -> None:
        """A process that was forked off, as for loading data, must not answer for this one.

        Nor end before it: the launcher signals whole process groups, and the last steps need their data.
        """
        if self._pid == os.getppid():
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
