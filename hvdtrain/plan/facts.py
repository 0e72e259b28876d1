"""What a plan is made from, beside spec and hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """The launching machine, as `supervise.facts` finds it.

    Attributes:
        python: absolute path of the interpreter that runs hvdtrain; the workers' too.
        horovodrun: absolute path of Horovod's launcher, in the same environment.
        controllers: what Horovod was built with, of ``gloo`` and ``mpi``.
        mpirun: path of the ``mpirun`` on PATH, or None.
        cores: CPU cores that this process may use.
        environment: the launcher's own variables.
    """

    python: str
    horovodrun: str
    controllers: tuple[str, ...]
    mpirun: str | None
    cores: int
    environment: Mapping[str, str]
