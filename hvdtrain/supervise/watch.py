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
    # Seconds of its own in each step, over the last window.
    busy_s: float | None = None


class Watch:
    """What is known of each rank's progress. Times are monotonic seconds.

    Args:
        size: number of ranks.
        hang_timeout_s: for how long a rank that has begun to train may show no progress; None: for ever.
    """

    def __init__(self, size: int, hang_timeout_s: float | None) -> None:
        self._ranks = {rank: _Rank() for rank in range(size)}
        self._last = Beat()
        # The window over which the ranks' speed is measured, the same for all: when it began, and the beats then.
        self._window: tuple[float, dict[int, Beat]] | None = None
        self._timeout_s = hang_timeout_s
        self._stalled_since: float | None = None
        self._stall_at = 0.0
        self._missing: dict[int, str] = {}

    def join(self, rank: int) -> None:
        """A new worker has this number from now on."""
        self._ranks[rank] = _Rank()

    def leave(self, rank: int) -> None:
        """The worker of this number has ended, and the others go on without it."""
        self._last = self.newest()
        self._ranks.pop(rank, None)
        self._stalled_since = None

    def beat(self, rank: int, beat: Beat, state: str, now: float) -> None:
        """A worker has told what its rank is doing and in which state its command is."""
        known = self._ranks.get(rank)
        if known is None:
            return
        if beat.time != known.beat.time:
            known.changed_at = now
        if state != "T" or beat.time != known.beat.time:
            known.stopped_at = None
        elif known.stopped_at is None:
            known.stopped_at = now
        known.beat, known.state = beat, state
        self._measure(now)

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
        for number, rank in self._ranks.items():
            if rank.stopped_at is not None and now - rank.stopped_at >= self._timeout_s:
                return _stopped(number, rank)
        beats = [rank.beat for rank in self._ranks.values()]
        # How long data and model may take to be made is for the task to know.
        building = any(beat.time and not beat.steps and not beat.waiting for beat in beats)
        silent = [rank for rank in self._ranks.values() if rank.beat.time and now - rank.changed_at >= self._timeout_s]
        if silent and not building:
            return self._blame(now)
        if self._stalled_since is not None and self._stall_at - self._stalled_since >= self._timeout_s:
            return self._blame_missing()
        return None

    def lag(self, rank: int) -> float | None:
        """By how many seconds this rank's own part of a step is longer than the median rank's; None: as the others'."""
        busy = [known.busy_s for known in self._ranks.values() if known.busy_s is not None]
        mine = self._ranks[rank].busy_s if rank in self._ranks else None
        if mine is None or len(busy) < 2:
            return None
        others = statistics.median_low(busy)
        return mine - others if mine > _SLOW_FACTOR * others and mine - others > _SLOW_BY_S else None

    def last(self, rank: int) -> Beat:
        """The newest beat of a rank."""
        return self._ranks[rank].beat if rank in self._ranks else Beat()

    def newest(self) -> Beat:
        """The beat of the rank that is furthest; ranks of one job differ by a step at most."""
        beats = [rank.beat for rank in self._ranks.values()]
        return max(beats, key=lambda beat: (beat.step, beat.time), default=self._last)

    def _measure(self, now: float) -> None:
        """Seconds per step that each rank spends on its own, over the last window."""
        beats = {number: rank.beat for number, rank in self._ranks.items()}
        begun, before = self._window or (0.0, {})
        # From the first step on, and anew where ranks come and go or fall back.
        going = beats.keys() == before.keys() and all(beat.step >= before[rank].step for rank, beat in beats.items())
        if not going:
            self._window = (now, beats) if all(beat.step for beat in beats.values()) else None
        elif now - begun >= _SLOW_WINDOW_S and all(beat.step > before[rank].step for rank, beat in beats.items()):
            for number, beat in beats.items():
                waited = beat.waited_s - before[number].waited_s
                own = beat.time - before[number].time - waited
                self._ranks[number].busy_s = own / (beat.step - before[number].step) if waited > 0 else None
            self._window = (now, beats)

    def _blame(self, now: float) -> Hang:
        """The rank that the others wait for: one that is stopped, or that isn't in a collective itself."""
        for number, rank in self._ranks.items():
            if rank.stopped_at is not None:
                return _stopped(number, rank)
        late = [
            (rank.beat.step, number)
            for number, rank in self._ranks.items()
            if not rank.beat.waiting and (not rank.beat.time or now - rank.changed_at >= (self._timeout_s or 0))
        ]
        if late:
            _, number = min(late)
            return Hang(number, f"no progress for {self._timeout_s:g} s{_place(self._ranks[number].beat)}")
        if self._missing:
            return self._blame_missing()
        activity = self.newest().activity
        return Hang(None, f"no progress for {self._timeout_s:g} s, all ranks wait in '{activity}'")

    def _blame_missing(self) -> Hang:
        names = "; ".join(f"rank {rank}: {tensors}" for rank, tensors in sorted(self._missing.items()))
        rank = next(iter(sorted(self._missing)), None)
        return Hang(rank, f"the others wait in collectives that it didn't join ({names or 'see the log of rank 0'})")


def _stopped(number: int, rank: _Rank) -> Hang:
    return Hang(number, f"its process is stopped (state T){_place(rank.beat)}")


def _place(beat: Beat) -> str:
    """Where in its training a rank is, to be put behind a clause; nothing for one without heartbeats."""
    if not beat.time:
        return ""
    doing = f", in '{beat.activity}'" if beat.activity else ""
    return f", after step {beat.step}{doing}"
