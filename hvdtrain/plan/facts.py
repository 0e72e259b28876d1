"""What a plan is made from, beside spec and hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain.fabric.models import HostFabric
from hvdtrain.fabric.routes import ChosenNetwork


@dataclass(frozen=True)
class NetworkFacts:
    """What the hosts can talk over.

    Attributes:
        fabrics: interfaces and adapters, by host.
        chosen: the IP network by which all hosts reach each other.
    """

    fabrics: Mapping[str, HostFabric]
    chosen: ChosenNetwork


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
        remote: names of the job's hosts that aren't this machine.
        nccl: whether Horovod carries GPU tensors by NCCL.
        network: what the hosts can talk over; None for this machine alone, or where it isn't known.
        dropped: hosts that were left out, and what each failed.
        host_order: where the order of the hosts comes from, if it isn't the user's.
    """

    python: str
    horovodrun: str
    controllers: tuple[str, ...]
    mpirun: str | None
    cores: int
    environment: Mapping[str, str]
    remote: frozenset[str] = frozenset()
    nccl: bool = False
    network: NetworkFacts | None = None
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    host_order: str = ""
