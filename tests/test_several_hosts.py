"""Launches over several hosts, each a network namespace with an sshd of its own: training, and every way to end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import CONTROLLERS, PATIENCE_S, RAISES
from launching_hosts import HostsJob
from namespace_hosts import Cluster

pytestmark = [pytest.mark.processes, pytest.mark.hosts]
VISITS = Path(__file__).with_name("visits.py")

TRAINS_ON = """
import os, socket
import horovod.torch as hvd, torch
hvd.init()
print("pid", os.getpid(), "on", socket.gethostname())
while True:
    hvd.allreduce(torch.ones(4), name="x")
"""


@pytest.fixture
def job(tmp_path: Path, cluster: Cluster) -> HostsJob:
    return HostsJob(tmp_path, cluster)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_training_on_two_hosts_gives_the_weights_of_one(job: HostsJob, controller: str) -> None:
    digests = []
    for hosts in ("h1:4", "h1:2,h2:2"):
        options = {"epochs": 1, "batch_size": 16, "seed": 3, "evaluate_every_epochs": None}
        environment = {"set": {"OMP_NUM_THREADS": "1"}}
        job.write(
            hosts, controller, task="hvdtrain.tasks.digits_torch:Digits", options=options, env=environment,
            checkpoint={"every_steps": None},
        )  # fmt: skip
        status, output = job.run_to_end()
        assert status == 0, output
        digests.append(weights(job.run_directory))
    assert digests[0].keys() == digests[1].keys()
    for name, values in digests[0].items():
        assert values == pytest.approx(digests[1][name], rel=1e-5, abs=1e-6), name
    job.nothing_is_left()


def weights(run_directory: Path) -> dict[str, list[float]]:
    """The newest checkpoint's parameters."""
    import torch

    newest = max((run_directory / "checkpoints").glob("step-*"))
    file = next(newest.glob("*.pt"))
    state = torch.load(file, weights_only=False)
    flat: dict[str, list[float]] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value.double().flatten().tolist()

    walk("", state)
    assert flat
    return flat


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_remote_rank_that_raises(job: HostsJob, controller: str) -> None:
    (job.folder / "train.py").write_text(RAISES)
    job.write("h1:1,h2:1", controller, command=["python", "train.py"])
    status, output = job.run_to_end()
    assert status == 4, output
    assert "ValueError: the data of rank 1 is bad" in output
    job.nothing_is_left()
    failure = job.failure
    assert (failure["rank"], failure["host"], failure["kind"]) == (1, "h2", "exception")


def _kill_rank(job: HostsJob, process: subprocess.Popen[str], pids: dict[str, int]) -> None:
    os.kill(pids["h2"], signal.SIGKILL)


def _kill_agent(job: HostsJob, process: subprocess.Popen[str], pids: dict[str, int]) -> None:
    (agent,) = [
        pid for pid, words in job.processes_on(job.cluster.hosts[1]).items()
        if "hvdtrain.worker.agent" in words and not words.startswith(("sh", "/bin/sh", "bash"))
    ]  # fmt: skip
    os.kill(agent, signal.SIGKILL)


def _stop_rank(job: HostsJob, process: subprocess.Popen[str], pids: dict[str, int]) -> None:
    os.kill(pids["h2"], signal.SIGSTOP)


def _interrupt_twice(job: HostsJob, process: subprocess.Popen[str], pids: dict[str, int]) -> None:
    process.send_signal(signal.SIGINT)
    job.until(process, "SIGINT: stopping the job", 1)
    process.send_signal(signal.SIGINT)


def _terminate(job: HostsJob, process: subprocess.Popen[str], pids: dict[str, int]) -> None:
    process.send_signal(signal.SIGTERM)


def _kill_launch(job: HostsJob, process: subprocess.Popen[str], pids: dict[str, int]) -> None:
    process.kill()


def _kill_launcher(job: HostsJob, process: subprocess.Popen[str], pids: dict[str, int]) -> None:
    found = job.processes_on(job.cluster.hosts[0])
    launchers = [pid for pid, words in found.items() if words.startswith("mpirun") or "/horovodrun" in words]
    launchers += [pid for pid, words in found.items() if words.split()[0].endswith("/mpirun")]
    os.kill(max(launchers), signal.SIGKILL)


ENDS: list[tuple[Callable[[HostsJob, subprocess.Popen[str], dict[str, int]], None], tuple[int, ...], int | None]] = [
    (_kill_rank, (5,), 1),
    (_kill_agent, (5,), 1),
    (_stop_rank, (6,), 1),
    (_interrupt_twice, (130,), None),
    (_terminate, (143,), None),
    (_kill_launch, (-9,), None),
    (_kill_launcher, (5,), None),
]


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(("end", "statuses", "rank"), ENDS, ids=[end.__name__[1:] for end, _, _ in ENDS])
def test_whatever_ends_leaves_nothing_on_any_host(
    job: HostsJob, controller: str, end: Any, statuses: tuple[int, ...], rank: int | None
) -> None:
    (job.folder / "train.py").write_text(TRAINS_ON)
    job.write("h1:1,h2:1", controller, command=["python", "train.py"], stop_grace_s=2, hang_timeout_s=8)
    with job.started() as process:
        pids = {match[2]: int(match[1]) for match in job.until(process, r"pid (\d+) on (\w+)", 2)}
        assert job.processes_on(job.cluster.hosts[1])
        end(job, process, pids)
        process.communicate(timeout=PATIENCE_S)
        job.nothing_is_left()
        assert process.returncode in statuses
    if rank is not None:
        assert (job.failure["rank"], job.failure["host"]) == (rank, "h2")


def test_a_host_without_the_folder_is_told_before_the_start(job: HostsJob) -> None:
    (job.folder / "train.py").write_text(TRAINS_ON)
    for where, place in (("h2:1", "h2:/no/such/python"), ("h1:1,h2:1", "error: /no/such/python")):
        job.write(where, "gloo", command=["python", "train.py"], python="/no/such/python")
        status, output = job.run_to_end()
        assert status == 3, output
        assert f"{place}: the Python that the launch uses isn't there" in output
    job.nothing_is_left()


def test_an_unknown_host_is_told_before_the_start(job: HostsJob) -> None:
    job.write("h1:1,nowhere:1", "gloo", command=["true"])
    status, output = job.run_to_end()
    assert status == 3, output
    assert "nowhere: name: its name can't be resolved" in output


def test_secrets_reach_other_hosts_and_stand_nowhere(job: HostsJob) -> None:
    script = """
import os, subprocess, sys
import horovod.torch as hvd
hvd.init()
words = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
print("secret", len(os.environ["TOKEN_OF_MINE"]), "seen" if os.environ["TOKEN_OF_MINE"] in words else "hidden")
"""
    (job.folder / "train.py").write_text(script)
    job.environment["TOKEN_OF_MINE"] = "hush" * 8
    job.write("h1:1,h2:1", "gloo", command=["python", "train.py"], env={"secrets": ["TOKEN_OF_MINE"]})
    status, output = job.run_to_end()
    assert status == 0, output
    assert output.count("secret 32 hidden") == 2
    for file in job.run_directory.resolve().rglob("*"):
        assert not file.is_file() or b"hushhush" not in file.read_bytes(), file


def test_an_elastic_job_loses_a_host_and_gets_it_back(job: HostsJob) -> None:
    (job.folder / "visits.py").write_text(VISITS.read_text())
    options = {"epochs": 8, "batch_size": 8, "lr": 0.5, "evaluate_every_epochs": None, "step_s": 0.1}
    elastic = {"min": 1, "max": 3, "cooldown_s": 1, "batch": "keep_global"}
    job.write("h1:1,h2:1,h3:1", "gloo", task="visits:Visits", options=options, elastic=elastic)
    with job.started() as process:
        job.until(process, r"step +\d+/", 1)
        with job.cluster.hosts[1].link_down():
            job.until(process, r"h2 is lost: nothing has been heard of it", 1)
            job.until(process, r"resized from 3 workers to 2", 1)
        job.until(process, r"resized from 2 workers to 3", 1)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
    assert "eval_visits 8.0000  eval_wrong 0.0000" in output
    assert job.status["attempt"] == 0
    job.nothing_is_left()


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_network_of_ipv6_alone(tmp_path: Path, controller: str) -> None:
    (tmp_path / "train.py").write_text("import horovod.torch as hvd; hvd.init(); print('size', hvd.size())")
    with Cluster(2, ipv6_only=True) as hosts:
        job = HostsJob(tmp_path, hosts)
        job.write("h1:1,h2:2", controller, command=["python", "train.py"])
        status, output = job.run_to_end()
        assert status == 0, output
        assert output.count("size 3") == 3
        job.nothing_is_left()
        # Horovod tells elastic workers of changes by IPv4 alone.
        job.write("h1:1,h2:2", "gloo", command=["python", "train.py"], elastic={"min": 1})
        status, output = job.run_to_end()
        assert status == 3, output
        assert "an elastic job needs an IPv4 network" in output
        job.nothing_is_left()
