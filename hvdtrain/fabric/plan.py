"""Which fabric carries a job, and the settings that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import StartError
from hvdtrain.fabric import mpi, nccl
from hvdtrain.fabric.gloo import set_gloo
from hvdtrain.fabric.models import HostFabric
from hvdtrain.fabric.rdma import LackError, Rdma, find_efa, find_infiniband, find_roce
from hvdtrain.fabric.routes import ChosenNetwork
from hvdtrain.fabric.settings import FabricPlan, Settings

_SHOWN = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA", "tcp": "TCP"}
_OVER_TCP = "Gloo speaks TCP only"
# NCCL and UCX register hundreds of megabytes; distributions' defaults are 64 KiB to 8 MiB.
_ENOUGH_MEMLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class _Job:
    """What is asked, and who talks."""

    fabrics: Mapping[str, HostFabric]
    network: ChosenNetwork
    hcas: Sequence[str]
    is_mpi: bool
    nccl: bool

    @property
    def is_ipoib(self) -> bool:
        """Whether the chosen network itself runs on InfiniBand."""
        interfaces = [self.fabrics[host].interface(own.interface) for host, own in self.network.per_host.items()]
        return all(interface is not None and interface.kind == "infiniband" for interface in interfaces)


def plan_one_host(controller: str, already_set: Mapping[str, str]) -> FabricPlan:
    """The settings of a job of this machine alone: none but MPI's, which goes through shared memory.

    Args:
        controller: ``mpi`` or ``gloo``.
        already_set: variables that the user has set for the workers; they stay as they are.
    """
    settings = Settings((), already_set)
    if controller == "mpi":
        mpi.set_one_host(settings)
    return settings.plan("tcp")


def plan_fabric(
    *,
    fabric: str,
    hcas: Sequence[str],
    fabrics: Mapping[str, HostFabric],
    network: ChosenNetwork,
    controller: str,
    nccl: bool,
    already_set: Mapping[str, str],
) -> FabricPlan:
    """From what the hosts have to the fabric and its settings. Pure: the same input gives the same plan.

    Args:
        fabric: ``auto``, ``tcp``, ``infiniband`` or ``roce``. ``auto`` takes InfiniBand where every host has it, else
            RoCE, else EFA, else TCP, and only what something in the job can use.
        hcas: the only adapters (``mlx5_0``) and ports (``mlx5_0:1``) allowed; empty: all.
        fabrics: of the job's hosts, by name.
        network: the job's IP network.
        controller: ``mpi`` or ``gloo``.
        nccl: GPU tensors go over NCCL.
        already_set: variables that the user has set for the workers; they stay as they are.

    Raises:
        StartError: a host hasn't what was asked for, or nothing in the job can use it.
    """
    job = _Job({host: fabrics[host] for host in network.per_host}, network, hcas, controller == "mpi", nccl)
    settings = Settings(tuple(job.fabrics), already_set)
    kind, rdma = _choose(settings, job, fabric)
    for note in rdma.notes if rdma else ():
        settings.note(note)
    if job.nccl:
        _set_nccl(settings, job, kind, rdma)
    if job.is_mpi:
        _set_mpi(settings, job, kind, rdma)
    else:
        set_gloo(settings, network, job.fabrics)
        if kind != "tcp" or job.is_ipoib:
            carrier = "over InfiniBand's IP (IPoIB)" if job.is_ipoib else "over the network above"
            settings.note(f"{_OVER_TCP}: negotiation and CPU tensors go {carrier}")
    if rdma:
        _note_memlock(settings, job)
    return settings.plan(kind)


def rdma_for_mpi(
    *, fabric: str, hcas: Sequence[str], fabrics: Mapping[str, HostFabric], network: ChosenNetwork
) -> str | None:
    """What MPI would carry CPU tensors over in the place of TCP, as people name it; None: nothing, or not asked for.

    Takes what `plan_fabric` does.
    """
    try:
        made = plan_fabric(
            fabric=fabric,
            hcas=hcas,
            fabrics=fabrics,
            network=network,
            controller="mpi",
            nccl=False,
            already_set={},
        )
    except StartError:
        return None
    return None if made.kind == "tcp" else _SHOWN[made.kind]


def _choose(settings: Settings, job: _Job, asked: str) -> tuple[str, Rdma | None]:
    if asked == "tcp":
        settings.note("fabric TCP: as network.fabric says")
        return "tcp", None
    if asked != "auto":
        rdma = _asked_for(job, asked)
        settings.note(f"fabric {_SHOWN[asked]}: as network.fabric says")
        return asked, rdma
    if not any(fabric.hcas for fabric in job.fabrics.values()):
        settings.note("fabric TCP: no host has an RDMA adapter")
        return "tcp", None
    refusals = []
    has_efa = any(hca.is_efa for fabric in job.fabrics.values() for hca in fabric.hcas)
    for kind in ("infiniband", "roce", *(("efa",) if has_efa else ())):
        try:
            rdma = _find(job, kind)
        except LackError as lack:
            refusals.append(f"not {_SHOWN[kind]}: {lack}")
            continue
        if unused := _why_unused(job, kind):
            refusals.append(f"not {_SHOWN[kind]}: {unused[1]}")
            continue
        settings.note(f"fabric {_SHOWN[kind]}: every host has it")
        return kind, rdma
    settings.note("fabric TCP: nothing faster that all hosts have and the job can use")
    for refusal in refusals:
        settings.note(refusal)
    return "tcp", None


def _asked_for(job: _Job, kind: str) -> Rdma | None:
    """The ports of a fabric that the user asked for; StartError where it can't be."""
    try:
        rdma = _find(job, kind)
    except LackError as lack:
        raise StartError(f"network.fabric is {kind}, and {lack.found}", where=lack.host, fix=lack.fix) from None
    unused = _why_unused(job, kind)
    if unused and not (kind == "infiniband" and job.is_ipoib):
        raise StartError(
            f"network.fabric is {kind}, and nothing in this job can use it: {unused[1]}", where=unused[0], fix=unused[2]
        )
    return rdma


def _find(job: _Job, kind: str) -> Rdma | None:
    fabrics = tuple(job.fabrics.values())
    if kind == "infiniband":
        return find_infiniband(fabrics, job.hcas, nccl=job.nccl)
    if kind == "roce":
        return find_roce(fabrics, job.network, job.hcas, nccl=job.nccl)
    find_efa(fabrics)
    return None


def _why_unused(job: _Job, kind: str) -> tuple[str | None, str, str] | None:
    """Why neither NCCL nor MPI can use a fabric that is there: host, reason, fix. None if one of them can."""
    if kind == "efa":
        return _why_no_efa(job)
    if job.nccl:
        return None
    if not job.is_mpi:
        fix = "take controller: mpi with an Open MPI that has UCX, a Horovod with NCCL, or network.fabric: tcp"
        return None, f"{_OVER_TCP}, and Horovod has no NCCL here", fix
    lack = mpi.why_no_ucx(job.fabrics)
    return (lack[0], f"{lack[0]}: {lack[1]}", mpi.FIX_NO_UCX) if lack else None


def _why_no_efa(job: _Job) -> tuple[str | None, str, str] | None:
    if job.nccl:
        without = next((host for host, fabric in job.fabrics.items() if fabric.nccl_ofi is None), None)
        reason = f"{without}: NCCL can't use it without the plugin aws-ofi-nccl, which wasn't found"
        return (without, reason, "install it (AWS's deep-learning images have it)") if without else None
    if job.is_mpi and _has_ofi(job):
        return None
    return None, "without NCCL, only an Open MPI with libfabric (mtl ofi) on every host could use it", ""


def _has_ofi(job: _Job) -> bool:
    return all(fabric.open_mpi and "ofi" in fabric.open_mpi.mtl for fabric in job.fabrics.values())


def _set_nccl(settings: Settings, job: _Job, kind: str, rdma: Rdma | None) -> None:
    nccl.set_sockets(settings, job.network)
    if rdma:
        nccl.set_rdma(settings, rdma, job.fabrics)
    elif kind == "tcp":
        nccl.set_no_rdma(settings, job.fabrics)
    else:
        settings.variable("FI_PROVIDER", "efa", "NCCL's plugin aws-ofi-nccl talks to EFA with libfabric")


def _set_mpi(settings: Settings, job: _Job, kind: str, rdma: Rdma | None) -> None:
    lack = mpi.why_no_ucx(job.fabrics)
    if rdma and not lack:
        mpi.set_ucx(settings, rdma)
    elif kind == "efa" and _has_ofi(job):
        mpi.set_ofi(settings)
        if not job.nccl:
            settings.variable("FI_PROVIDER", "efa", "Open MPI talks to EFA with libfabric")
    else:
        why = "MPI over TCP"
        if rdma and lack:
            why = f"MPI over TCP, since UCX is missing ({lack[0]}: {lack[1]})"
        elif kind == "efa":
            why = "MPI over TCP, since Open MPI has no libfabric on every host"
        if job.nccl:
            why += "; NCCL carries the GPU tensors"
        mpi.set_tcp(settings, job.network, job.fabrics, why)
    mpi.set_contact(settings, job.network)


def _note_memlock(settings: Settings, job: _Job) -> None:
    low = {
        host: fabric.memlock_bytes
        for host, fabric in job.fabrics.items()
        if fabric.memlock_bytes is not None and 0 <= fabric.memlock_bytes < _ENOUGH_MEMLOCK_BYTES
    }
    if low:
        shown = ", ".join(f"{host} {limit >> 10} KiB" for host, limit in list(low.items())[:4])
        settings.note(
            f"warning: little memory may be pinned ({shown}{', …' if len(low) > 4 else ''}), and RDMA needs much: "
            "set memlock to unlimited in /etc/security/limits.d and for sshd"
        )
