"""`LaunchPlan`: everything about a launch that is decided before a process starts."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import StartError, UsageError
from hvdtrain.fabric.plan import plan_fabric, plan_one_host, rdma_for_mpi
from hvdtrain.fabric.routes import ChosenNetwork
from hvdtrain.fabric.settings import FabricPlan
from hvdtrain.hosts.models import Host
from hvdtrain.plan.adasum import what_adasum_does
from hvdtrain.plan.controller import choose_controller
from hvdtrain.plan.environment import check_secrets, worker_environment
from hvdtrain.plan.facts import Facts
from hvdtrain.plan.grid import make_grid, picture, what_sharding_does
from hvdtrain.plan.placement import Placement, place, workers_per_host
from hvdtrain.plan.tuned import Tuned
from hvdtrain.plan.tuning import TuningPlan, choose_settings, without_effect
from hvdtrain.plan.words import plural
from hvdtrain.remote.ssh import SshSettings, ssh_command
from hvdtrain.spec.loader import resolved_yaml
from hvdtrain.spec.models import JobSpec

_TASK_RESTARTS = 3
# Keys of `parallelism` that the training loop needs beside the grid.
_TASK_PARALLELISM = {"shard_optimizer", "micro_batches", "schedule", "cut_by", "recompute"}
_NO_LIMIT = 100_000


@dataclass(frozen=True)
class ElasticPlan:
    """How a job goes on with fewer workers, or more.

    Attributes:
        minimum: workers that it needs.
        maximum: workers that it takes.
        slots: of each host, at the start.
        hostfile: which is read again when it changes; None: nobody changes the hosts.
        discovery: program and arguments that print the hosts of the moment, in the hostfile's place.
        cooldown_s: seconds before a failed slot gets a worker again.
        timeout_s: seconds that the job waits for ``minimum`` workers.
        include: of the hosts that come later, only these (names or ranges); empty: all.
        exclude: of these hosts, all but these.
    """

    minimum: int
    maximum: int
    slots: dict[str, int]
    hostfile: str | None
    discovery: tuple[str, ...] | None
    cooldown_s: float
    timeout_s: int
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchPlan:
    """A launch, ready to be run or shown.

    Attributes:
        name: the job's name.
        controller: ``mpi`` or ``gloo``.
        argv: horovodrun's arguments, from its own path on.
        environment: variables of horovodrun and of every worker; no secrets.
        secrets: names of the variables that reach the workers over the channel alone.
        directory: the workers' working directory.
        run_directory: where the run keeps its files.
        placements: one per rank, in order.
        stop_grace_s: from a request to stop to SIGKILL, in seconds.
        hang_timeout_s: for how long a rank may show no progress, in seconds; None: for ever.
        restarts: how often the job may begin again.
        backoff_s: seconds before the first restart; doubles with each.
        elastic: None for a job whose workers stay the same.
        python: the workers' interpreter, on every host.
        ssh: how other hosts are reached.
        agents: the ssh command that starts the agent of each host that isn't this machine.
        names: what horovodrun is told in the place of a host's name -> that name, where it couldn't read it.
        host_environment: variables of the workers of one host, over those of all.
        mpi_parameters: Open MPI's MCA parameters that take the place of horovodrun's.
        mpirun: path of the mpirun on PATH, or None.
        tuning: where autotune's results go; None: no autotune.
        reasons: what was decided and why, one sentence each.
        spec_sha256: `spec_digest` of the job spec that it was made of.
    """

    name: str
    controller: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    secrets: tuple[str, ...]
    directory: str
    run_directory: str
    placements: tuple[Placement, ...]
    stop_grace_s: float
    hang_timeout_s: float | None
    restarts: int
    backoff_s: float
    elastic: ElasticPlan | None
    python: str
    ssh: SshSettings
    agents: dict[str, tuple[str, ...]]
    names: dict[str, str]
    host_environment: dict[str, dict[str, str]]
    mpi_parameters: dict[str, str]
    mpirun: str | None
    tuning: TuningPlan | None
    reasons: tuple[str, ...]
    spec_sha256: str

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts that have a worker, in order."""
        return tuple(dict.fromkeys(placement.host for placement in self.placements))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LaunchPlan:
        """What `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: something else.
        """
        values: dict[str, Any] = {field.name: data[field.name] for field in fields(cls)}
        values["placements"] = [Placement(**placement) for placement in values["placements"]]
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        if elastic := values["elastic"]:
            lists = {name: tuple(value) for name, value in elastic.items() if isinstance(value, list)}
            values["elastic"] = ElasticPlan(**(elastic | lists))
        if values["tuning"]:
            values["tuning"] = TuningPlan(**values["tuning"])
        values["ssh"] = SshSettings(**values["ssh"])
        values["agents"] = {host: tuple(argv) for host, argv in values["agents"].items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, for ``--format json`` and ``plan.json``."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def make_plan(
    spec: JobSpec,
    hosts: Sequence[Host],
    facts: Facts,
    run_directory: Path,
    hostfile: Path | None = None,
    tuned: Tuned | None = None,
) -> LaunchPlan:
    """From spec, hosts and facts to the launch. Pure: the same input gives the same plan.

    ``hostfile`` is where the hosts come from, if from a file: an elastic job reads it again when it changes.
    ``tuned`` is what the spec's ``horovod.tuned`` has, if that is there.

    Raises:
        UsageError: more processes than slots, or a variable that isn't there.
        StartError: the wanted controller can't be used.
    """
    slots = sum(host.slots for host in hosts)
    elastic = _elastic(spec, hosts, hostfile)
    processes = spec.processes or (min(slots, elastic.maximum) if elastic else slots)
    grid = make_grid(spec.parallelism, processes)
    counts = workers_per_host(hosts, processes, oversubscribe=spec.oversubscribe, together=grid.tensor)
    used = [(host, count) for host, count in zip(hosts, counts, strict=True) if count]
    placements = place([host for host, _ in used], [count for _, count in used])
    if elastic:
        controller, why = choose_controller("gloo", hosts=len(used), facts=facts)[0], "the job is elastic"
    else:
        rdma = _rdma(spec, facts, [host.name for host, _ in used])
        controller, why = choose_controller(
            spec.controller,
            hosts=len(used),
            facts=facts,
            rdma=rdma,
            mpi_alone="horovod.adasum" if spec.horovod.adasum else None,
        )
    reasons = [f"controller {controller}: {why}", _placement_reason(spec, hosts, used, processes)]
    reasons += picture(grid, placements)
    if spec.parallelism.shard_optimizer:
        reasons.append(what_sharding_does(grid))
    reasons += [facts.host_order] if facts.host_order else []
    reasons += [f"{host} is left out: {'; '.join(faults)}" for host, faults in facts.dropped.items()]
    if elastic:
        limit = "or more" if elastic.maximum == _NO_LIMIT else f"to {elastic.maximum}"
        reasons.append(f"elastic: goes on with {elastic.minimum} {limit} workers")

    check_secrets(facts.environment, spec.env.secrets)
    python = spec.python or facts.python
    ssh = ssh_settings(spec)
    agents = {host.name: agent_command(host, ssh, python) for host, _ in used if host.name in facts.remote}
    names = {_name_for_horovodrun(host.name): host.name for host, _ in used if ":" in host.name}
    environment = worker_environment(
        facts.environment,
        python=python,
        set_values=spec.env.set,
        forward=spec.env.forward,
        secrets=spec.env.secrets,
    )
    network = _network(spec, facts, [host.name for host, _ in used], controller, environment)
    environment = {**network.environment, **environment}
    reasons += network.reasons
    environment |= {contract.RUN_DIRECTORY: str(run_directory), contract.ATTEMPT: "0"}
    if not grid.is_data_parallel:
        environment[contract.GRID] = grid.to_text()
    if spec.task is not None:
        environment |= _task_environment(spec, spec.task, processes)
    if controller == "mpi" and not agents:
        # Without ssh on PATH mpirun fails even where it needs none.
        environment.setdefault("OMPI_MCA_plm", "isolated")
    if spec.hang_timeout_s is not None:
        # Horovod's own warning of ranks that don't join a collective, as early as the hang watch needs it.
        warn_after = max(1, min(60, int(spec.hang_timeout_s / 4)))
        environment.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(warn_after))
    if controller == "mpi" and 2 * max(counts) > facts.cores:
        # Each rank has a thread that computes and Horovod's, in which Open MPI polls without a pause; where they share
        # a core, the one starves the other.
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        crowd = f"{plural(max(counts), 'rank')} of two threads on a host"
        reasons.append(f"OMPI_MCA_mpi_yield_when_idle=1: {crowd}, this machine has {facts.cores} cores")

    workers = [count for _, count in used]
    fabric = _network_name(facts, network)
    chosen = choose_settings(spec.horovod, tuned, environment, run_directory, counts=workers, network=fabric)
    environment = {**chosen.environment, **environment}
    reasons += chosen.reasons
    reasons += without_effect(spec.horovod, controller=controller, nccl=facts.nccl, counts=workers)
    if spec.horovod.adasum:
        reasons.append(what_adasum_does(workers, nccl=facts.nccl))

    argv = (
        facts.horovodrun,
        # An elastic job begins with all slots that there are, as soon as there are enough.
        "-np", str(elastic.minimum if elastic else processes),
        *(_elastic_arguments(elastic, run_directory) if elastic else _host_arguments(used, agents)),
        f"--{controller}",
        # Its cache of host and network checks lives for an hour and hides a host that has died since.
        "--disable-cache",
        *chosen.arguments,
        *_worker_command(spec, python),
    )  # fmt: skip
    return LaunchPlan(
        name=spec.name,
        controller=controller,
        argv=argv,
        environment=dict(sorted(environment.items())),
        secrets=spec.env.secrets,
        directory=str(spec.directory),
        run_directory=str(run_directory),
        placements=placements,
        stop_grace_s=spec.stop_grace_s,
        hang_timeout_s=spec.hang_timeout_s,
        restarts=_restarts(spec),
        backoff_s=spec.restarts.backoff_s,
        elastic=elastic,
        python=python,
        ssh=ssh,
        agents=agents,
        names=names,
        host_environment={host: dict(variables) for host, variables in network.per_host.items()},
        mpi_parameters=dict(network.mca),
        mpirun=facts.mpirun,
        tuning=chosen.tuning,
        reasons=tuple(reasons),
        spec_sha256=spec_digest(spec),
    )


def spec_digest(spec: JobSpec) -> str:
    """SHA-256 of a resolved spec: another one is another job, which needs another plan."""
    return hashlib.sha256(resolved_yaml(spec).encode()).hexdigest()


def _elastic(spec: JobSpec, hosts: Sequence[Host], hostfile: Path | None) -> ElasticPlan | None:
    """The job's limits. Raises UsageError where there are too few slots to begin."""
    wanted, slots = spec.elastic, sum(host.slots for host in hosts)
    if wanted.min is None:
        return None
    if slots < wanted.min:
        raise UsageError(
            f"elastic.min is {wanted.min}, and the hosts have {plural(slots, 'slot')}",
            fix="add hosts or slots, or lower elastic.min",
        )
    return ElasticPlan(
        minimum=wanted.min,
        # Horovod wants a number: without a limit of its own the job takes what the hosts will ever have.
        maximum=wanted.max or spec.processes or _NO_LIMIT,
        slots={host.name: host.slots for host in hosts},
        hostfile=str(hostfile) if hostfile and not wanted.discovery else None,
        discovery=wanted.discovery,
        cooldown_s=wanted.cooldown_s,
        timeout_s=wanted.timeout_s,
        include=spec.hosts.include,
        exclude=spec.hosts.exclude,
    )


def _network(
    spec: JobSpec, facts: Facts, hosts: Sequence[str], controller: str, already_set: Mapping[str, str]
) -> FabricPlan:
    """What the workers and mpirun are told of the network."""
    if facts.network is None:
        return plan_one_host(controller, already_set)
    chosen = _of_hosts(facts.network.chosen, hosts)
    if spec.elastic.min is not None and chosen.is_ipv6:
        raise StartError(
            "an elastic job needs an IPv4 network: Horovod tells its workers of changes by IPv4 alone",
            where=", ".join(chosen.subnets),
            fix="give the hosts IPv4 addresses, or take 'elastic' out",
        )
    made = plan_fabric(
        fabric=spec.network.fabric,
        hcas=spec.network.hcas,
        fabrics=facts.network.fabrics,
        network=chosen,
        controller=controller,
        nccl=facts.nccl,
        already_set=already_set,
    )
    return replace(made, reasons=(*chosen.reasons, *made.reasons))


def _network_name(facts: Facts, made: FabricPlan) -> str | None:
    return " ".join([made.kind, *facts.network.chosen.subnets]) if facts.network else None


def _rdma(spec: JobSpec, facts: Facts, hosts: Sequence[str]) -> str | None:
    """What MPI would use between these hosts in the place of TCP."""
    if facts.network is None or len(hosts) < 2:
        return None
    chosen = _of_hosts(facts.network.chosen, hosts)
    return rdma_for_mpi(
        fabric=spec.network.fabric, hcas=spec.network.hcas, fabrics=facts.network.fabrics, network=chosen
    )


def _of_hosts(chosen: ChosenNetwork, hosts: Sequence[str]) -> ChosenNetwork:
    return replace(chosen, per_host={host: chosen.per_host[host] for host in hosts})


def agent_command(host: Host, ssh: SshSettings, python: str) -> tuple[str, ...]:
    """The ssh command that starts another host's agent."""
    return tuple(ssh_command(host, ssh, f"exec {shlex.join([python, '-m', 'hvdtrain.worker.agent'])}"))


def ssh_settings(spec: JobSpec) -> SshSettings:
    """How the spec says that hosts are reached."""
    key, config = spec.ssh.identity_file, spec.ssh.config
    return SshSettings(spec.ssh.user, spec.ssh.port, str(key) if key else None, str(config) if config else None)


def _host_arguments(used: Sequence[tuple[Host, int]], agents: Collection[str]) -> tuple[str, ...]:
    hosts = ("-H", ",".join(f"{_name_for_horovodrun(host.name)}:{count}" for host, count in used))
    # Which interface the workers take is said to each of them over its channel; without this horovodrun looks for one
    # that has the same name on all hosts.
    return (*hosts, "--network-interfaces", "lo") if agents else hosts


def _name_for_horovodrun(name: str) -> str:
    """Horovodrun takes an IPv6 address apart at its colons."""
    return f"{name.replace(':', '-')}.ip6" if ":" in name else name


def _elastic_arguments(elastic: ElasticPlan, run_directory: Path) -> tuple[str, ...]:
    """The supervisor keeps the list of hosts, and horovodrun asks for it each second."""
    return (
        "--min-np", str(elastic.minimum),
        "--max-np", str(elastic.maximum),
        # horovodrun gives it to a shell.
        "--host-discovery-script", shlex.join(["cat", str(run_directory / contract.HOSTS_FILE)]),
        "--elastic-timeout", str(elastic.timeout_s),
        "--network-interfaces", "lo",
    )  # fmt: skip


def _placement_reason(spec: JobSpec, hosts: Sequence[Host], used: Sequence[tuple[Host, int]], processes: int) -> str:
    slots = sum(host.slots for host in hosts)
    counted = f"{slots} slot{'s' if slots != 1 else ''}"
    source = "one for every slot" if spec.processes is None else f"of {counted}"
    if processes > slots:
        source = f"on {counted}, oversubscribed as the job spec allows"
    where = ", ".join(f"{count} on {host.name}" for host, count in used)
    return f"{processes} {'process' if processes == 1 else 'processes'}, {source}: {where}"


def _restarts(spec: JobSpec) -> int:
    """A task goes on from its newest checkpoint; of a command nobody knows whether it can."""
    if spec.restarts.max is not None:
        return spec.restarts.max
    return _TASK_RESTARTS if spec.task is not None else 0


def _task_environment(spec: JobSpec, task: str, processes: int) -> dict[str, str]:
    settings: dict[str, Any] = {"checkpoint": spec.checkpoint.model_dump(), "compression": spec.horovod.compression}
    if spec.horovod.adasum:
        settings["adasum"] = True
    divided = spec.parallelism.model_dump(include=_TASK_PARALLELISM, exclude_defaults=True)
    if divided:
        settings["parallelism"] = divided
    if spec.elastic.min is not None:
        settings["elastic"] = {"batch": spec.elastic.batch, "workers": processes}
    return {
        contract.TASK: task,
        contract.OPTIONS: json.dumps(spec.options, sort_keys=True),
        contract.SETTINGS: json.dumps(settings, sort_keys=True),
    }


def _worker_command(spec: JobSpec, python: str) -> tuple[str, ...]:
    command = spec.command or (python, "-m", "hvdtrain.train")
    return (python, "-m", "hvdtrain.worker", *command)
