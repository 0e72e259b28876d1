"""What a drill is to do, what it saw, and what came out, as types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdtrain.errors import StartError
from hvdtrain.plan.plan import LaunchPlan

PASS, FAIL, MEASURED, SKIPPED = "pass", "fail", "measured", "skipped"


@dataclass(frozen=True)
class Subject:
    """The job under drill.

    Attributes:
        plan: of its launch, without the drill's own settings.
        tells_steps: whether its ranks have heartbeats.
        rank: the rank that is hit.
        hang_timeout_s: the job's hang_timeout_s while a rank is stopped, in seconds.
        rate: what a slowed link lets through, as tc takes it.
    """

    plan: LaunchPlan
    tells_steps: bool
    rank: int
    hang_timeout_s: float
    rate: str = "50mbit"

    @property
    def host(self) -> str:
        """The host that is hit: the rank's, as planned."""
        return self.plan.placements[self.rank].host

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.plan.placements)


@dataclass(frozen=True)
class Limits:
    """The user's limits in seconds, by name of the fault; that of the empty name is for all that have none."""

    notice_s: Mapping[str, float] = field(default_factory=dict)
    recover_s: Mapping[str, float] = field(default_factory=dict)

    def notice(self, fault: str) -> float | None:
        """In which a fault must be noticed; None: any time."""
        return self.notice_s.get(fault, self.notice_s.get(""))

    def recover(self, fault: str) -> float | None:
        """In which it must be recovered from; None: any time."""
        return self.recover_s.get(fault, self.recover_s.get(""))


@dataclass(frozen=True)
class Blame:
    """What ``failure.json`` says of a fault.

    Attributes:
        attempt: the start of the job that failed, from 0.
        kind: as in ``failure.json``.
        rank: the rank at fault; None where it names none.
        host: its host, or the one that was lost; None where it names none.
    """

    attempt: int
    kind: str
    rank: int | None
    host: str | None = None


@dataclass(frozen=True)
class Seen:
    """What happened from a fault on. Times are seconds since the fault.

    Attributes:
        rank: the rank that was hit; None where none was.
        attempt: the start of the job that was hit, from 0.
        noticed_s: until the supervisor knew; None: never.
        recovered_s: until all was well again; None: never.
        recovery: what "well again" was, or why it never was.
        events: the supervisor's records from then on.
        blame: what ``failure.json`` names; None where there is none.
        summary: the supervisor's own sentence.
        exit_status: of the launch, where it ended by itself.
        called_slow: ranks that were said to be slow before the fault.
        left: processes of the job that outlived it, as command lines.
        host: the host that was hit; None where none was.
    """

    rank: int | None
    attempt: int
    noticed_s: float | None
    recovered_s: float | None
    recovery: str
    events: Sequence[dict[str, Any]] = ()
    blame: Blame | None = None
    summary: str = ""
    exit_status: int | None = None
    called_slow: tuple[int, ...] = ()
    left: tuple[str, ...] = ()
    host: str | None = None

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]


@dataclass(frozen=True)
class Result:
    """One fault's line in the report.

    Attributes:
        fault: its name.
        verdict: ``pass``, ``fail``, ``measured`` (nothing was wrong, and no limit was given) or ``skipped``.
        reasons: why it failed or was skipped.
        seen: what happened; None where nothing was done.
        max_notice_s, max_recover_s: the limits, in seconds.
        settings: what the drill set in the job's spec, as for ``--set``.
        run_directory: of the launch.
    """

    fault: str
    verdict: str
    reasons: tuple[str, ...] = ()
    seen: Seen | None = None
    max_notice_s: float | None = None
    max_recover_s: float | None = None
    settings: tuple[str, ...] = ()
    run_directory: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        seen = self.seen
        return {
            "fault": self.fault,
            "rank": seen.rank if seen else None,
            "host": seen.host if seen else None,
            "noticed_s": seen.noticed_s if seen else None,
            "max_notice_s": self.max_notice_s,
            "recovered_s": seen.recovered_s if seen else None,
            "max_recover_s": self.max_recover_s,
            "recovery": seen.recovery if seen else None,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "named": asdict(seen.blame) if seen and seen.blame else None,
            "summary": seen.summary if seen else "",
            "exit_status": seen.exit_status if seen else None,
            "settings": list(self.settings),
            "run_directory": self.run_directory,
        }


@dataclass(frozen=True)
class Report:
    """A drill's results, in the order of its faults.

    Attributes:
        job: its name.
        folder: where the drill's launches kept their files.
        results: one for each fault that the drill came to.
        error: why the drill couldn't go on; None where it did.
        signal: number of the signal that ended the drill; None where none did.
    """

    job: str
    folder: str
    results: tuple[Result, ...]
    error: StartError | None = None
    signal: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return {
            "job": self.job,
            "folder": self.folder,
            "complete": self.error is None and self.signal is None,
            "results": [result.to_json() for result in self.results],
        }
