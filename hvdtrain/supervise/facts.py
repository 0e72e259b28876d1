"""Looks at this machine for what a plan needs to know."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable

from hvdtrain.errors import StartError
from hvdtrain.horovod.installed import installed, mismatches
from hvdtrain.hosts.local import is_this_machine
from hvdtrain.hosts.models import Host
from hvdtrain.plan.facts import Facts
from hvdtrain.plan.tuned import Tuned, load_tuned
from hvdtrain.spec.models import JobSpec


def gather_facts(hosts: Iterable[Host] = ()) -> Facts:
    """The interpreter, its Horovod, the MPI on PATH, and which hosts are others. Starts no process.

    Raises:
        StartError: Horovod isn't installed, or doesn't fit the frameworks any more.
    """
    horovod = installed()
    if horovod is None:
        raise StartError("Horovod isn't installed", where=sys.executable, fix="run 'hvdtrain horovod build'")
    if faults := mismatches(horovod):
        raise StartError("; ".join(faults), where=sys.executable, fix="run 'hvdtrain horovod build'")
    return Facts(
        python=sys.executable,
        horovodrun=str(horovod.horovodrun),
        controllers=horovod.controllers,
        mpirun=shutil.which("mpirun"),
        cores=len(os.sched_getaffinity(0)),
        environment=dict(os.environ),
        nccl=horovod.nccl,
        remote=frozenset(host.name for host in hosts if not is_this_machine(host.name)),
    )


def read_tuned(spec: JobSpec) -> Tuned | None:
    """The tuned values that a job uses; None where it has none, searches them itself, or they aren't there yet.

    Raises:
        UsageError: the file that should have them is damaged, or another.
    """
    file = spec.horovod.tuned
    return None if spec.horovod.autotune or file is None or not file.exists() else load_tuned(file)
