"""Horovod's own settings as horovodrun's arguments: the spec's, tuned ones, or a search for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain import contract
from hvdtrain.plan.tuned import VALUES, Tuned
from hvdtrain.plan.words import plural
from hvdtrain.spec.checks import HOROVOD_VARIABLES
from hvdtrain.spec.models import HorovodSettings

_VARIABLES = {key: variable for key, variable in HOROVOD_VARIABLES if key in VALUES}
# Autotune would search these too, beginning with the response cache off. What it finds has to fit later runs, which
# have Horovod's defaults, and the search is many times shorter.
_HELD_BY_AUTOTUNE = {
    "HOROVOD_CACHE_CAPACITY": "1024",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    "HOROVOD_TORUS_ALLREDUCE": "0",
}


@dataclass(frozen=True)
class TuningPlan:
    """Where autotune's results go.

    Attributes:
        log: path of Horovod's log, on the host of rank 0.
        file: path of the file that gets the best values.
        network: fabric and subnets of the run; None for one host, or where it isn't known.
    """

    log: str
    file: str
    network: str | None


@dataclass(frozen=True)
class Chosen:
    """Horovod's settings of a launch.

    Attributes:
        arguments: horovodrun's.
        environment: variables that go with them, where the user hasn't set them.
        tuning: None without autotune.
        reasons: where the values come from, one sentence each.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    tuning: TuningPlan | None
    reasons: tuple[str, ...]


def choose_settings(
    settings: HorovodSettings,
    tuned: Tuned | None,
    environment: Mapping[str, str],
    run_directory: Path,
    *,
    counts: Sequence[int],
    network: str | None,
) -> Chosen:
    """From the spec, and the values that an earlier run found, to what horovodrun is told.

    Args:
        settings: of the spec.
        tuned: what ``settings.tuned`` has; None where that isn't there.
        environment: the workers' variables; those that the user set come before tuned values.
        run_directory: gets autotune's log.
        counts: of processes, on each host that has some.
        network: between the hosts, as people name it.
    """
    if settings.autotune:
        file = settings.tuned or run_directory / contract.TUNED_FILE
        tuning = TuningPlan(str(run_directory / contract.AUTOTUNE_LOG), str(file), network)
        arguments = (*_arguments(settings), "--autotune", "--autotune-log-file", tuning.log)
        # The spec's own word on it is an argument.
        held = {name: value for name, value in _HELD_BY_AUTOTUNE.items() if not _says(settings, name)}
        return Chosen(arguments, held, tuning, (f"autotune: the best values are written to {file}",))
    reasons: list[str] = []
    if settings.tuned and tuned is None:
        reasons.append(f"horovod.tuned: {settings.tuned} isn't there yet: run once with horovod.autotune: true")
    if tuned is not None:
        settings, reasons = _with_tuned(settings, tuned, environment, counts)
    return Chosen(_arguments(settings), {}, None, tuple(reasons))


def without_effect(settings: HorovodSettings, *, controller: str, nccl: bool, counts: Sequence[int]) -> list[str]:
    """Why hierarchical allreduce changes nothing, or is slow, where it was asked for; empty where all is well.

    Horovod registers it for GPU tensors with NCCL under MPI alone, and ignores it on one host
    (``horovod/common/operations.cc``).
    """
    if not settings.hierarchical_allreduce:
        return []
    if settings.adasum:
        why = "gradients are combined by Adasum, in steps of its own"
    elif len(counts) == 1:
        why = "all processes are on one host"
    elif not nccl:
        why = "Horovod was built without NCCL, and only GPU tensors are reduced so"
    elif controller != "mpi":
        why = "Horovod does it under MPI alone: give controller: mpi"
    elif len(set(counts)) > 1:
        return [
            "hierarchical_allreduce: hosts have different numbers of processes, so in each one does all the sending"
        ]
    else:
        return []
    return [f"hierarchical_allreduce has no effect: {why}"]


def _arguments(settings: HorovodSettings) -> tuple[str, ...]:
    arguments: list[str] = []
    if settings.fusion_threshold_mb is not None:
        arguments += ["--fusion-threshold-mb", str(settings.fusion_threshold_mb)]
    if settings.cycle_time_ms is not None:
        arguments += ["--cycle-time-ms", str(settings.cycle_time_ms)]
    if settings.hierarchical_allreduce is not None:
        arguments.append(
            "--hierarchical-allreduce" if settings.hierarchical_allreduce else "--no-hierarchical-allreduce"
        )
    return tuple(arguments)


def _says(settings: HorovodSettings, variable: str) -> bool:
    return variable == "HOROVOD_HIERARCHICAL_ALLREDUCE" and settings.hierarchical_allreduce is not None


def _with_tuned(
    settings: HorovodSettings, tuned: Tuned, environment: Mapping[str, str], counts: Sequence[int]
) -> tuple[HorovodSettings, list[str]]:
    """The settings with tuned values where nobody gave one, and where each comes from."""
    taken, reasons = {}, []
    for key in VALUES:
        value, own, variable = getattr(tuned, key), getattr(settings, key), _VARIABLES[key]
        if own is not None:
            reasons.append(f"{key} {own:g} as the job spec says; {settings.tuned} has {value:g}")
        elif variable in environment:
            reasons.append(f"{key} as the environment's {variable} says; {settings.tuned} has {value:g}")
        else:
            taken[key] = value
            reasons.append(f"{key} {value:g} from {settings.tuned}{_how_good(tuned)}")
    measured, now = (tuned.processes, tuned.hosts), (sum(counts), len(counts))
    if taken and any(one is not None and one != other for one, other in zip(measured, now, strict=True)):
        reasons.append(
            f"{settings.tuned} was measured with {_size(*measured)}, and this job has {_size(*now)}: "
            "autotune again for values of its own"
        )
    return settings.model_copy(update=taken), reasons


def _how_good(tuned: Tuned) -> str:
    if tuned.samples is None:
        return ""
    return f" (best of {plural(tuned.samples, 'setting')}{'' if tuned.finished else ', a search that was cut short'})"


def _size(processes: int | None, hosts: int | None) -> str:
    known = [(processes, "process"), (hosts, "host")]
    return " on ".join(plural(count, noun) for count, noun in known if count is not None)
