"""A launch from its plan to its exit status."""

from __future__ import annotations

import time
from pathlib import Path

from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.spec.loader import resolved_yaml
from hvdtrain.spec.models import JobSpec
from hvdtrain.supervise.console import Console
from hvdtrain.supervise.preflight import check_before_start
from hvdtrain.supervise.run_directory import RunDirectory
from hvdtrain.supervise.supervisor import Supervisor


def launch(spec: JobSpec, plan: LaunchPlan) -> int:
    """Check, make the run directory, run, and tell how it ended.

    Raises:
        StartError: something that the job needs isn't there; nothing was started.
    """
    check_before_start(spec, plan)
    directory = RunDirectory(Path(plan.run_directory))
    directory.create(resolved_yaml(spec), plan.to_json())
    console = Console(len(plan.placements))
    console.message(f"{plan.name}: {'; '.join(plan.reasons)}")
    started = time.monotonic()
    outcome = Supervisor(plan, directory, console).run()
    for line in outcome.evidence:
        console.message(f"  {line}")
    console.message(f"{outcome.summary} after {time.monotonic() - started:.1f} s; run directory: {directory.path}")
    return int(outcome.status)
