"""Level quick: everything that can be known from the hosts' facts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.cluster.checks import fabric, files, gpus, machine, reach, software
from hvdtrain.cluster.gather import gather
from hvdtrain.cluster.measured import Measured
from hvdtrain.cluster.models import Evidence, Finding, Report, Request
from hvdtrain.cluster.progress import SILENT, Progress
from hvdtrain.hosts.models import Host

_SUBJECTS = (reach.check, software.check, files.check, machine.check, gpus.check, fabric.check)


@dataclass(frozen=True)
class Looked:
    """The report and what it was made from: a launch plans with the same facts, and a profile is held against them.

    Attributes:
        report: what was found.
        evidence: what the hosts told.
        measured: what was measured; None at a level without measurements, and where no host answered.
    """

    report: Report
    evidence: Evidence
    measured: Measured | None = None


def quick(hosts: Sequence[Host], request: Request, progress: Progress = SILENT) -> Looked:
    """Ask the hosts, and check what they say."""
    began, started = time.time(), time.monotonic()
    evidence = gather(hosts, request, progress)
    findings = judge(evidence)
    report = Report(began, time.monotonic() - started, "quick", evidence.names, findings)
    return Looked(report, evidence)


def judge(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings of level quick, in the order in which a fault is best looked for."""
    return tuple(finding for check in _SUBJECTS for finding in check(evidence))
