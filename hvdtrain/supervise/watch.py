"""Tells from the ranks' heartbeats, and from Horovod's own warnings, which rank hangs and which is slow."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field

from hvdtrain.heartbeat import Beat

# A rank is a straggler when its own part of a step takes so many times the median rank's, and so much longer.
_SLOW_FACTOR = 1.5
_SLOW_BY_S = 0.05
# Over so many seconds, so that one slow step doesn't make one.
_SLOW_WINDOW_S = 10.0
_STALL = "tensors were submitted to be reduced, gathered or broadcasted by subset of ranks"
_MISSING = re.compile(r"^\s*(\d+): \[(.*)\]\s*$")


@dataclass(frozen=True)
class Hang:
    """A job that doesn't go on.

    Attributes:
        rank: the one that keeps the others; None where none can be told from the rest.
        reason: what is known, one clause.
    """

    rank: int | None
    reason: str


@dataclass
class _Rank:
    beat: Beat = field(default_factory=Beat)
    state: str = ""
    changed_at: float = 0.0
    stopped_at: float | None = None
    # The window over which its speed is measured: when it began, and the beat then.
    window: tuple[float, Beat] | None = None
    busy_s: float | None = None


class Watch:
    """What is known of each rank's progress. Times are monotonic seconds.

    Args:
        size: number of ranks.
        hang_timeout_s: for how long a rank that has begun to train may show no progress; None: for ever.
    """

    def __init__(self, size: int, hang_timeout_s: float | None) -> None:
        self._ranks = [_Rank() for _ in range(size)]
        self._timeout_s = hang_timeout_s
        self._stalled_since: float | None = None
        self._stall_at = 0.0
        self._missing: dict[int, str] = {}

    def beat(self, rank: int, beat: Beat, state: str, now: float) -> None:
        """A worker has told what its rank is doing and in which state its command is."""
        known = self._ranks[rank]
        if beat.time != known.beat.time:
            known.changed_at = now
        known.beat, known.state = beat, state
        if state != "T":
            known.stopped_at = None
        elif known.stopped_at is None:
            known.stopped_at = now
        self._measure(known, now)

    def line(self, line: str, now: float) -> None:
        """A line of a rank's output: Horovod's coordinator writes there who doesn't join a collective."""
        if _STALL in line:
            # It repeats itself for as long as the stall lasts; after a pause it's another one.
            if self._stalled_since is None or now - self._stall_at > 2 * (self._timeout_s or 0) + 60:
                self._stalled_since = now
            self._stall_at = now
            self._missing = {}
        elif self._stall_at and (match := _MISSING.match(line)):
            self._missing[int(match[1])] = match[2]

    def hang(self, now: float) -> Hang | None:
        """The hang that has lasted for the timeout, if there is one."""
        if self._timeout_s is None:
            return None
        for number, rank in enumerate(self._ranks):
            if rank.stopped_at is not None and now - rank.stopped_at >= self._timeout_s:
                return Hang(number, f"its process is stopped (state T){_place(rank.beat)}")
        silent = [rank for rank in self._ranks if rank.beat.time and now - rank.changed_at >= self._timeout_s]
        if silent:
            return self._blame(now)
        if self._stalled_since is not None and self._stall_at - self._stalled_since >= self._timeout_s:
            return self._blame_missing()
        return None

    def lag(self, rank: int) -> float | None:
        """By how many seconds this rank's own part of a step is longer than the median rank's; None: as the others'."""
        busy = [known.busy_s for known in self._ranks if known.busy_s is not None]
        mine = self._ranks[rank].busy_s
        if mine is None or len(busy) < 2:
            return None
        others = statistics.median_low(busy)
        return mine - others if mine > _SLOW_FACTOR * others and mine - others > _SLOW_BY_S else None

    def last(self, rank: int) -> Beat:
        """The newest beat of a rank."""
        return self._ranks[rank].beat

    def newest(self) -> Beat:
        """The beat of the rank that is furthest; ranks of one job differ by a step at most."""
        return max((rank.beat for rank in self._ranks), key=lambda beat: (beat.step, beat.time))

    def _measure(self, rank: _Rank, now: float) -> None:
        """Seconds per step that the rank spends on its own, over the last window."""
        if rank.window is None or rank.beat.step < rank.window[1].step:
            rank.window = (now, rank.beat)
            return
        begun, before = rank.window
        steps = rank.beat.step - before.step
        if steps and now - begun >= _SLOW_WINDOW_S:
            waited = rank.beat.waited_s - before.waited_s
            if waited > 0:
                rank.busy_s = (rank.beat.time - before.time - waited) / steps
            rank.window = (now, rank.beat)

    def _blame(self, now: float) -> Hang:
        """The rank that the others wait for: one that isn't in a collective itself."""
        late = [
            (rank.beat.step, number)
            for number, rank in enumerate(self._ranks)
            if not rank.beat.waiting and (not rank.beat.time or now - rank.changed_at >= (self._timeout_s or 0))
        ]
        if late:
            _, number = min(late)
            return Hang(number, f"no progress for {self._timeout_s:g} s{_place(self._ranks[number].beat)}")
        if self._missing:
            return self._blame_missing()
        activity = self._ranks[0].beat.activity
        return Hang(None, f"no progress for {self._timeout_s:g} s, all ranks wait in '{activity}'")

    def _blame_missing(self) -> Hang:
        names = "; ".join(f"rank {rank}: {tensors}" for rank, tensors in sorted(self._missing.items()))
        rank = next(iter(sorted(self._missing)), None)
        return Hang(rank, f"the others wait in collectives that it didn't join ({names or 'see the log of rank 0'})")


def _place(beat: Beat) -> str:
    """Where in its training a rank is, to be put behind a clause; nothing for one without heartbeats."""
    if not beat.time:
        return ""
    doing = f", in '{beat.activity}'" if beat.activity else ""
    return f", after step {beat.step}{doing}"
