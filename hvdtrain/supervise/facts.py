"""Looks at this machine for what a plan needs to know."""

from __future__ import annotations

import os
import shutil
import sys

from hvdtrain.errors import StartError
from hvdtrain.horovod.installed import installed, mismatches
from hvdtrain.plan.facts import Facts


def gather_facts() -> Facts:
    """The interpreter, its Horovod, and the MPI on PATH. Imports no framework and starts no process.

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
    )
