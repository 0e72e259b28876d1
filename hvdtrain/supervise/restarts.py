"""Whether a run that has failed begins again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import ExitStatus

_SURVIVABLE = frozenset({ExitStatus.TRAINING_FAILED, ExitStatus.LOST, ExitStatus.HUNG, ExitStatus.CANNOT_START})
# A cluster that needs longer than this to recover needs a person.
MAX_BACKOFF_S = 300.0


@dataclass(frozen=True)
class AttemptEnd:
    """How one start of the job ended.

    Attributes:
        status: as `hvdtrain launch` would end with.
        step: steps that were done by then, since the job's first start; 0 where none was or nobody tells.
        failure: what failed, in words that are the same when the same happens again; empty for what comes from outside,
            as a SIGKILL does.
    """

    status: ExitStatus
    step: int
    failure: str


@dataclass(frozen=True)
class Decision:
    """Begin again after ``wait_s`` seconds, or not at all (None), and why."""

    wait_s: float | None
    why: str


def decide(ends: Sequence[AttemptEnd], *, maximum: int, backoff_s: float) -> Decision:
    """What follows from the ends of all attempts so far, the last of which failed.

    A fault of the task comes again at the same step: then another attempt changes nothing. Waiting times double.
    """
    last = ends[-1]
    if last.status not in _SURVIVABLE or (last.status is ExitStatus.CANNOT_START and len(ends) == 1):
        return Decision(None, "")
    if maximum == 0:
        return Decision(None, "")
    if len(ends) > maximum:
        return Decision(None, f"not started again: restarts.max is {maximum}")
    if len(ends) > 1 and last.failure and last.step <= ends[-2].step and last.failure == ends[-2].failure:
        where = f"at step {last.step}" if last.step else "before its first step"
        return Decision(None, f"not started again: it failed {where} twice, in the same way")
    wait_s = min(backoff_s * 2 ** (len(ends) - 1), max(backoff_s, MAX_BACKOFF_S))
    return Decision(wait_s, f"starting again in {wait_s:g} s (restart {len(ends)} of {maximum})")
