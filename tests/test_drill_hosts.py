"""`hvdtrain drill` on jobs over several hosts, each a network namespace with an sshd of its own."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import CONTROLLERS, TRAINS_ON, killed
from launching_hosts import HostsJob
from namespace_hosts import Cluster, NamespaceHost
from real_processes import heed_interrupts

from hvdtrain.worker.stacks import state_of

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

VISITS = Path(__file__).with_name("visits.py")
# A drill of several faults launches its job as often.
PATIENCE_S = 400
GONE_S = 20
ELASTIC = {"min": 1, "max": 3, "cooldown_s": 1, "batch": "keep_global"}


class DrilledOnHosts(HostsJob):
    """A job whose drill runs on the first host of a cluster."""

    def command(self, controller: str = "gloo", hosts: str = "h1:1,h2:1", **settings: Any) -> None:
        """A script that trains for ever, and tells no steps."""
        (self.folder / "train.py").write_text(TRAINS_ON)
        self.write(hosts, controller, command=["python", "train.py"], **settings)

    def visits(self, hosts: str = "h1:1,h2:1", weights: int = 1200, **settings: Any) -> None:
        """A task with so many weights, each of eight bytes."""
        (self.folder / "visits.py").write_text(VISITS.read_text())
        options = {"epochs": 1000, "batch_size": 8, "lr": 0.5, "evaluate_every_epochs": None, "samples": weights}
        checkpoint = {"every_steps": 20}
        restarts = {"backoff_s": 0.5}
        self.write(
            hosts, "gloo", task="visits:Visits", options=options, checkpoint=checkpoint, restarts=restarts, **settings
        )

    @contextlib.contextmanager
    def drilling(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        process = self.cluster.hosts[0].popen(
            [sys.executable, "-m", "hvdtrain", "drill", "job.yaml", "--after-s", "1", *options],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
        )
        with killed(process):
            yield process

    def drill(self, *options: str) -> dict[str, dict[str, Any]]:
        """The results by fault, of a drill in which nothing is wrong."""
        with self.drilling(*options, "--format", "json") as process:
            output, words = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, words + output
        return {result["fault"]: result for result in json.loads(output)["results"]}

    def frozen_on(self, host: NamespaceHost) -> int:
        """How many of the job's processes on a host are stopped."""
        return sum(state_of(pid) == "T" for pid in self.processes_on(host))


@pytest.fixture
def job(tmp_path: Path, cluster: Cluster) -> DrilledOnHosts:
    return DrilledOnHosts(tmp_path, cluster)


def queues_of(cluster: Cluster, name: str) -> str:
    (host,) = (host for host in cluster.hosts if host.name == name)
    done = host.run(["tc", "qdisc", "show", "dev", host.interface], capture_output=True, text=True)
    return str(done.stdout)


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_ranks_of_another_host(job: DrilledOnHosts, controller: str) -> None:
    job.command(controller, stop_grace_s=2)
    names = ["kill-rank", "kill-wrapper", "stop-rank", "kill-launcher"]
    found = job.drill(*(word for name in names for word in ("--fault", name)), "--hang-timeout-s", "4")
    assert [found[name]["verdict"] for name in names] == ["measured"] * 4
    assert {name: found[name]["named"]["rank"] for name in names[:3]} == dict.fromkeys(names[:3], 1)
    assert found["kill-rank"]["noticed_s"] < 5
    assert "rank 1 on h2 was killed by SIGKILL" in found["kill-rank"]["summary"]
    job.nothing_is_left(GONE_S)


def test_a_slow_rank_of_another_host(job: DrilledOnHosts) -> None:
    job.visits()
    found = job.drill("--fault", "slow-rank")["slow-rank"]
    assert (found["verdict"], found["rank"], found["named"]) == ("measured", 1, None)
    job.nothing_is_left(GONE_S)


# --- a host ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_host_is_cut_off_and_the_job_ends(job: DrilledOnHosts, controller: str) -> None:
    job.command(controller, stop_grace_s=2)
    found = job.drill("--fault", "cut-host", "--max-notice-s", "30")["cut-host"]
    assert (found["verdict"], found["host"], found["exit_status"]) == ("pass", "h2", 5)
    assert (found["named"]["kind"], found["named"]["host"]) == ("lost_host", "h2")
    # Silence is given up after 15 s; the last word may have come some time before the fault.
    assert 12 < found["noticed_s"] < 30
    job.nothing_is_left(GONE_S)


def test_a_host_is_cut_off_and_the_job_begins_again(job: DrilledOnHosts) -> None:
    job.visits()
    found = job.drill("--fault", "cut-host")["cut-host"]
    assert (found["verdict"], found["host"]) == ("measured", "h2")
    assert found["recovery"].startswith("a new attempt trains past step ")
    job.nothing_is_left(GONE_S)


def test_a_host_is_cut_off_and_the_others_go_on(job: DrilledOnHosts) -> None:
    job.visits("h1:1,h2:1,h3:1", elastic=ELASTIC)
    found = job.drill("--fault", "cut-host")["cut-host"]
    assert (found["verdict"], found["host"], found["named"]["kind"]) == ("measured", "h3", "worker_lost")
    assert found["recovery"].startswith("the other workers train past step ")
    job.nothing_is_left(GONE_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_frozen_when_the_drill_is_ended(job: DrilledOnHosts, number: signal.Signals) -> None:
    job.command()
    with job.drilling("--fault", "cut-host") as process:
        assert process.stderr
        for line in process.stderr:
            if "h2: SIGSTOP of all that the launch runs there" in line:
                break
        assert job.frozen_on(job.cluster.hosts[1]) >= 3
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == (-9 if number == signal.SIGKILL else 128 + number)
        job.nothing_is_left(GONE_S)


# --- a link ----------------------------------------------------------------------------------------------------------


def test_a_slow_link_is_seen_and_is_fast_again(job: DrilledOnHosts, cluster: Cluster) -> None:
    job.visits(weights=200_000)
    found = job.drill("--fault", "slow-link", "--rate", "2mbit")["slow-link"]
    assert (found["verdict"], found["host"], found["named"]) == ("measured", "h2", None)
    speeds = re.fullmatch(
        r"at 2mbit the job went on with (\S+) of (\S+) samples/s, and does (\S+) again", found["recovery"]
    )
    assert speeds
    slow, before, after = map(float, speeds.groups())
    assert slow < 0.51 * before
    assert after > 0.79 * before
    assert "tbf" not in queues_of(cluster, "h2")
    job.nothing_is_left(GONE_S)


def test_a_link_that_is_no_bottleneck(job: DrilledOnHosts, cluster: Cluster) -> None:
    job.visits()
    with job.drilling("--fault", "slow-link", "--rate", "1gbit") as process:
        output, words = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, words
    assert re.search(r"at 1gbit the job still does \S+ of \S+ samples/s, so there is nothing to notice", output)
    assert "tbf" not in queues_of(cluster, "h2")
    job.nothing_is_left(GONE_S)


def test_a_queue_of_the_users_own_stays(job: DrilledOnHosts, cluster: Cluster) -> None:
    job.visits()
    with cluster.hosts[1].limit(400), job.drilling("--fault", "slow-link") as process:
        output, words = process.communicate(timeout=PATIENCE_S)
        assert "rate 400Mbit" in queues_of(cluster, "h2")
    assert process.returncode == 1, words
    assert "eth0 has a qdisc already (tbf " in output
    job.nothing_is_left(GONE_S)
