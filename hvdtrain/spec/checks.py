"""What a spec can't ask for at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvdtrain.spec.models import Elastic, HorovodSettings, JobSpec, Parallelism
from hvdtrain.spec.yaml_reader import KeyPath

# Keys of `horovod` and the variable that says the same.
HOROVOD_VARIABLES = (
    ("fusion_threshold_mb", "HOROVOD_FUSION_THRESHOLD"),
    ("cycle_time_ms", "HOROVOD_CYCLE_TIME"),
    ("autotune", "HOROVOD_AUTOTUNE"),
    ("autotune", "HOROVOD_AUTOTUNE_LOG"),
    ("hierarchical_allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
)
_ADASUM_MB = 2048
# Names may come from `${...}`, so they're not shown.
_TWICE = "this variable is in env.{} too: keep it in one of them"


def contradictions(spec: JobSpec, given: Callable[[KeyPath], bool]) -> Iterator[tuple[KeyPath, str]]:
    """Each contradiction, with the path of the key that should go.

    Args:
        spec: the spec; faulty values have been left out of it.
        given: whether the user gave a key, faulty or not.
    """
    yield from _what_runs(spec, given)
    if spec.hosts.file and spec.hosts.list:
        yield ("hosts", "list"), "give either hosts.file or hosts.list, not both"
    yield from _elastic(spec, given)
    if spec.network.hcas and spec.network.fabric == "tcp":
        yield ("network", "hcas"), "network.fabric is tcp, which uses no InfiniBand or RoCE adapter"
    yield from _parallelism(spec, given)
    yield from _horovod(spec)
    if spec.horovod.adasum:
        yield from _adasum(spec)
    yield from _variables(spec)


def _what_runs(spec: JobSpec, given: Callable[[KeyPath], bool]) -> Iterator[tuple[KeyPath, str]]:
    if not given(("task",)) and not given(("command",)):
        yield (), "nothing to run: give 'task' or 'command'"
    if given(("task",)) and given(("command",)):
        yield ("command",), "give either task or command, not both"
    elif given(("command",)):
        if spec.options:
            yield ("options",), "options are a task's: a command takes its arguments in its list"
        if given(("checkpoint",)):
            yield ("checkpoint",), "checkpoint is for a task: a command saves for itself"
        if spec.horovod.compression != "none":
            yield ("horovod", "compression"), "compression is for a task: a command compresses for itself"
        if spec.horovod.adasum:
            yield ("horovod", "adasum"), "adasum is for a task: a command passes op=hvd.Adasum for itself"


def _elastic(spec: JobSpec, given: Callable[[KeyPath], bool]) -> Iterator[tuple[KeyPath, str]]:
    elastic = spec.elastic
    if elastic.min is None:
        if elastic != Elastic() and not given(("elastic", "min")):
            yield ("elastic",), "an elastic job needs elastic.min, the least number of workers that it goes on with"
        return
    if elastic.max is not None and elastic.max < elastic.min:
        yield ("elastic", "max"), "elastic.max is less than elastic.min"
    if spec.controller == "mpi":
        yield ("controller",), "an elastic job needs Gloo: leave controller out, or give gloo"
    if spec.processes is not None and spec.processes < elastic.min:
        yield ("processes",), "processes, with which the job starts, is less than elastic.min"
    if spec.processes is not None and elastic.max is not None and spec.processes > elastic.max:
        yield ("processes",), "processes, with which the job starts, is more than elastic.max"


def _parallelism(spec: JobSpec, given: Callable[[KeyPath], bool]) -> Iterator[tuple[KeyPath, str]]:
    divided = spec.parallelism
    degrees = {axis: getattr(divided, axis) for axis in ("tensor", "pipeline", "embedding")}
    shared = [axis for axis, degree in degrees.items() if degree > 1]
    if spec.elastic.min is not None:
        # A lost process would take its part of the model with it. A restart reads it from the checkpoint.
        held = [*shared, *(["shard_optimizer"] if divided.shard_optimizer else [])]
        for axis in held:
            yield (
                ("parallelism", axis),
                (
                    f"in an elastic job each process needs the whole model, and parallelism.{axis} gives it a part: "
                    "take 'elastic' out; a restart goes on from the checkpoint"
                ),
            )
    if divided.pipeline == 1:
        for key in ("schedule", "cut_by", "recompute"):
            if getattr(divided, key) != getattr(Parallelism(), key):
                yield ("parallelism", key), f"parallelism.{key} is a pipeline's, and parallelism.pipeline is 1"
    if given(("command",)) and not given(("task",)):
        for key in ("shard_optimizer", "micro_batches", "schedule", "cut_by", "recompute"):
            if getattr(divided, key) != getattr(Parallelism(), key):
                yield ("parallelism", key), f"parallelism.{key} is for a task: a command does it for itself"
    if divided.shard_optimizer and spec.horovod.compression not in ("none", "auto"):
        yield (
            ("horovod", "compression"),
            (
                "gradients that are reduced to shards (parallelism.shard_optimizer) travel uncompressed: "
                "take compression out, or the sharding"
            ),
        )


def _horovod(spec: JobSpec) -> Iterator[tuple[KeyPath, str]]:
    settings = spec.horovod
    if settings.autotune and settings.fusion_threshold_mb is not None and settings.cycle_time_ms is not None:
        yield (
            ("horovod", "autotune"),
            "autotune has nothing to search: fusion_threshold_mb and cycle_time_ms are both given",
        )
    if spec.controller == "gloo" or spec.elastic.min is not None:
        if spec.elastic.min is not None:
            why, other = "an elastic job runs under Gloo", "'elastic'"
        else:
            why, other = "controller is gloo", "'controller'"
        for key in ("hierarchical_allreduce", "adasum"):
            if getattr(settings, key):
                yield ("horovod", key), f"{key} needs MPI, and {why}: leave out {other} or horovod.{key}"


def _adasum(spec: JobSpec) -> Iterator[tuple[KeyPath, str]]:
    settings, divided = spec.horovod, spec.parallelism
    if spec.processes is not None and not is_power_of_two(spec.processes):
        yield (
            ("processes",),
            f"horovod.adasum combines gradients in pairs: give a power of two (2, 4, 8, …), not {spec.processes}",
        )
    if settings.compression != "none":
        yield (
            ("horovod", "compression"),
            "gradients that adasum combines travel uncompressed: take compression out, or adasum",
        )
    if (settings.fusion_threshold_mb or 0) >= _ADASUM_MB:
        yield (
            ("horovod", "fusion_threshold_mb"),
            f"Horovod's Adasum counts the bytes of its buffer in 31 bits: give less than {_ADASUM_MB}",
        )
    shared = [axis for axis in ("tensor", "pipeline", "embedding") if getattr(divided, axis) > 1]
    for key in [*shared, *(["shard_optimizer"] if divided.shard_optimizer else [])]:
        yield (
            ("horovod", "adasum"),
            f"adasum combines whole gradients of all processes, and parallelism.{key} gives each a part: take one out",
        )


def is_power_of_two(processes: int) -> bool:
    """Whether Adasum can combine the gradients of so many processes (1 and more)."""
    return processes & (processes - 1) == 0


def _variables(spec: JobSpec) -> Iterator[tuple[KeyPath, str]]:
    env = spec.env
    for index, name in enumerate(env.forward):
        if name in env.set:
            yield ("env", "forward", index), f"env.forward[{index}]: {_TWICE.format('set')}"
    for index, name in enumerate(env.secrets):
        for other, names in (("set", env.set), ("forward", env.forward)):
            if name in names:
                yield ("env", "secrets", index), f"env.secrets[{index}]: {_TWICE.format(other)}"
    for key, variable in HOROVOD_VARIABLES:
        if variable in env.set and getattr(spec.horovod, key) != getattr(HorovodSettings(), key):
            yield ("env", "set", variable), f"horovod.{key} sets {variable} already: keep one of them"
