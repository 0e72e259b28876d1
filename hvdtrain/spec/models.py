"""The job spec as a typed model. Its descriptions make the reference page and the editors' JSON Schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A mapping of the spec: unknown keys are refused, values are never guessed at."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Hosts(Section):
    """Where to run. Without it: this machine, with a slot for each GPU, or for each core where it has no GPU."""

    file: Path | None = None
    """Hostfile, relative to the spec's folder."""

    list: tuple[str, ...] = ()
    """Hosts in place of a file, as in a hostfile: `node[01-04]:8`, `[fe80::1]:2`, `user@gpu7 slots=4`."""

    include: tuple[str, ...] = ()
    """Only these of the hosts (names or ranges)."""

    exclude: tuple[str, ...] = ()
    """All of the hosts but these (names or ranges)."""


class Environment(Section):
    """Which environment variables reach the workers, beside the documented base."""

    set: dict[str, str] = {}
    """Variables and their values, unchanged by any shell."""

    forward: tuple[str, ...] = ()
    """Variables passed on from the launcher's own environment; `HF_*` stands for all that match."""

    secrets: tuple[str, ...] = ()
    """The same, for values that must appear on no command line, in no log, plan or run directory."""


class Checkpoint(Section):
    """What a task's rank 0 saves. A `command` saves for itself."""

    every_steps: Annotated[int, Field(ge=1)] | None = 100
    """Steps between two checkpoints; null: only at the end."""

    keep: Annotated[int, Field(ge=1)] = 3
    """How many of the newest checkpoints are kept."""


class HorovodSettings(Section):
    """How Horovod reduces. null leaves Horovod's own default."""

    fusion_threshold_mb: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Size of the tensor fusion buffer, in MB; 0 turns fusion off. Horovod's default is 128."""

    cycle_time_ms: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Time between two rounds of negotiation, in milliseconds. Horovod's default is 1."""

    compression: Literal["none", "fp16"] = "none"
    """Gradients on the wire, for a `task`. fp16 helps on a slow link and hurts on a CPU with a fast one."""

    autotune: bool = False
    """Let Horovod search fusion threshold and cycle time while it trains."""


class JobSpec(Section):
    """One training job."""

    name: Annotated[str, Field(min_length=1, max_length=100)] = ""
    """Name of the job and of its folder under `runs/`. Default: the spec's file name."""

    task: str | None = None
    """`module:Class` of a training task. Either this or `command`."""

    command: tuple[str, ...] | None = None
    """Program and arguments of every worker, a list, never a shell line. Either this or `task`."""

    options: dict[str, Any] = {}
    """The task's options, such as `epochs`, `batch_size` (samples per worker and step) and `lr`."""

    directory: Path | None = None
    """Working directory of the workers. Default: the spec's folder."""

    processes: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """How many workers. Default: every slot of the hosts."""

    oversubscribe: bool = False
    """Allow more workers than slots."""

    hosts: Hosts = Hosts()
    """Where to run."""

    controller: Literal["auto", "mpi", "gloo"] = "auto"
    """Who starts the workers and carries CPU tensors. auto: MPI on one host where it is built, else Gloo."""

    env: Environment = Environment()
    """Environment of the workers."""

    checkpoint: Checkpoint = Checkpoint()
    """What a task saves, and when."""

    horovod: HorovodSettings = HorovodSettings()
    """Horovod's own settings."""
