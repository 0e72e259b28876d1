"""What an autotuning run leaves for later ones."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from hvdtrain import contract
from hvdtrain.horovod.autotune import Found, effort, read_log, together
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.plan.tuned import Tuned, whole_mb, write_tuned
from hvdtrain.plan.tuning import TuningPlan
from hvdtrain.supervise.recorder import Recorder
from hvdtrain.supervise.run_directory import RunDirectory


def keep_log(plan: LaunchPlan, directory: RunDirectory, attempt: int) -> None:
    """Put autotune's log to those of its attempt: the next one would write over it."""
    if plan.tuning:
        # Not there: its rank 0 is on another host, or didn't come so far.
        with suppress(OSError):
            Path(plan.tuning.log).replace(directory.logs(attempt) / contract.AUTOTUNE_LOG)


def keep_best(plan: LaunchPlan, directory: RunDirectory, recorder: Recorder) -> None:
    """Write the best values of all attempts for later runs, and tell. Also after a failure: they were measured."""
    if plan.tuning is None:
        return
    # Those by another plan may be of other workers.
    logs = [
        directory.logs(attempt) / contract.AUTOTUNE_LOG for attempt in range(directory.planned_at, directory.attempts)
    ]
    logs = [log for log in logs if log.exists()]
    found = together(read_log(log.read_text(errors="replace")) for log in logs)
    if found is None:
        recorder.news("autotune_found_nothing", _why_nothing(plan, logged=bool(logs)))
        return
    tuned = _tuned(plan, plan.tuning, found)
    values = f"fusion_threshold_mb {tuned.fusion_threshold_mb}, cycle_time_ms {tuned.cycle_time_ms:g}"
    most = effort(plan.environment).settings
    searched = f"best of {found.samples}" if found.finished else f"best of {found.samples} so far, of about {most}"
    text = f"autotune: {values} ({searched}, {tuned.score_mb_per_s:g} MB/s)"
    try:
        write_tuned(Path(plan.tuning.file), tuned)
        text += f"; written to {plan.tuning.file}"
    except OSError as error:
        text += f"; can't write {plan.tuning.file}: {error.strerror}"
    recorder.news("autotuned", text, **tuned.model_dump(exclude={"job", "time"}))


def _tuned(plan: LaunchPlan, tuning: TuningPlan, found: Found) -> Tuned:
    best = found.best
    return Tuned(
        fusion_threshold_mb=whole_mb(best.fusion_threshold_mb),
        cycle_time_ms=round(best.cycle_time_ms, 3),
        score_mb_per_s=best.score_mb_per_s,
        samples=found.samples,
        finished=found.finished,
        processes=len(plan.placements),
        hosts=len(plan.hosts),
        network=tuning.network,
        time=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        job=plan.name,
    )


def _why_nothing(plan: LaunchPlan, *, logged: bool) -> str:
    first = plan.placements[0].host
    if not logged and first in plan.agents:
        return (
            f"autotune: rank 0 ran on {first}, and its log isn't here: "
            "keep the runs where all hosts see them (--runs), or put this machine first"
        )
    steps = effort(plan.environment)
    return (
        f"autotune: too short to find anything: the first setting is scored after about {steps.first} steps, "
        f"all {steps.settings} after {steps.whole}"
    )
