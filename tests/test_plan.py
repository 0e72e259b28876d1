"""Plans are pure: from spec, hosts and facts, without a process."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import planning
import pytest

from hvdtrain.errors import StartError, UsageError
from hvdtrain.fabric.models import host_fabric
from hvdtrain.fabric.routes import ChosenNetwork, HostNetwork
from hvdtrain.hosts.models import Host
from hvdtrain.plan.controller import choose_controller
from hvdtrain.plan.environment import BASE, matching
from hvdtrain.plan.facts import Facts, NetworkFacts
from hvdtrain.plan.placement import place, workers_per_host
from hvdtrain.plan.plan import LaunchPlan, make_plan
from hvdtrain.plan.render import quote, render
from hvdtrain.spec.loader import resolved_yaml
from hvdtrain.spec.models import Elastic, Environment, HorovodSettings, JobSpec, Restarts, Ssh

FACTS = replace(
    planning.FACTS,
    environment={
        "PATH": "/usr/bin:/bin",
        "HOME": "/home/ada",
        "LANG": "C.UTF-8",
        "SECRET_OF_THE_SHELL": "x",
        "TOKEN": "t",
    },
)


def hosts(*slots: int, max_slots: int | None = None) -> list[Host]:
    return [Host(name=f"node{number}", slots=count, max_slots=max_slots) for number, count in enumerate(slots, 1)]


def spec(**keys: Any) -> JobSpec:
    defaults = {"name": "job", "command": ("python", "train.py"), "directory": Path("/jobs")}
    return JobSpec(**(defaults | keys))


def plan(job: JobSpec, where: list[Host], **facts: Any) -> LaunchPlan:
    facts = {"remote": frozenset(host.name for host in where[1:])} | facts
    return make_plan(job, where, Facts(**(FACTS.__dict__ | facts)), Path("/jobs/runs/job/1"))


def test_the_whole_plan_of_a_script_on_one_host() -> None:
    job = spec(processes=2)
    assert plan(job, hosts(4)).to_json() == {
        "spec_sha256": hashlib.sha256(resolved_yaml(job).encode()).hexdigest(),
        "name": "job",
        "controller": "mpi",
        "argv": [
            "/env/bin/horovodrun", "-np", "2", "-H", "node1:2", "--mpi", "--disable-cache",
            "/env/bin/python", "-m", "hvdtrain.worker", "python", "train.py",
        ],
        "environment": {
            "HOME": "/home/ada",
            "HVDTRAIN_ATTEMPT": "0",
            "HVDTRAIN_RUN_DIRECTORY": "/jobs/runs/job/1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
            "LANG": "C.UTF-8",
            "OMPI_MCA_plm": "isolated",
            "PATH": "/env/bin:/usr/bin:/bin",
            "PYTHONUNBUFFERED": "1",
        },
        "secrets": [],
        "directory": "/jobs",
        "run_directory": "/jobs/runs/job/1",
        "placements": [
            {"rank": 0, "host": "node1", "local_rank": 0, "local_size": 2, "cross_rank": 0},
            {"rank": 1, "host": "node1", "local_rank": 1, "local_size": 2, "cross_rank": 0},
        ],
        "stop_grace_s": 30.0,
        "hang_timeout_s": 600.0,
        "restarts": 0,
        "backoff_s": 5.0,
        "elastic": None,
        "python": "/env/bin/python",
        "ssh": {"user": None, "port": None, "identity_file": None, "config": None},
        "agents": {},
        "names": {},
        "host_environment": {},
        "mpi_parameters": {"pml": "ob1", "btl": "^openib,uct,ofi"},
        "mpirun": "/usr/bin/mpirun",
        "tuning": None,
        "reasons": [
            "controller mpi: one host: MPI's shared memory is faster than Gloo",
            "2 processes, of 4 slots: 2 on node1",
            "mpirun pml=ob1: shared memory: all ranks are on this machine",
            "mpirun btl=^openib,uct,ofi: as Debian has it: openib is dead, and ofi may hang in MPI_Init",
        ],
    }  # fmt: skip


def test_the_whole_plan_of_a_task_on_several_hosts() -> None:
    job = spec(
        command=None,
        task="hvdtrain.tasks.digits_torch:Digits",
        options={"lr": 0.1, "epochs": 2},
        horovod=HorovodSettings(fusion_threshold_mb=32, cycle_time_ms=2.5, compression="fp16"),
    )
    made = plan(job, hosts(2, 1))
    assert made.argv == (
        "/env/bin/horovodrun", "-np", "3", "-H", "node1:2,node2:1", "--network-interfaces", "lo", "--gloo",
        "--disable-cache",
        "--fusion-threshold-mb", "32", "--cycle-time-ms", "2.5",
        "/env/bin/python", "-m", "hvdtrain.worker", "/env/bin/python", "-m", "hvdtrain.train",
    )  # fmt: skip
    assert made.environment["HVDTRAIN_TASK"] == "hvdtrain.tasks.digits_torch:Digits"
    assert made.environment["HVDTRAIN_OPTIONS"] == '{"epochs": 2, "lr": 0.1}'
    assert (
        made.environment["HVDTRAIN_SETTINGS"]
        == '{"checkpoint": {"every_steps": 100, "keep": 3}, "compression": "fp16"}'
    )
    assert made.hosts == ("node1", "node2")
    assert made.reasons == (
        "controller gloo: several hosts over TCP: Gloo is faster than MPI",
        "3 processes, one for every slot: 2 on node1, 1 on node2",
    )


def test_each_other_host_is_reached_by_its_own_ssh_command() -> None:
    where = [Host("node1"), Host("node2", user="ada"), Host("fd00::3")]
    made = plan(spec(ssh=Ssh(user="bob", port=2222, identity_file=Path("/keys/id"), config=Path("/c"))), where)
    assert "-H" in made.argv
    assert made.argv[made.argv.index("-H") + 1] == "node1:1,node2:1,fd00--3.ip6:1"
    assert made.names == {"fd00--3.ip6": "fd00::3"}
    assert list(made.agents) == ["node2", "fd00::3"]
    for host, user in (("node2", "ada"), ("fd00::3", "bob")):
        assert made.agents[host][0] == "ssh"
        assert made.agents[host][-9:] == (
            "-F", "/c", "-p", "2222", "-i", "/keys/id", "-l", user, "--", host,
            "exec /env/bin/python -m hvdtrain.worker.agent",
        )[-9:]  # fmt: skip


def test_the_spec_may_name_the_hosts_python() -> None:
    made = plan(spec(python="/opt/my env/python"), hosts(1, 1))
    assert made.agents["node2"][-1] == "exec '/opt/my env/python' -m hvdtrain.worker.agent"
    assert made.argv[0] == "/env/bin/horovodrun"
    assert made.argv[-5:] == ("/opt/my env/python", "-m", "hvdtrain.worker", "python", "train.py")
    assert made.environment["PATH"].startswith("/opt/my env:")


def network(**interfaces: str) -> NetworkFacts:
    """Hosts with one interface each on 10.0.0.0/24, without RDMA."""
    fabrics, per_host = {}, {}
    for number, (host, interface) in enumerate(interfaces.items(), 1):
        address = {"family": "inet", "address": f"10.0.0.{number}", "prefix_length": 24, "scope": "global"}
        known = {"name": interface, "kind": "ethernet", "is_up": True, "operstate": "up", "addresses": [address]}
        fabrics[host] = host_fabric(host, {"network": {"interfaces": [known]}})
        per_host[host] = HostNetwork(interface, f"10.0.0.{number}", 24, 1000)
    launcher = dict.fromkeys(per_host, "10.0.0.1")
    chosen = ChosenNetwork(per_host, launcher, ("10.0.0.0/24",), (), (), ("network 10.0.0.0/24: all share it",))
    return NetworkFacts(fabrics, chosen)


def test_the_network_of_several_hosts() -> None:
    made = plan(spec(controller="gloo"), hosts(1, 1), network=network(node1="eth0", node2="ens1"))
    assert made.host_environment == {
        "node1": {"HOROVOD_GLOO_IFACE": "eth0"},
        "node2": {"HOROVOD_GLOO_IFACE": "ens1"},
    }
    assert made.environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert made.mpi_parameters == {}
    assert made.reasons[2] == "network 10.0.0.0/24: all share it"
    assert LaunchPlan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_mpi_is_told_the_network_in_place_of_horovodruns_choice() -> None:
    made = plan(spec(controller="mpi"), hosts(1, 1), network=network(node1="eth0", node2="ens1"))
    assert made.mpi_parameters == {
        "pml": "ob1",
        "btl": "tcp,self,vader",
        "btl_tcp_if_include": "10.0.0.0/24",
        "oob_tcp_if_include": "10.0.0.0/24",
    }


def test_mpi_on_one_host_takes_the_transport_that_the_user_has_set() -> None:
    made = plan(spec(controller="mpi", env={"set": {"OMPI_MCA_btl": "self,tcp"}}), hosts(2))
    assert made.mpi_parameters == {"pml": "ob1"}
    assert made.environment["OMPI_MCA_btl"] == "self,tcp"


def test_what_the_user_sets_by_hand_counts() -> None:
    job = spec(controller="gloo", env=Environment(set={"HOROVOD_GLOO_IFACE": "bond0"}))
    made = plan(job, hosts(1, 1), network=network(node1="eth0", node2="ens1"))
    assert made.environment["HOROVOD_GLOO_IFACE"] == "bond0"
    assert made.host_environment == {}


def test_the_same_input_gives_the_same_plan() -> None:
    assert plan(spec(), hosts(2, 2)) == plan(spec(), hosts(2, 2))


def test_a_plan_comes_back_from_its_file() -> None:
    made = plan(spec(processes=2, hang_timeout_s=None), hosts(2))
    assert LaunchPlan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_only_what_can_go_on_from_a_checkpoint_is_restarted_unasked() -> None:
    assert plan(spec(), hosts(1)).restarts == 0
    assert plan(spec(command=None, task="a:B"), hosts(1)).restarts == 3
    assert plan(spec(restarts=Restarts(max=7)), hosts(1)).restarts == 7
    assert plan(spec(command=None, task="a:B", restarts=Restarts(max=0)), hosts(1)).restarts == 0


@pytest.mark.parametrize(("timeout", "warning"), [(None, None), (1.0, "1"), (20.0, "5"), (600.0, "60"), (1e6, "60")])
def test_horovod_warns_before_the_hang_watch_acts(timeout: float | None, warning: str | None) -> None:
    made = plan(spec(hang_timeout_s=timeout), hosts(1))
    assert made.environment.get("HOROVOD_STALL_CHECK_TIME_SECONDS") == warning


def test_mpi_needs_no_ssh_on_one_host() -> None:
    assert plan(spec(controller="mpi"), hosts(1)).environment["OMPI_MCA_plm"] == "isolated"
    assert "OMPI_MCA_plm" not in plan(spec(controller="mpi"), hosts(1, 1)).environment
    shell = FACTS.environment | {"OMPI_MCA_plm": "rsh"}
    assert plan(spec(controller="mpi"), hosts(1), environment=shell).environment["OMPI_MCA_plm"] == "rsh"


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        ({"mpirun": None}, "install Open MPI again (Debian: openmpi-bin), or put the folder of its mpirun on PATH"),
        (
            {"controllers": ("gloo",)},
            "install Open MPI (Debian: openmpi-bin libopenmpi-dev), then run 'hvdtrain horovod build'",
        ),
    ],
)
def test_the_fix_for_a_missing_mpi_fits_what_is_missing(facts: dict[str, Any], fix: str) -> None:
    with pytest.raises(StartError) as caught:
        plan(spec(controller="mpi"), hosts(1), **facts)
    assert caught.value.fix == fix
    assert plan(spec(), hosts(1), **facts).controller == "gloo"


# --- placement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "processes", "expected"),
    [([4], 2, [2]), ([2, 2], 4, [2, 2]), ([2, 2], 3, [2, 1]), ([2, 2], 1, [1, 0]), ([1, 3, 2], 5, [1, 3, 1])],
)
def test_hosts_are_filled_in_order(slots: list[int], processes: int, expected: list[int]) -> None:
    assert workers_per_host(hosts(*slots), processes, oversubscribe=False) == expected


@pytest.mark.parametrize(
    ("slots", "processes", "expected"),
    [([2], 5, [5]), ([2, 2], 5, [3, 2]), ([1, 3], 7, [3, 4]), ([1, 1, 1], 8, [3, 3, 2])],
)
def test_oversubscribed_workers_are_spread(slots: list[int], processes: int, expected: list[int]) -> None:
    assert workers_per_host(hosts(*slots), processes, oversubscribe=True) == expected


def test_max_slots_bounds_oversubscription() -> None:
    where = [Host(name="a", slots=1, max_slots=2), Host(name="b", slots=1, max_slots=None)]
    assert workers_per_host(where, 6, oversubscribe=True) == [2, 4]
    with pytest.raises(UsageError, match=r"9 processes, but the hosts' max_slots allow 4 \+ 4 = 8 slots"):
        workers_per_host(hosts(2, 2, max_slots=4), 9, oversubscribe=True)


def test_too_many_processes_shows_the_sum() -> None:
    with pytest.raises(UsageError, match=r"^9 processes, but the hosts have 4 \+ 2 \+ 1 = 7 slots"):
        workers_per_host(hosts(4, 2, 1), 9, oversubscribe=False)


def test_ranks_are_numbered_as_horovod_numbers_them() -> None:
    placed = place(hosts(2, 1, 3), [2, 1, 3])
    assert [(p.rank, p.host, p.local_rank, p.local_size, p.cross_rank) for p in placed] == [
        (0, "node1", 0, 2, 0),
        (1, "node1", 1, 2, 0),
        (2, "node2", 0, 1, 1),
        (3, "node3", 0, 3, 2),
        (4, "node3", 1, 3, 1),
        (5, "node3", 2, 3, 0),
    ]


# --- controller --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "where", "facts", "expected"),
    [
        ("auto", [2], {}, "mpi"),
        ("auto", [1, 1], {}, "gloo"),
        ("mpi", [1, 1], {}, "mpi"),
        ("gloo", [2], {}, "gloo"),
        ("auto", [2], {"controllers": ("gloo",)}, "gloo"),
        ("auto", [2], {"mpirun": None}, "gloo"),
        ("auto", [1, 1], {"controllers": ("mpi",)}, "mpi"),
    ],
)
def test_controller(wanted: str, where: list[int], facts: dict[str, Any], expected: str) -> None:
    made = plan(spec(controller=wanted), hosts(*where), **facts)
    assert made.controller == expected
    assert f"--{expected}" in made.argv


@pytest.mark.parametrize(
    ("rdma", "nccl", "expected"), [(None, False, "gloo"), ("InfiniBand", False, "mpi"), ("InfiniBand", True, "gloo")]
)
def test_mpi_where_only_it_uses_the_adapters(rdma: str | None, nccl: bool, expected: str) -> None:
    found, why = choose_controller("auto", hosts=2, facts=replace(FACTS, nccl=nccl), rdma=rdma)
    assert found == expected
    assert ("InfiniBand" in why) is (expected == "mpi")


def test_hosts_without_a_worker_do_not_count() -> None:
    assert plan(spec(processes=2), hosts(2, 2)).controller == "mpi"


@pytest.mark.parametrize(
    ("wanted", "facts", "message"),
    [
        ("mpi", {"controllers": ("gloo",)}, "controller 'mpi' can't be used: Horovod was built without MPI"),
        ("mpi", {"mpirun": None}, "controller 'mpi' can't be used: no mpirun on PATH"),
        ("gloo", {"controllers": ("mpi",)}, "controller 'gloo' can't be used: Horovod was built without Gloo"),
        (
            "auto",
            {"controllers": ("mpi",), "mpirun": None},
            "no controller can be used: no mpirun on PATH; Horovod was built without Gloo",
        ),
    ],
)
def test_a_controller_that_is_not_there(wanted: str, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError) as caught:
        plan(spec(controller=wanted), hosts(2), **facts)
    assert caught.value.what == message
    assert caught.value.fix


def test_mpi_yields_where_ranks_share_cores() -> None:
    crowded = plan(spec(), hosts(4), cores=2)
    assert crowded.environment["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" in plan(spec(), hosts(4), cores=7).environment
    assert "OMPI_MCA_mpi_yield_when_idle" not in plan(spec(), hosts(4), cores=8).environment


# --- environment -------------------------------------------------------------------------------------------------


def test_only_what_the_spec_says_reaches_the_workers() -> None:
    shell = FACTS.environment | {
        "HF_HOME": "/hf",
        "HF_TOKEN": "h",
        "NCCL_DEBUG": "INFO",
        "HOROVOD_RANK": "7",
        "WANDB": "w",
    }
    env = Environment(set={"LANG": "de_DE.UTF-8", "NEW": "1"}, forward=("HF_*", "WANDB"), secrets=("TOKEN",))
    made = plan(spec(env=env), hosts(1), environment=shell)
    values = made.environment
    assert {name: values.get(name) for name in ("LANG", "NEW", "HF_HOME", "HF_TOKEN", "WANDB", "NCCL_DEBUG")} == {
        "LANG": "de_DE.UTF-8", "NEW": "1", "HF_HOME": "/hf", "HF_TOKEN": "h", "WANDB": "w", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    assert not {"TOKEN", "SECRET_OF_THE_SHELL", "HOROVOD_RANK"} & set(values)
    assert made.secrets == ("TOKEN",)


def test_a_secret_stays_out_whatever_else_matches_it() -> None:
    shell = FACTS.environment | {"HF_TOKEN": "h", "NCCL_KEY": "n"}
    env = Environment(forward=("HF_*",), secrets=("HF_TOKEN", "NCCL_KEY"))
    assert not {"HF_TOKEN", "NCCL_KEY"} & set(plan(spec(env=env), hosts(1), environment=shell).environment)


@pytest.mark.parametrize("key", ["forward", "secrets"])
def test_a_variable_that_is_not_set(key: str) -> None:
    env = Environment(**{key: ("TOKEN", "MISSING")})
    with pytest.raises(UsageError, match=f"^env.{key}: MISSING is not set in the launcher's environment"):
        plan(spec(env=env), hosts(1))


def test_the_interpreter_comes_first_on_path() -> None:
    for path in ("/usr/bin:/env/bin:/bin", "/usr/bin:/bin"):
        made = plan(spec(), hosts(1), environment={"PATH": path})
        assert made.environment["PATH"] == "/env/bin:/usr/bin:/bin"
    assert plan(spec(), hosts(1), environment={}).environment["PATH"].startswith("/env/bin:/usr/")


def test_patterns_are_those_of_a_shell() -> None:
    assert matching(["A_B", "A", "BA", "a_b"], ["A_*", "B?"]) == ["A_B", "BA"]


# --- the text of a dry run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["plain", "two words", "it's", "", "$HOME `id` \\", "line\nbreak\ttab", "é ✓", "\x1b[31mred", "a\n'b'\\c\r"]
)
def test_bash_reads_what_was_quoted(text: str) -> None:
    quoted = quote(text)
    assert "\n" not in quoted
    assert "\x1b" not in quoted
    read = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, check=True)
    assert read.stdout.decode() == text


def test_a_dry_run_shows_secrets_by_name() -> None:
    text = render(plan(spec(env=Environment(secrets=("TOKEN",))), hosts(1)))
    assert "# without the secrets, which only the launch itself hands over: TOKEN\n" in text
    assert "TOKEN=" not in text


def test_the_documented_base_is_the_real_one() -> None:
    text = (Path(__file__).parents[1] / "docs" / "environment.md").read_text()
    block = text.partition("<!-- base -->")[2].split("```")[1]
    assert sorted(block.split()) == sorted(BASE)


# --- elastic jobs --------------------------------------------------------------------------------------------------


def elastic(minimum: int = 2, **keys: Any) -> dict[str, Any]:
    return {"elastic": Elastic(min=minimum, **keys), "task": "a:B", "command": None}


def test_an_elastic_job_asks_for_its_hosts_again_and_again() -> None:
    made = plan(spec(**elastic(timeout_s=60)), hosts(3))
    assert made.controller == "gloo"
    assert len(made.placements) == 3
    assert made.argv[1:16] == (
        "-np", "2", "--min-np", "2", "--max-np", "100000",
        "--host-discovery-script", "cat /jobs/runs/job/1/elastic/hosts",
        "--elastic-timeout", "60", "--network-interfaces", "lo", "--gloo", "--disable-cache", "/env/bin/python",
    )  # fmt: skip
    assert json.loads(made.environment["HVDTRAIN_SETTINGS"])["elastic"] == {"batch": "keep_per_worker", "workers": 3}
    assert "can't be pasted" in render(made)
    assert LaunchPlan.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("keys", "processes", "maximum", "workers"),
    [
        ({}, None, 100_000, 4),
        ({"max": 3}, None, 3, 3),
        ({}, 2, 2, 2),
        ({"max": 8}, 3, 8, 3),
    ],
)
def test_how_many_workers_an_elastic_job_takes(
    keys: dict[str, Any], processes: int | None, maximum: int, workers: int
) -> None:
    made = plan(spec(processes=processes, **elastic(**keys)), hosts(4))
    assert made.elastic
    assert made.elastic.maximum == maximum
    assert len(made.placements) == workers


def test_too_few_slots_for_an_elastic_job() -> None:
    with pytest.raises(UsageError, match=r"elastic\.min is 2, and the hosts have 1 slot"):
        plan(spec(**elastic()), hosts(1))


def test_hosts_are_watched_where_they_come_from() -> None:
    hostfile = Path("/jobs/hosts")
    watched = make_plan(spec(**elastic()), hosts(2), FACTS, Path("/r"), hostfile).elastic
    printed = make_plan(spec(**elastic(discovery=("cat", "x"))), hosts(2), FACTS, Path("/r"), hostfile).elastic
    assert watched
    assert printed
    assert (watched.hostfile, watched.discovery) == ("/jobs/hosts", None)
    assert (printed.hostfile, printed.discovery) == (None, ("cat", "x"))
