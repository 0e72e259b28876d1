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
