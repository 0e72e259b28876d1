"""Gloo or MPI: who starts the workers, negotiates, and carries tensors that are in the CPU's memory."""

from __future__ import annotations

from hvdtrain.errors import StartError
from hvdtrain.plan.facts import Facts


def choose_controller(wanted: str, *, hosts: int, facts: Facts) -> tuple[str, str]:
    """The controller and the reason for it.

    ``auto`` follows measurements: on one host Open MPI's shared memory takes about half of Gloo's time
    (benchmarks/controllers.py); between two hosts over TCP at 400 Mbit/s Gloo reached 95% of the wire and Open MPI 53%.

    Raises:
        StartError: the wanted controller isn't built into Horovod, or can't run here.
    """
    reasons_against = {
        "mpi": _why_not_mpi(facts),
        "gloo": None if "gloo" in facts.controllers else "Horovod was built without Gloo",
    }
    if wanted != "auto":
        if reason := reasons_against[wanted]:
            raise StartError(f"controller '{wanted}' can't be used: {reason}", fix=_REMEDY[wanted])
        return wanted, "as the job spec says"
    preferred, why = ("mpi", "one host: MPI's shared memory is faster than Gloo") if hosts == 1 else (
        "gloo",
        "several hosts over TCP: Gloo is faster than MPI",
    )  # fmt: skip
    if not reasons_against[preferred]:
        return preferred, why
    other = "gloo" if preferred == "mpi" else "mpi"
    if reasons_against[other]:
        raise StartError(
            f"no controller can be used: {reasons_against['mpi']}; {reasons_against['gloo']}",
            fix=_REMEDY["gloo"],
        )
    return other, f"{reasons_against[preferred]}, which leaves {other}"


_REMEDY = {
    "mpi": "install Open MPI (Debian: openmpi-bin libopenmpi-dev), then run 'hvdtrain horovod build'",
    "gloo": "run 'hvdtrain horovod build'",
}


def _why_not_mpi(facts: Facts) -> str | None:
    if "mpi" not in facts.controllers:
        return "Horovod was built without MPI"
    if facts.mpirun is None:
        return "no mpirun on PATH"
    return None
