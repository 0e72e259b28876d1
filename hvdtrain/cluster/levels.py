"""The levels of validation; a level with measurements adds its findings to those of quick."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hvdtrain.cluster.gather import Progress
from hvdtrain.cluster.models import Report, Request
from hvdtrain.cluster.quick import quick
from hvdtrain.cluster.standard import standard
from hvdtrain.errors import UsageError
from hvdtrain.hosts.models import Host

Run = Callable[[Sequence[Host], Request, Progress], Report]


def _quick(hosts: Sequence[Host], request: Request, progress: Progress) -> Report:
    return quick(hosts, request, progress).report


LEVELS: Mapping[str, Run] = {"quick": _quick, "standard": standard}


def validate(level: str, hosts: Sequence[Host], request: Request, progress: Progress) -> Report:
    """Validate the hosts.

    Raises:
        UsageError: this version has no such level.
    """
    if level not in LEVELS:
        raise UsageError(f"this version has no measurements for level {level}", where="--level", fix="use quick")
    return LEVELS[level](hosts, request, progress)
