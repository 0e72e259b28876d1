"""Gloo or MPI: who starts the workers, negotiates, and carries tensors that are in the CPU's memory."""

from __future__ import annotations

from hvdtrain.errors import StartError
from hvdtrain.plan.facts import Facts


def choose_controller(
    wanted: str, *, hosts: int, facts: Facts, rdma: str | None = None, mpi_alone: str | None = None
) -> tuple[str, str]:
    """The controller and the reason for it.

    ``auto`` follows measurements: on one host Open MPI's shared memory takes about half of Gloo's time
    (benchmarks/controllers.py); between two hosts over TCP at 400 Mbit/s Gloo reached 95% of the wire and Open MPI 53%.
    Over RDMA only MPI carries CPU tensors; GPU tensors are NCCL's where Horovod has it.

    Args:
        wanted: ``auto``, ``mpi`` or ``gloo``.
        hosts: how many have a worker.
        facts: of the launching machine.
        rdma: the fabric that MPI would use on all hosts in the place of TCP, as people name it; None if there is none.
        mpi_alone: what the job asks for that works under MPI alone, as people name it; None if there is nothing.

    Raises:
        StartError: the wanted controller isn't built into Horovod, or can't run here.
    """
    reasons_against = {
        "mpi": _why_not_mpi(facts),
        "gloo": None if "gloo" in facts.controllers else "Horovod was built without Gloo",
    }
    if wanted != "auto":
        if reason := reasons_against[wanted]:
            raise StartError(f"controller '{wanted}' can't be used: {reason}", fix=_remedy(reason))
        return wanted, "as the job spec says"
    if mpi_alone:
        if reason := reasons_against["mpi"]:
            raise StartError(f"{mpi_alone} needs MPI, which can't be used: {reason}", fix=_remedy(reason))
        return "mpi", f"{mpi_alone} needs it"
    if hosts == 1:
        preferred, why = "mpi", "one host: MPI's shared memory is faster than Gloo"
    elif rdma and not facts.nccl:
        preferred, why = "mpi", f"all hosts have {rdma}, and Gloo would leave it for TCP"
    else:
        preferred, why = "gloo", "several hosts over TCP: Gloo is faster than MPI"
    if not reasons_against[preferred]:
        return preferred, why
    other = "gloo" if preferred == "mpi" else "mpi"
    if reasons_against[other]:
        raise StartError(
            f"no controller can be used: {reasons_against['mpi']}; {reasons_against['gloo']}",
            fix=_REBUILD,
        )
    return other, f"{reasons_against[preferred]}, which leaves {other}"


_REBUILD = "run 'hvdtrain horovod build'"
_NO_MPI = "Horovod was built without MPI"
_NO_MPIRUN = "no mpirun on PATH"


def _remedy(reason: str) -> str:
    return {
        _NO_MPI: f"install Open MPI (Debian: openmpi-bin libopenmpi-dev), then {_REBUILD}",
        _NO_MPIRUN: "install Open MPI again (Debian: openmpi-bin), or put the folder of its mpirun on PATH",
    }.get(reason, _REBUILD)


def _why_not_mpi(facts: Facts) -> str | None:
    if "mpi" not in facts.controllers:
        return _NO_MPI
    if facts.mpirun is None:
        return _NO_MPIRUN
    return None
