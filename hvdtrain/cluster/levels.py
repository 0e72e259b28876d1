"""The levels of validation; a level with measurements adds its findings to those of quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdtrain.cluster.models import Level, Request
from hvdtrain.cluster.progress import Progress
from hvdtrain.cluster.quick import Looked, quick
from hvdtrain.hosts.models import Host

if TYPE_CHECKING:
    from hvdtrain.cluster.profiles.models import Profile


def validate(
    level: Level, hosts: Sequence[Host], request: Request, progress: Progress, profile: Profile | None = None
) -> Looked:
    """Validate the hosts, and hold them against a profile if there is one."""
    looked = _look(level, hosts, request, progress)
    if profile is None:
        return looked
    from hvdtrain.cluster.profiles.checks import check

    findings = (*looked.report.findings, *check(profile, looked.evidence, looked.measured))
    return replace(looked, report=replace(looked.report, findings=findings, profile=profile.name))


def _look(level: Level, hosts: Sequence[Host], request: Request, progress: Progress) -> Looked:
    if level == "quick":
        return quick(hosts, request, progress)
    # What only measurements need takes as long to load as quick takes on a few hosts.
    from hvdtrain.cluster.standard import full, standard

    return {"standard": standard, "full": full}[level](hosts, request, progress)
