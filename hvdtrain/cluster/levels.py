"""The levels of validation; a level with measurements adds its findings to those of quick."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hvdtrain.cluster.models import Request
from hvdtrain.cluster.profiles.checks import check
from hvdtrain.cluster.profiles.models import Profile
from hvdtrain.cluster.progress import Progress
from hvdtrain.cluster.quick import Looked, quick
from hvdtrain.cluster.standard import full, standard
from hvdtrain.hosts.models import Host

Run = Callable[[Sequence[Host], Request, Progress], Looked]
LEVELS: Mapping[str, Run] = {"quick": quick, "standard": standard, "full": full}


def validate(
    level: str, hosts: Sequence[Host], request: Request, progress: Progress, profile: Profile | None = None
) -> Looked:
    """Validate the hosts, and hold them against a profile if there is one."""
    looked = LEVELS[level](hosts, request, progress)
    if profile is None:
        return looked
    findings = (*looked.report.findings, *check(profile, looked.evidence, looked.measured))
    return replace(looked, report=replace(looked.report, findings=findings, profile=profile.name))
