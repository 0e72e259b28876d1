"""Whether a job coped with a fault: what was seen against what had to be, and against the user's limits."""

from __future__ import annotations

from hvdtrain.drill.faults import Fault
from hvdtrain.drill.models import FAIL, MEASURED, PASS, Limits, Result, Seen


def judge(fault: Fault, seen: Seen, limits: Limits) -> Result:
    """The fault's line in the report, without what the judgement doesn't depend on."""
    max_notice_s, max_recover_s = limits.notice(fault.name), limits.recover(fault.name)
    reasons = []
    if seen.noticed_s is None:
        reasons.append("it was never noticed")
    else:
        reasons += _too_late("noticed", seen.noticed_s, max_notice_s)
    reasons += fault.complaints(seen)
    if seen.recovered_s is None and seen.noticed_s is not None:
        reasons.append(f"it never recovered: {seen.recovery}")
    elif seen.recovered_s is not None:
        reasons += _too_late("recovered", seen.recovered_s, max_recover_s)
    if seen.left:
        reasons.append(f"processes were left: {'; '.join(seen.left)}")
    limited = max_notice_s is not None or max_recover_s is not None
    verdict = FAIL if reasons else PASS if limited else MEASURED
    return Result(fault.name, verdict, tuple(reasons), seen, max_notice_s, max_recover_s)


def _too_late(what: str, seconds: float, limit: float | None) -> list[str]:
    return [f"{what} after {seconds:.1f} s, limit {limit:g} s"] if limit is not None and seconds > limit else []
