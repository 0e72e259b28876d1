"""The job spec as a typed model. Its descriptions make the reference page and the editors' JSON Schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hvdtrain.spec.fields import (
    CHOICE,
    NUMBER,
    OPTIONAL_BOOLEAN,
    SECTION,
    WHOLE_NUMBER,
    AnyValue,
    Boolean,
    Command,
    Interpreter,
    JobName,
    OptionalPath,
    OptionalText,
    TaskName,
    Text,
    VariableName,
    VariablePattern,
    whole_number_or,
)


class Section(BaseModel):
    """A mapping of the spec: unknown keys are refused, values are never guessed at."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Hosts(Section):
    """Where to run. Without it: this machine, with a slot for each GPU, or for each core where it has no GPU."""

    file: OptionalPath = None
    """Hostfile, relative to the spec's folder. Either this or `hosts.list`."""

    list: tuple[Text, ...] = ()
    """Hosts in place of a file, as in a hostfile: `node[01-04]:8`, `[fe80::1]:2`, `user@gpu7 slots=4`."""

    include: tuple[Text, ...] = ()
    """Only these of the hosts (names or ranges)."""

    exclude: tuple[Text, ...] = ()
    """All of the hosts but these (names or ranges)."""

    drop_failing: Boolean = False
    """Go on without hosts that fail their check (`validate`), if those that are left have enough slots."""


class Ssh(Section):
    """How hosts are reached, where your own ssh configuration doesn't say it. No password is ever asked for."""

    user: OptionalText = None
    """Login name; one that a hostfile gives a host comes first. null: as ssh itself decides."""

    port: Annotated[Annotated[int, Field(ge=1, le=65535)] | None, WHOLE_NUMBER] = None
    """Port of the hosts' sshd. null: as ssh itself decides."""

    identity_file: OptionalPath = None
    """Private key, relative to the spec's folder. null: as ssh itself decides."""

    config: OptionalPath = None
    """ssh configuration in the place of your own, relative to the spec's folder."""


class Network(Section):
    """What the workers talk over. docs/networks.md says what is chosen and set."""

    fabric: Annotated[Literal["auto", "tcp", "infiniband", "roce"], CHOICE] = "auto"
    """Kind of network. auto: the best that all hosts have. One that a host lacks is an error, never replaced."""

    interfaces: tuple[Text, ...] = ()
    """Only these interfaces, by name (`eth1`) or network (`10.1.0.0/16`). Empty: chosen by what reaches all hosts."""

    hcas: tuple[Text, ...] = ()
    """Only these InfiniBand or RoCE adapters (`mlx5_0`, `mlx5_1:1`). Empty: chosen."""

    rank_order: Annotated[Literal["given", "measured"], CHOICE] = "given"
    """Order of the hosts in the ring. measured: links are measured first, and slow ones crossed as seldom as can be."""


class Environment(Section):
    """Which environment variables reach the workers, beside the documented base."""

    set: Annotated[dict[VariableName, Text], SECTION] = {}
    """Variables and their values, unchanged by any shell. Numbers need no quotes and arrive as written."""

    forward: tuple[VariablePattern, ...] = ()
    """Variables passed on from the launcher's own environment; `HF_*` stands for all that match."""

    secrets: tuple[VariableName, ...] = ()
    """The same, each by its name, for values that must appear on no command line, in no log, plan or run directory."""


class Checkpoint(Section):
    """What a task saves. A `command` saves for itself."""

    every_steps: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"] | None, whole_number_or("auto", null=True)] = (
        100
    )
    """Steps between two checkpoints; auto: chosen from a save's cost and the run's failures; null: only at the end."""

    keep: Annotated[int, Field(ge=1), WHOLE_NUMBER] = 3
    """How many of the newest checkpoints are kept."""


class Restarts(Section):
    """When the job begins again after a failure. A `task` goes on from its newest whole checkpoint."""

    max: Annotated[Annotated[int, Field(ge=0, le=1000)] | None, WHOLE_NUMBER] = None
    """How often. null: 3 for a `task`, 0 for a `command`. What fails twice at the same step isn't tried again."""

    backoff_s: Annotated[Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)], NUMBER] = 5.0
    """Seconds before the first restart; they double with each, to 300 or to this if it is more."""


class Elastic(Section):
    """Going on with fewer workers, or more, without a new start. On when `elastic.min` is given; it needs Gloo."""

    min: Annotated[Annotated[int, Field(ge=1, le=100_000)] | None, WHOLE_NUMBER] = None
    """At least so many workers: with fewer the job waits. null: no elastic job."""

    max: Annotated[Annotated[int, Field(ge=1, le=100_000)] | None, WHOLE_NUMBER] = None
    """At most so many workers. null: `processes`, or else as many as the hosts have slots at the time."""

    batch: Annotated[Literal["keep_per_worker", "keep_global"], CHOICE] = "keep_per_worker"
    """What a task keeps at a resize: each worker's batch, with the rate scaled anew, or global batch and rate."""

    discovery: Command = None
    """Program and arguments that print the hosts of the moment, as in a hostfile. null: the hostfile is read again."""

    cooldown_s: Annotated[Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)], NUMBER] = 10.0
    """Seconds before a failed slot gets a worker again; they double with each failure in a row, up to eight times."""

    timeout_s: Annotated[Annotated[int, Field(ge=1, le=604_800)], WHOLE_NUMBER] = 600
    """Seconds that the job waits for `elastic.min` workers before it ends."""


class HorovodSettings(Section):
    """How Horovod reduces. null leaves Horovod's own default."""

    fusion_threshold_mb: Annotated[Annotated[int, Field(ge=0, le=4096)] | None, WHOLE_NUMBER] = None
    """Size of the tensor fusion buffer, in MB; 0 turns fusion off. Horovod's default is 128; a PyTorch task's is 1, as
    its gradients come in buckets already."""

    cycle_time_ms: Annotated[Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] | None, NUMBER] = None
    """Time between two rounds of negotiation, in milliseconds. Horovod's default is 1."""

    compression: Annotated[Literal["none", "fp16", "bf16", "topk", "auto"], CHOICE] = "none"
    """Gradients on the wire, for a `task`. auto: none or bf16, whichever measures faster."""

    autotune: Boolean = False
    """Let Horovod search fusion threshold and cycle time while it trains, and keep the best in `horovod.tuned`."""

    tuned: OptionalPath = None
    """File of what autotune found, relative to the spec's folder: written with `autotune`, used without it."""

    hierarchical_allreduce: Annotated[bool | None, OPTIONAL_BOOLEAN] = None
    """Reduce GPU tensors in each host by NCCL, then between hosts by MPI; for several hosts and `controller: mpi`."""

    adasum: Boolean = False
    """Combine gradients by Adasum in place of their mean, for a `task`: under MPI, with 2, 4, 8, … processes."""


class Parallelism(Section):
    """How the training is divided over the processes. The product of the degrees is their number."""

    data: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], whole_number_or("auto")] = "auto"
    """Copies of the model, each with samples of its own. auto: as many as the other degrees leave."""

    tensor: Annotated[Annotated[int, Field(ge=1, le=100_000)], WHOLE_NUMBER] = 1
    """Processes that share each layer's matrices; they're kept on one host."""

    pipeline: Annotated[Annotated[int, Field(ge=1, le=100_000)], WHOLE_NUMBER] = 1
    """Stages that the layers are cut into, one after the other (PyTorch)."""

    embedding: Annotated[Annotated[int, Field(ge=1, le=100_000)], WHOLE_NUMBER] = 1
    """Processes that share the embedding tables; each has samples of its own, as with `data`."""

    shard_optimizer: Boolean = False
    """Each copy of the model keeps a part of the optimizer's state and of the gradients: ZeRO 1 and 2 (PyTorch)."""

    micro_batches: Annotated[Annotated[int, Field(ge=1, le=100_000)] | None, WHOLE_NUMBER] = None
    """Parts in which a batch is computed; gradients travel once (PyTorch). null: 4 for each stage, else 1."""

    schedule: Annotated[Literal["1f1b", "gpipe"], CHOICE] = "1f1b"
    """Order of a pipeline's work: 1f1b keeps at most as many micro-batches as there are stages, gpipe all of them."""

    cut_by: Annotated[Literal["parameters", "time"], CHOICE] = "parameters"
    """What a pipeline's stages get equal shares of. time: measured on a first batch."""

    recompute: Boolean = False
    """Compute a stage's activations again in the backward pass, in place of keeping them."""


class JobSpec(Section):
    """One training job."""

    name: JobName = ""
    """Name of the job and of its folder under `runs/`. Default: the spec's file name without its ending."""

    task: TaskName = None
    """`module:Class` of a training task. Either this or `command`."""

    command: Command = None
    """Program and arguments of every worker, a list, never a shell line. Either this or `task`."""

    options: Annotated[dict[str, AnyValue], SECTION] = {}
    """The task's options, such as `epochs`, `batch_size` (samples per worker and step) and `lr`."""

    directory: OptionalPath = None
    """Working directory of the workers on all hosts, relative to the spec's folder. Default: the spec's folder."""

    python: Interpreter = None
    """Absolute path of the Python on the hosts, which has hvdtrain and Horovod. null: the launcher's own."""

    processes: Annotated[Annotated[int, Field(ge=1, le=100_000)] | None, WHOLE_NUMBER] = None
    """How many workers. null: one for every slot of the hosts."""

    oversubscribe: Boolean = False
    """Allow more workers than slots."""

    hosts: Annotated[Hosts, SECTION] = Hosts()
    """Where to run."""

    ssh: Annotated[Ssh, SECTION] = Ssh()
    """How hosts are reached."""

    network: Annotated[Network, SECTION] = Network()
    """What the workers talk over."""

    # Its plain name is a method of every model.
    validate_: Annotated[Literal["none", "quick", "standard"], CHOICE] = Field("quick", alias="validate")
    """What is checked on the hosts before the start, if there are others than this machine."""

    controller: Annotated[Literal["auto", "mpi", "gloo"], CHOICE] = "auto"
    """Who starts the workers and carries CPU tensors. auto: MPI on one host where it is built, else Gloo."""

    env: Annotated[Environment, SECTION] = Environment()
    """Environment of the workers."""

    checkpoint: Annotated[Checkpoint, SECTION] = Checkpoint()
    """What a task saves, and when."""

    elastic: Annotated[Elastic, SECTION] = Elastic()
    """Going on with fewer workers, or more."""

    restarts: Annotated[Restarts, SECTION] = Restarts()
    """When the job begins again after a failure."""

    hang_timeout_s: Annotated[Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] | None, NUMBER] = 600.0
    """Seconds without progress after which the job counts as hung and is ended or begins again. null: never."""

    stop_grace_s: Annotated[Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)], NUMBER] = 30.0
    """Seconds that the workers have after Ctrl-C or SIGTERM, to save a checkpoint, before they are killed."""

    parallelism: Annotated[Parallelism, SECTION] = Parallelism()
    """How the training is divided over the processes."""

    horovod: Annotated[HorovodSettings, SECTION] = HorovodSettings()
    """Horovod's own settings."""
