"""The network chosen between real hosts, from what their probes find."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespace_hosts import Cluster

from hvdtrain.errors import StartError
from hvdtrain.fabric.models import HostFabric, host_fabric
from hvdtrain.fabric.plan import plan_fabric
from hvdtrain.fabric.routes import ChosenNetwork, choose_network
from hvdtrain.fabric.schedule import Reach, pairs, reaches, targets
from hvdtrain.remote.bootstrap import probe_command, probe_sources
from hvdtrain.remote.fanout import HostFailure, Session

pytestmark = pytest.mark.hosts

LIMIT_S = 180.0


@contextlib.contextmanager
def probes(cluster: Cluster) -> Iterator[tuple[Session, dict[str, HostFabric]]]:
    """A probe on each host, by ssh, and on the launching machine; and what networks they have."""
    commands = {
        host.name: ["ssh", "-F", str(cluster.ssh_config), host.name, probe_command(sys.executable)]
        for host in cluster.hosts
    }
    commands["launcher"] = ["sh", "-c", probe_command(sys.executable)]
    with Session(commands, probe_sources()) as session:
        wanted = {"ask": "facts", "sections": ["network", "infiniband"]}
        answers = ask(session, dict.fromkeys(commands, wanted))
        yield session, {host: host_fabric(host, answer["facts"]) for host, answer in answers.items()}


def ask(session: Session, requests: dict[str, Any]) -> dict[str, Any]:
    answers = session.ask(requests, LIMIT_S)
    assert not [answer for answer in answers.values() if isinstance(answer, HostFailure)], answers
    return answers


def measured(session: Session, fabrics: dict[str, HostFabric], timeout_s: float = 5.0) -> list[Reach]:
    hosts = [host for host in fabrics if host != "launcher"]
    listeners = ask(session, {host: {"ask": "listen"} for host in fabrics})
    wanted = targets(pairs(hosts, "launcher"), fabrics, listeners)
    requests = {host: {"ask": "connect", "targets": own, "timeout_s": timeout_s} for host, own in wanted.items()}
    answers = ask(session, requests)
    return [reach for host, answer in answers.items() for reach in reaches(host, answer["results"])]


def chosen(cluster: Cluster) -> tuple[ChosenNetwork, dict[str, HostFabric]]:
    with probes(cluster) as (session, fabrics):
        hosts = [host.name for host in cluster.hosts]
        return choose_network(hosts, fabrics, measured(session, fabrics), launcher="launcher"), fabrics


def test_names_that_differ_and_a_docker0_on_every_host() -> None:
    with Cluster(3, launcher=True, interface_names=["eth0", "enp5s0", "br0"]) as cluster:
        network, fabrics = chosen(cluster)
    assert {host: (own.interface, own.address) for host, own in network.per_host.items()} == {
        host.name: (host.interface, host.address) for host in cluster.hosts
    }
    assert network.subnets == (str(cluster.network),)
    assert set(network.launcher_address.values()) == {cluster.address}
    assert any("docker0" in reason for reason in network.reasons)
    plan = plan_fabric(
        fabric="auto", hcas=(), fabrics=fabrics, network=network, controller="gloo", nccl=False, already_set={}
    )
    assert plan.per_host["h2"] == {"HOROVOD_GLOO_IFACE": "enp5s0"}


def test_ipv6_only() -> None:
    with Cluster(2, launcher=True, ipv6_only=True) as cluster:
        network, _ = chosen(cluster)
    assert {host: own.address for host, own in network.per_host.items()} == {
        host.name: host.address for host in cluster.hosts
    }
    assert network.is_ipv6
    assert set(network.launcher_address.values()) == {cluster.address}


ALLREDUCE = """
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int rank, one = 1, sum;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("%d of %d\\n", rank, sum);
    MPI_Finalize();
}
"""


@pytest.mark.skipif(not (shutil.which("mpirun") and shutil.which("mpicc")), reason="there is no Open MPI to build with")
@pytest.mark.parametrize(
    ("ipv6_only", "names"),
    [(False, ["eth0", "enp5s0"]), (True, ["eth0", "eth0"]), (True, ["eth0", "enp5s0"])],
    ids=["ipv4", "ipv6", "ipv6-names-differ"],
)
def test_mpi_runs_with_what_is_planned(ipv6_only: bool, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "allreduce.c").write_text(ALLREDUCE)
    program = tmp_path / "allreduce"
    subprocess.run(["mpicc", str(tmp_path / "allreduce.c"), "-o", str(program)], check=True)
    with Cluster(2, launcher=True, ipv6_only=ipv6_only, interface_names=names) as cluster:
        network, fabrics = chosen(cluster)
        plan = plan_fabric(
            fabric="auto", hcas=(), fabrics=fabrics, network=network, controller="mpi", nccl=False, already_set={}
        )
        parameters = [word for name, value in plan.mca for word in ("-mca", name, value)]
        exports = "".join(
            f"[ $(hostname) != {host} ] || export {name}={value}\n"
            for host, own in plan.per_host.items()
            for name, value in own.items()
        )
        argv = ["mpirun", "--allow-run-as-root", "-H", "h1,h2", *parameters, "sh", "-c", f"{exports}exec {program}"]
        done = cluster.hosts[0].run(argv, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert (sorted(done.stdout.splitlines()), done.stderr) == (["0 of 2", "1 of 2"], "")


def test_a_bridge_that_looks_like_a_network_is_found_out() -> None:
    """Every host has a bridge of an unsuspicious name, with the same address."""
    with Cluster(2, launcher=True, decoy=False) as cluster:
        for host in cluster.hosts:
            words = ["link add br7 type bridge", "addr add 10.99.0.1/24 dev br7", "link set br7 up"]
            host_ip(host, words)
        network, _ = chosen(cluster)
    assert {own.interface for own in network.per_host.values()} == {"eth0"}


def test_a_firewall_between_two_hosts_is_named() -> None:
    with (
        Cluster(3, launcher=True) as cluster,
        cluster.hosts[1].no_tcp("1024-65535"),
        pytest.raises(StartError) as caught,
    ):
        chosen(cluster)
    assert "h2" in caught.value.what
    assert "firewall" in (caught.value.fix or "")


def host_ip(host: Any, commands: list[str]) -> None:
    host.run(["ip", "-batch", "-"], input="\n".join(commands).encode() + b"\n")


@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no ip to compare with")
def test_the_probe_sees_the_hosts_own_interfaces() -> None:
    with Cluster(1, launcher=True, interface_names=["enp5s0"]) as cluster, probes(cluster) as (_, fabrics):
        told = json.loads(cluster.hosts[0].run(["ip", "-j", "addr"], stdout=subprocess.PIPE).stdout)
    # Link-local addresses come to life while this goes on.
    assert {
        interface.name: [str(address.ip) for address in interface.addresses if address.scope != "link"]
        for interface in fabrics["h1"].interfaces
    } == {link["ifname"]: [entry["local"] for entry in link["addr_info"] if entry["scope"] != "link"] for link in told}
    assert Path("/sys/class/net/enp5s0").exists() is False
