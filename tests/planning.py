"""What plans are made from in the tests that make many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.hosts.models import Host
from hvdtrain.plan.facts import Facts
from hvdtrain.plan.plan import LaunchPlan, make_plan
from hvdtrain.plan.tuned import Tuned
from hvdtrain.spec.models import JobSpec

FACTS = Facts(
    python="/env/bin/python",
    horovodrun="/env/bin/horovodrun",
    controllers=("gloo", "mpi"),
    mpirun="/usr/bin/mpirun",
    cores=8,
    environment={"PATH": "/usr/bin:/bin"},
)


def plan_on(job: JobSpec, *slots: int, tuned: Tuned | None = None, **facts: Any) -> LaunchPlan:
    """The plan on hosts of so many slots, of which the first is this machine, where these facts are others."""
    where = [Host(name=f"node{number}", slots=count) for number, count in enumerate(slots, 1)]
    remote = frozenset(host.name for host in where[1:])
    return make_plan(job, where, replace(FACTS, **({"remote": remote} | facts)), Path("/runs/1"), tuned=tuned)
