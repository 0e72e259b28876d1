"""What a launch asks of other hosts before it starts, and what it remembers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from bare_host import BareHost
from launching_hosts import HostsJob
from namespace_hosts import Cluster

from hvdtrain.cluster.models import Request
from hvdtrain.cluster.network import Network
from hvdtrain.cluster.recent import Known, recall, remember
from hvdtrain.fabric.schedule import Reach
from hvdtrain.hosts.models import Host

HOSTS = (Host("a"), Host("b", user="ada"))
NETWORK = Network(
    {"a": {"network": {"interfaces": []}, "infiniband": None}, "b": {"network": None, "infiniband": None}},
    (Reach("a", "b", "10.0.0.2", True, None, 0.001, "10.0.0.1"),),
    "a",
    ("eth0",),
)
KNOWN = Known(NETWORK, ("b", "a"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hvdtrain" / "hosts"


def test_hosts_are_remembered_for_an_hour(cache: Path) -> None:
    request = Request(python="/p")
    assert recall(HOSTS, request) is None
    remember(HOSTS, request, KNOWN)
    assert recall(HOSTS, request) == KNOWN
    assert recall(HOSTS, request, now=time.time() + 3500) == KNOWN
    assert recall(HOSTS, request, now=time.time() + 3700) is None
    assert recall(HOSTS, request, now=time.time() - 100) is None
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("request_", [Request(python="/q"), Request(python="/p", directory="/d")])
def test_what_is_asked_otherwise_is_another_thing(cache: Path, request_: Request) -> None:
    remember(HOSTS, Request(python="/p"), KNOWN)
    assert recall(HOSTS, request_) is None
    assert recall((*HOSTS, Host("c")), Request(python="/p")) is None
    assert recall(HOSTS, Request(python="/p"), "standard") is None
    assert recall((Host("a"), Host("b", user="bob")), Request(python="/p")) is None


def test_an_edited_script_is_another_one(cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("one")
    request = Request(files=(str(script),))
    remember(HOSTS, request, KNOWN)
    script.write_text("two")
    assert recall(HOSTS, request) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"time": 1}', '{"time": "x", "network": {}}'])
def test_a_damaged_file_is_as_none(cache: Path, damage: str) -> None:
    request = Request()
    remember(HOSTS, request, KNOWN)
    (file,) = cache.iterdir()
    file.write_text(damage)
    assert recall(HOSTS, request) is None


@pytest.fixture
def job(tmp_path: Path, cluster: Cluster) -> HostsJob:
    made = HostsJob(tmp_path, cluster)
    made.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    made.settings = {"validate": "quick"}
    return made


@pytest.mark.hosts
@pytest.mark.processes
def test_a_second_launch_asks_no_more(job: HostsJob) -> None:
    job.write("h1:1,h2:1", "gloo", command=["true"])
    for looked in (True, False):
        status, output = job.run_to_end("--dry-run")
        assert (status, "looking at 2 hosts" in output) == (0, looked), output
        assert "HOROVOD_GLOO_IFACE" in output


def slow_towards(host: BareHost, others: Sequence[BareHost]) -> None:
    """600 Mbit/s to all, 150 to these."""
    device = ["dev", host.interface]
    host.run(["tc", "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "10"])
    for number, rate in (("10", "600mbit"), ("20", "150mbit")):
        host.run(["tc", "class", "add", *device, "parent", "1:", "classid", f"1:{number}", "htb", "rate", rate])
    for other in others:
        match = ["match", "ip", "dst", f"{other.address}/32", "flowid", "1:20"]
        host.run(["tc", "filter", "add", *device, "parent", "1:", "protocol", "ip", "u32", *match])


@pytest.mark.hosts
@pytest.mark.processes
def test_ranks_go_around_a_ring_that_was_measured(tmp_path: Path) -> None:
    """Two switches with a slow link between them: the hosts' own order would cross it four times."""
    with Cluster(4) as cluster:
        job = HostsJob(tmp_path, cluster)
        job.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        job.settings = {"validate": "none", "network": {"rank_order": "measured"}}
        (job.folder / "train.py").write_text("import horovod.torch as hvd; hvd.init(); print('size', hvd.size())")
        for place, host in enumerate(cluster.hosts):
            slow_towards(host, cluster.hosts[1 - place % 2 :: 2])
        for measured in (True, False):
            job.write("h1:1,h2:1,h3:1,h4:1", "gloo", command=["python", "train.py"])
            status, output = job.run_to_end()
            assert status == 0, output
            assert ("measuring links" in output) is measured
            plan = json.loads((job.run_directory / "plan.json").read_text())
            hosts = [placement["host"] for placement in plan["placements"]]
            assert hosts in (["h1", "h3", "h2", "h4"], ["h1", "h3", "h4", "h2"]), hosts
            assert any("their links were measured" in reason for reason in plan["reasons"])


@pytest.mark.hosts
@pytest.mark.processes
@pytest.mark.parametrize("drop", [False, True])
def test_a_host_that_is_not_fit(job: HostsJob, drop: bool) -> None:
    (job.folder / "train.py").write_text("import horovod.torch as hvd; hvd.init(); print('size', hvd.size())")
    hosts = {"list": ["h1:1", "h2:1", "nowhere:1"], "drop_failing": drop}
    job.write("", "gloo", command=["python", "train.py"], hosts=hosts)
    status, output = job.run_to_end()
    assert "nowhere: name: its name can't be resolved" in output
    if drop:
        assert status == 0, output
        assert output.count("size 2") == 2
        plan = json.loads((job.run_directory / "plan.json").read_text())
        assert any(reason.startswith("nowhere is left out: name:") for reason in plan["reasons"])
    else:
        assert status == 3, output
        assert "hosts.drop_failing" in output
    job.nothing_is_left()


@pytest.mark.hosts
@pytest.mark.processes
def test_a_dry_run_with_hosts_that_cannot_be_reached_shows_what_is_known(job: HostsJob) -> None:
    job.write("h1:1,nowhere:1", "gloo", command=["true"])
    status, output = job.run_to_end("--dry-run")
    assert status == 0, output
    assert "without the network's settings" in output
    assert "-H h1:1,nowhere:1" in output
