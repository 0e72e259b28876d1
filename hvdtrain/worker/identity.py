"""Which rank this process is, as horovodrun or mpirun told it."""

from __future__ import annotations

import os
from collections.abc import Mapping

_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_LOCAL_RANK = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank in the job; 0 where nobody started this process as one of several."""
    return _first(environment, _RANK)


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank among the workers of this host."""
    return _first(environment, _LOCAL_RANK)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> int:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), 0)
