"""From recorded hosts to the network that they share and the whole environment that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv6Address, ip_address
from typing import Any

import pytest
from fabric_cases import DGX_HCAS, EDR, PORT, WHOLE
from recorded_hosts import cluster, connections

from hvdtrain.errors import StartError
from hvdtrain.fabric.candidates import candidates, unusable
from hvdtrain.fabric.models import Address, Gid, HostFabric, Interface, host_fabric
from hvdtrain.fabric.plan import plan_fabric, rdma_for_mpi
from hvdtrain.fabric.routes import ChosenNetwork, HostNetwork, choose_network
from hvdtrain.fabric.schedule import Reach, pairs, reaches, targets
from hvdtrain.fabric.settings import FabricPlan


def choose(fabrics: dict[str, HostFabric], launcher: str | None = "h1", interfaces: Sequence[str] = (),
           cut: Sequence[str] = ()) -> ChosenNetwork:  # fmt: skip
    hosts = [host for host in fabrics if host.startswith("h")]
    found = connections(fabrics, cut, None if launcher in hosts else launcher, interfaces)
    return choose_network(hosts, fabrics, found, interfaces=interfaces, launcher=launcher)


def plan(fabrics: dict[str, HostFabric], controller: str, nccl: bool, fabric: str = "auto", hcas: Sequence[str] = (),
         already_set: dict[str, str] | None = None, network: ChosenNetwork | None = None) -> FabricPlan:  # fmt: skip
    return plan_fabric(
        fabric=fabric,
        hcas=hcas,
        fabrics=fabrics,
        network=network or choose(fabrics),
        controller=controller,
        nccl=nccl,
        already_set=already_set or {},
    )


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_plan_of_a_recorded_fabric(name: str) -> None:
    hosts, (controller, nccl, asked), (kind, environment, per_host, mca) = WHOLE[name]
    found = plan(cluster(**hosts), controller, nccl, asked)
    assert (found.kind, found.environment, found.per_host, found.mca) == (kind, environment, per_host, mca)
    # Each setting has one reason.
    variables = set(environment) | {variable for own in per_host.values() for variable in own}
    for start in (*variables, *(f"mpirun {parameter}" for parameter, _ in mca)):
        reasons = [reason for reason in found.reasons if reason.startswith((f"{start}=", f"{start} by host"))]
        assert len(reasons) == 1, start


def told(plan: FabricPlan, words: str) -> bool:
    return any(words in reason for reason in plan.reasons)


def test_a_mixed_cluster_is_warned_of() -> None:
    found = plan(cluster(["connectx6"] * 3, changes={3: EDR}), "gloo", True)
    assert told(found, "warning: mixed rates: h3 (100 Gb/sec (4X EDR)) below the others' 200 Gbit/s")


def test_a_slow_link_is_warned_of() -> None:
    slow = {2: {PORT.format("mlx5_3", "rate"): "50 Gb/sec (1X HDR)"}}
    found = plan(cluster(["dgx"] * 2, changes=slow), "gloo", True)
    assert told(found, "warning: h2: mlx5_3:1 left out: it runs at 50 Gbit/s (50 Gb/sec (1X HDR)), the others at 200")


def test_little_memlock_is_warned_of() -> None:
    found = plan(cluster(["roce"] * 2), "gloo", True)
    assert told(found, "warning: little memory may be pinned (h1 8192 KiB, h2 8192 KiB)")
    assert not told(plan(cluster(["connectx6"] * 2), "gloo", True), "pinned")


def test_gloo_on_infiniband_says_that_it_is_tcp() -> None:
    found = plan(cluster(["connectx6"] * 2), "gloo", False, "infiniband")
    assert told(found, "Gloo speaks TCP only: negotiation and CPU tensors go over InfiniBand's IP (IPoIB)")


def test_auto_says_why_it_is_only_tcp() -> None:
    found = plan(cluster(["connectx6", "ethernet"], nics=["", "eno1"]), "gloo", True, network=_over_eno1())
    assert found.kind == "tcp"
    assert told(found, "not InfiniBand: h2: it has no RDMA adapter")
    assert found.environment["NCCL_IB_DISABLE"] == "1"


def _over_eno1() -> ChosenNetwork:
    own = {
        host: HostNetwork("eno1", address, 24, 1000) for host, address in (("h1", "192.168.1.1"), ("h2", "10.1.0.2"))
    }
    return ChosenNetwork(own, {"h1": "192.168.1.1", "h2": "192.168.1.1"}, ("192.168.1.0/24", "10.1.0.0/24"), (), (), ())


def test_routed_subnets_are_set_host_by_host() -> None:
    fabrics = cluster(["connectx6", "ethernet"], nics=["", "eno1"])
    found = plan(fabrics, "mpi", False, network=replace(_over_eno1(), launcher_subnets=("10.9.0.0/16",)))
    assert found.per_host == {
        "h1": {"OMPI_MCA_btl_tcp_if_include": "192.168.1.0/24"},
        "h2": {"OMPI_MCA_btl_tcp_if_include": "10.1.0.0/24"},
    }
    assert ("oob_tcp_if_include", "192.168.1.0/24,10.1.0.0/24,10.9.0.0/16") in found.mca


def test_efa_without_the_plugin_is_tcp_and_says_so() -> None:
    fabrics = cluster(["efa"] * 2)
    fabrics["h2"] = replace(fabrics["h2"], nccl_ofi=None)
    found = plan(fabrics, "gloo", True)
    assert (found.kind, found.environment["NCCL_NET"]) == ("tcp", "Socket")
    assert told(found, "not EFA: h2: NCCL can't use it without the plugin aws-ofi-nccl, which wasn't found")


def test_efa_and_an_mpi_without_libfabric() -> None:
    fabrics = cluster(["efa"] * 2)
    assert fabrics["h2"].open_mpi
    fabrics["h2"] = replace(fabrics["h2"], open_mpi=replace(fabrics["h2"].open_mpi, mtl=()))
    with_nccl = plan(fabrics, "mpi", True)
    assert (with_nccl.kind, with_nccl.mca[0]) == ("efa", ("pml", "ob1"))
    assert told(with_nccl, "MPI over TCP, since Open MPI has no libfabric on every host; NCCL carries the GPU tensors")
    without = plan(fabrics, "mpi", False)
    assert (without.kind, without.mca[0]) == ("tcp", ("pml", "ob1"))


@pytest.mark.parametrize(
    ("machines", "changes", "asked", "job", "where", "what", "fix"),
    [
        (["ethernet", "ethernet"], {}, "infiniband", ("mpi", True), "h1", "it has no RDMA adapter", "install"),
        (
            ["roce", "roce"],
            {},
            "infiniband",
            ("mpi", True),
            "h1",
            "it has mlx5_0:1 (Ethernet, ACTIVE), mlx5_1:1 (Ethernet, DOWN)",
            "network.fabric: roce",
        ),
        (
            ["connectx6", "connectx6"],
            {2: {PORT.format("mlx5_0", "state"): "2: INIT"}},
            "infiniband",
            ("mpi", True),
            "h2",
            "it has mlx5_0:1 (InfiniBand, INIT)",
            "subnet manager",
        ),
        (
            ["connectx6", "connectx6"],
            {},
            "roce",
            ("mpi", True),
            "h1",
            "it has mlx5_0:1 (InfiniBand, ACTIVE)",
            "network.fabric: infiniband",
        ),
        (["efa", "efa"], {}, "infiniband", ("mpi", True), "h1", "rdmap19s27 (EFA)", "network.fabric: auto"),
        (
            ["dual-port", "dual-port"],
            {},
            "infiniband",
            ("gloo", False),
            None,
            "nothing in this job can use it: Gloo speaks TCP only",
            "controller: mpi",
        ),
        (
            ["bond", "bond"],
            {},
            "roce",
            ("mpi", False),
            "h1",
            "its Open MPI 4.1.6 was built without UCX",
            "install an Open MPI built with UCX",
        ),
        (
            ["roce", "roce"],
            {2: {PORT.format("mlx5_0", "gid_attrs/types/3"): "IB/RoCE v1"}},
            "roce",
            ("gloo", True),
            "h2",
            "no RoCE v2 GID for 10.20.0.2 on ens1f0np0, only RoCE v1",
            "cma_roce_mode",
        ),
    ],
)
def test_what_is_asked_for_and_is_not_there_is_an_error(
    machines: list[str], changes: Any, asked: str, job: tuple[str, bool], where: str | None, what: str, fix: str
) -> None:  # fmt: skip
    with pytest.raises(StartError) as caught:
        plan(cluster(machines, changes=changes), *job, asked)
    assert caught.value.where == where
    assert f"network.fabric is {asked}, and" in caught.value.what
    assert what in caught.value.what
    assert fix in (caught.value.fix or "")


def test_adapters_that_are_named_are_the_only_ones() -> None:
    fabrics = cluster(["dgx"] * 2)
    assert plan(fabrics, "gloo", True, hcas=["mlx5_6", "mlx5_7:1"]).environment["NCCL_IB_HCA"] == "=mlx5_6:1,mlx5_7:1"
    for hcas, what in ((["mlx5_99"], "network.hcas names mlx5_99"), (["mlx5_0:2"], "network.hcas names mlx5_0:2")):
        with pytest.raises(StartError, match=what):
            plan(fabrics, "gloo", True, "infiniband", hcas)
    with pytest.raises(StartError, match=r"mlx5_1:1 \(InfiniBand, DOWN\)"):
        plan(cluster(["dual-port"] * 2), "mpi", False, "infiniband", ["mlx5_1"])


def test_roce_where_the_network_is_elsewhere_tells_where_it_is() -> None:
    fabrics = cluster(["roce"] * 2)
    network = choose(fabrics, interfaces=["eno1"])
    assert plan(fabrics, "gloo", True, network=network).kind == "tcp"
    with pytest.raises(
        StartError, match=r"no RoCE v2 GID for 192\.168\.1\.1 on eno1; mlx5_0:1 has 10\.20\.0\.1 on ens1f0np0"
    ):
        plan(fabrics, "gloo", True, "roce", network=network)


def test_the_storage_vlan_of_a_bond_has_its_own_gid() -> None:
    fabrics = cluster(["bond"] * 2)
    found = plan(fabrics, "gloo", True, network=choose(fabrics, interfaces=["10.31.0.0/24"]))
    assert (found.environment["NCCL_SOCKET_IFNAME"], found.environment["NCCL_IB_GID_INDEX"]) == ("=bond0.31", "3")


def test_roce_on_eight_rails() -> None:
    """The machine with eight adapters, on Ethernet: each has a subnet of its own, and storage a GID like theirs."""
    fabrics = {host: _on_rails(own) for host, own in cluster(["dgx"] * 2).items()}
    network = choose(fabrics, interfaces=["rail0"])
    found = plan(fabrics, "gloo", True, network=network)
    assert (found.kind, found.environment["NCCL_IB_HCA"]) == ("roce", f"={DGX_HCAS}")
    assert (found.environment["NCCL_IB_GID_INDEX"], found.environment["NCCL_NET_GDR_LEVEL"]) == ("3", "PXB")
    assert told(found, "h1: mlx5_4:1 left out: no GPU is near it")
    # Without GPUs nobody knows what the other adapters are for.
    alone = {host: replace(own, gpus=()) for host, own in fabrics.items()}
    assert plan(alone, "gloo", True, network=network).environment["NCCL_IB_HCA"] == "=mlx5_0:1"
    both = plan(alone, "gloo", True, hcas=["mlx5_0", "mlx5_6"], network=network)
    assert both.environment["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_6:1"


def _on_rails(fabric: HostFabric) -> HostFabric:
    number = int(fabric.host[1:])
    hcas, interfaces = [], list(fabric.interfaces)
    for place, hca in enumerate(fabric.hcas):
        ip = ip_address(f"10.50.{place}.{number}")
        gid = Gid(3, IPv6Address(f"::ffff:{ip}"), "RoCE v2", f"rail{place}")
        hcas.append(replace(hca, ports=(replace(hca.ports[0], link_layer="Ethernet", gids=(gid,)),)))
        address = Address(ip, 24, "global")
        interfaces.append(
            Interface(f"rail{place}", 50 + place, "ethernet", "up", 200_000, "mlx5_core", (), None, (address,))
        )
    return replace(fabric, hcas=tuple(hcas), interfaces=tuple(interfaces))


def test_gid_indexes_may_differ_by_host() -> None:
    """The second host's table has no entry for an address that the first has, and so is shorter."""
    moved = {
        PORT.format("mlx5_0", f"gid_attrs/types/{index}"): kind for index, kind in ((1, "IB/RoCE v1"), (2, "RoCE v2"))
    }
    found = plan(cluster(["roce"] * 2, changes={2: moved}), "mpi", True)
    assert {host: own["NCCL_IB_GID_INDEX"] for host, own in found.per_host.items()} == {"h1": "3", "h2": "2"}
    assert {host: own["UCX_IB_GID_INDEX"] for host, own in found.per_host.items()} == {"h1": "3", "h2": "2"}


def test_gpus_that_nothing_lets_adapters_reach() -> None:
    fabrics = {host: replace(own, gpu_direct=None) for host, own in cluster(["connectx6"] * 2).items()}
    found = plan(fabrics, "gloo", True)
    assert found.environment["NCCL_NET_GDR_LEVEL"] == "LOC"
    assert told(found, "modprobe nvidia-peermem")


def test_gpus_far_from_the_adapters_that_are_named() -> None:
    found = plan(cluster(["dgx"] * 2), "gloo", True, hcas=["mlx5_0", "mlx5_1"])
    assert found.environment["NCCL_NET_GDR_LEVEL"] == "PHB"


def test_what_the_user_has_set_stays() -> None:
    own = {"NCCL_IB_HCA": "mlx5", "OMPI_MCA_pml": "ob1", "UCX_TLS": "rc,sm,self", "LANG": "C"}
    found = plan(cluster(["connectx6"] * 2), "mpi", True, already_set=own)
    assert not {"NCCL_IB_HCA", "UCX_TLS"} & set(found.environment)
    assert "pml" not in dict(found.mca)
    assert "NCCL_IB_HCA stays mlx5, as you have set it (NCCL_IB_HCA)" in found.reasons
    assert "mpirun's pml stays ob1, as you have set it (OMPI_MCA_pml)" in found.reasons
    assert not told(found, "LANG")


def test_an_open_mpi_5_has_another_name_for_shared_memory() -> None:
    fabrics = cluster(["ethernet"] * 2)
    for host, one in fabrics.items():
        assert one.open_mpi
        fabrics[host] = replace(one, open_mpi=replace(one.open_mpi, version="5.0.3", btl=("self", "sm", "tcp")))
    assert dict(plan(fabrics, "mpi", False).mca)["btl"] == "tcp,self,sm"


def test_ipv6_and_an_open_mpi_without_it() -> None:
    changes = {2: {"ompi_info.txt": 'ompi:version:full:4.1.4\noptions:ipv6:no\nmca:pml:ob1:version:"a"'}}
    with pytest.raises(StartError, match="its Open MPI was built without IPv6"):
        plan(cluster(["ipv6"] * 2, changes=changes), "mpi", False)


def test_gloo_takes_an_interfaces_first_address_only() -> None:
    words = (
        '[{"ifname": "eth0", "addr_info": ['
        '{"family": "inet", "local": "172.20.5.2", "prefixlen": 30, "scope": "global"},'
        '{"family": "inet", "local": "10.1.0.2", "prefixlen": 24, "scope": "global"}]}]'
    )
    fabrics = cluster(["ethernet"] * 2, changes={2: {"ip-addr.json": words}})
    with pytest.raises(StartError, match=r"which is 172\.20\.5\.2 on eth0, and the other hosts reach 10\.1\.0\.2"):
        plan(fabrics, "gloo", False)
    assert plan(fabrics, "mpi", False).kind == "tcp"


# The network.


def test_docker_and_libvirt_are_never_chosen() -> None:
    fabrics = cluster(["ethernet"] * 3)
    assert [str(one.address.ip) for one in candidates(fabrics["h2"])] == ["10.1.0.2"]
    network = choose(fabrics)
    assert {host: own.interface for host, own in network.per_host.items()} == dict.fromkeys(fabrics, "eth0")
    assert network.subnets == ("10.1.0.0/24",)
    assert any("never used: docker0" in reason for reason in network.reasons)


def test_a_bridge_with_an_innocent_name_is_told_by_its_identity() -> None:
    """Each host has a br0 with the same address, which is faster, and meets only itself there."""
    fabrics = cluster(["ethernet"] * 2)
    for host, one in fabrics.items():
        renamed = (
            replace(interface, name="br0", speed_mbit=100_000) if interface.name == "docker0" else interface
            for interface in one.interfaces
        )
        fabrics[host] = replace(one, interfaces=tuple(renamed))
    network = choose(fabrics)
    assert network.per_host["h1"].interface == "eth0"
    assert (
        "network 172.17.0.0/16 isn't used: h1 can't reach h2 at 172.17.0.1: another host answers at this address"
        in network.reasons
    )


def test_the_fastest_network_that_works() -> None:
    fabrics = cluster(["roce"] * 3)
    assert choose(fabrics).subnets == ("10.20.0.0/24",)
    network = choose(fabrics, cut=["10.20.0.3"])
    assert network.subnets == ("192.168.1.0/24",)
    assert "network 10.20.0.0/24 isn't used: h1 can't reach h3 at 10.20.0.3: no answer" in network.reasons


@pytest.mark.parametrize("wanted", ["eno1", "192.168.1.0/24", "192.168.0.0/16"])
def test_interfaces_that_are_named_are_the_only_ones(wanted: str) -> None:
    network = choose(cluster(["roce"] * 2), interfaces=[wanted])
    assert {own.interface for own in network.per_host.values()} == {"eno1"}


def test_a_name_that_a_host_has_not() -> None:
    fabrics = cluster(["ethernet"] * 2, nics=["eno1", "enp5s0"])
    with pytest.raises(StartError, match=r"network\.interfaces \(eno1\): lo \(loopback\), enp5s0 \(not in") as caught:
        choose(fabrics, interfaces=["eno1"])
    assert caught.value.where == "h2"


def test_a_bridge_that_the_user_names_is_allowed() -> None:
    own = cluster(["ethernet"])["h1"]
    assert [one.interface.name for one in candidates(own, ["docker0"])] == ["docker0"]
    assert candidates(own, ["lo"]) == []


def test_no_network_for_a_pair_names_the_pair() -> None:
    with pytest.raises(StartError) as caught:
        choose(cluster(["ethernet"] * 3), cut=["10.1.0.2"])
    assert "on 10.1.0.0/24 h1 can't reach h2 at 10.1.0.2: no answer" in caught.value.what
    assert "firewall" in (caught.value.fix or "")


def test_hosts_without_a_common_subnet() -> None:
    fabrics = cluster(["ethernet", "dual-port"])
    with pytest.raises(StartError) as caught:
        choose(fabrics)
    assert "h1 has 10.1.0.0/24; h2 has 192.168.4.0/24; h1 can't reach h2: no answer" in caught.value.what


def test_a_host_with_nothing_that_could_do() -> None:
    fabrics = cluster(["ethernet"] * 2, changes={2: {"sys/class/net/eth0/operstate": "down"}})
    with pytest.raises(StartError) as caught:
        choose(fabrics)
    assert caught.value.where == "h2"
    assert "lo (loopback), eth0 (down), docker0 (of the host's own containers" in caught.value.what


def routed(tester: str, target: str, address: str, local: str) -> Reach:
    return Reach(tester, target, address, True, None, 0.001, local)


def test_subnets_that_are_routed_to_each_other() -> None:
    """Each host has a fast subnet of its own, as in a routed data centre, and a slow one that all share."""
    fabrics = cluster(["roce"] * 2)
    fabrics["h2"] = _renumbered(fabrics["h2"], "10.20.0.", "10.21.0.")
    slow = [routed("h1", "h2", "192.168.1.2", "192.168.1.1"), routed("h2", "h1", "192.168.1.1", "192.168.1.2")]
    fast = [routed("h1", "h2", "10.21.0.2", "10.20.0.1"), routed("h2", "h1", "10.20.0.1", "10.21.0.2")]
    network = choose_network(["h1", "h2"], fabrics, slow + fast, launcher="h1")
    assert network.subnets == ("10.20.0.0/24", "10.21.0.0/24")
    assert network.launcher_address == {"h1": "10.20.0.1", "h2": "10.20.0.1"}
    # The same, but the way there goes over the slow interface: then it is no faster.
    detour = [routed("h1", "h2", "10.21.0.2", "192.168.1.1"), routed("h2", "h1", "10.20.0.1", "192.168.1.2")]
    assert choose_network(["h1", "h2"], fabrics, slow + detour).subnets == ("192.168.1.0/24",)


def _renumbered(fabric: HostFabric, old: str, new: str) -> HostFabric:
    return replace(
        fabric,
        interfaces=tuple(
            replace(
                interface,
                addresses=tuple(
                    replace(address, ip=ip_address(str(address.ip).replace(old, new)))
                    for address in interface.addresses
                ),
            )
            for interface in fabric.interfaces
        ),
    )


def test_ipv4_comes_before_ipv6_and_link_local_never() -> None:
    fabrics = cluster(["ipv6"] * 2)
    assert [str(one.address.ip) for one in candidates(fabrics["h1"])] == ["fd00:5::1"]
    assert choose(fabrics).is_ipv6
    only_local = cluster(["ethernet"] * 1)["h1"].interface("veth7ab1c2d")
    assert only_local
    assert unusable(only_local) == "link-local addresses only"


def test_a_link_local_ipv4_address_is_one_whatever_its_scope() -> None:
    own = cluster(["ethernet"])["h1"]
    address = Address(ip_address("169.254.7.1"), 16, "global")
    assert candidates(replace(own, interfaces=(replace(own.interfaces[1], addresses=(address,)),))) == []


def test_a_slow_interface_is_warned_of() -> None:
    fabrics = cluster(["ethernet"] * 3, changes={2: {"sys/class/net/eth0/speed": "1000"}})
    assert any("warning: h2 at 1 Gbit/s, the others at 10" in reason for reason in choose(fabrics).reasons)


def test_ipoib_is_as_fast_as_its_port_where_the_driver_is_silent() -> None:
    changes = {number: {"sys/class/net/ib0/speed": "-1"} for number in (1, 2)}
    network = choose(cluster(["connectx6"] * 2, changes=changes))
    assert network.per_host["h2"] == HostNetwork("ib0", "10.10.0.2", 16, 200_000)


def test_one_host_talks_with_itself() -> None:
    network = choose(cluster(["ethernet"]))
    assert network.per_host == {"h1": HostNetwork("lo", "127.0.0.1", 8, None)}


def test_the_launching_machine_apart_from_the_hosts() -> None:
    """It has the hosts' slow network only, and so mpirun's daemons need that too."""
    fabrics = cluster(["roce"] * 3)
    launcher = fabrics.pop("h3")
    slow = tuple(interface for interface in launcher.interfaces if interface.name == "eno1")
    fabrics["desk"] = replace(launcher, host="desk", interfaces=slow)
    network = choose(fabrics, launcher="desk")
    assert set(network.per_host) == {"h1", "h2"}
    assert network.launcher_address == {"h1": "192.168.1.3", "h2": "192.168.1.3"}
    assert (network.subnets, network.launcher_subnets) == (("10.20.0.0/24",), ("192.168.1.0/24",))
    assert (
        dict(plan(fabrics, "mpi", False, "tcp", network=network).mca)["oob_tcp_if_include"]
        == "10.20.0.0/24,192.168.1.0/24"
    )
    with pytest.raises(StartError, match="h1 can't reach the launching machine") as caught:
        choose(fabrics, launcher="desk", cut=["192.168.1.3"])
    assert caught.value.where == "h1"


def test_a_host_that_nothing_was_tried_with() -> None:
    fabrics = cluster(["ethernet"] * 3)
    known = [reach for reach in connections(fabrics) if "h3" not in (reach.tester, reach.target)]
    with pytest.raises(StartError, match="no connection with h3 was tried"):
        choose_network(list(fabrics), fabrics, known)


# What is tried.


def test_all_pairs_of_few_hosts_and_few_pairs_of_many() -> None:
    few = [f"n{number}" for number in range(16)]
    assert len(pairs(few)) == 16 * 15
    many = [f"n{number}" for number in range(256)]
    tried = pairs(many)
    assert len(tried) == len(set(tried)) <= 256 * 8 + 2 * 255
    assert {tester for tester, _ in tried} == {target for _, target in tried} == set(many)
    assert all(tester != target for tester, target in tried)
    assert {("n5", f"n{5 + step}") for step in (1, 2, 4, 8, 16, 32, 64, 128)} <= set(tried)
    assert {("n0", host) for host in many[1:]} | {(host, "n0") for host in many[1:]} <= set(tried)
    assert [pair for pair in pairs(few, "desk") if "desk" in pair] == [(host, "desk") for host in few]
    assert pairs(["n0"], "n0") == ()


def test_targets_are_addresses_that_may_do() -> None:
    fabrics = cluster(["roce"] * 2)
    listeners = {host: {"identity": host, "ports": {"4": 5000}} for host in fabrics}
    wanted = targets(pairs(["h1", "h2"]), fabrics, listeners)
    assert wanted["h1"] == [
        {"key": "h2 10.20.0.2", "address": "10.20.0.2", "port": 5000, "identity": "h2"},
        {"key": "h2 192.168.1.2", "address": "192.168.1.2", "port": 5000, "identity": "h2"},
    ]
    only = targets(pairs(["h1", "h2"]), fabrics, listeners, ["eno1"])
    assert [want["address"] for want in only["h1"]] == ["192.168.1.2"]
    assert targets(pairs(["h1", "h2"]), fabrics, {"h1": listeners["h1"]}).keys() == {"h2"}


def test_answers_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"h1: connect: 'h2 10\.0\.0\.2'"):
        reaches("h1", {"h2 10.0.0.2": {"ok": "yes"}})


# Hosts that tell something else than the probe does.


@pytest.mark.parametrize(
    ("section", "facts", "message"),
    [
        ("network", [], r"h1: network is \[\], not an object"),
        ("network", {"interfaces": {}}, r"h1: network\.interfaces is \{\}, not a list"),
        ("network", {"interfaces": ["eth0"]}, r"h1: network\.interfaces\[0\] is 'eth0', not an object"),
        ("network", {"interfaces": [{"name": 7, "kind": "ethernet"}]}, r"interfaces\[0\]\.name is 7, not text"),
        (
            "network",
            {"interfaces": [{"name": "a", "kind": "b", "speed_mbit": True}]},
            r"interfaces\[0\]\.speed_mbit is True, not a whole number",
        ),
        (
            "network",
            {"interfaces": [{"name": "a", "kind": "b", "addresses": [{"address": "10.0.0.300"}]}]},
            r"addresses\[0\]\.address is '10\.0\.0\.300', which it can't be",
        ),
        (
            "network",
            {"interfaces": [{"name": "a", "kind": "b", "addresses": [{"address": "10.0.0.3", "prefix_length": 64}]}]},
            r"prefix_length is 64, which it can't be",
        ),
        (
            "infiniband",
            {"hcas": [{"name": "mlx5_0", "ports": [{"port": 1, "rate_gbit_per_s": "fast"}]}]},
            r"hcas\[0\]\.ports\[0\]\.rate_gbit_per_s is 'fast', not a number",
        ),
        ("infiniband", {"distances": {"mlx5_0": {"gpu": 3}}}, r"distances\.mlx5_0\.gpu is 3, not text"),
        ("infiniband", {"open_mpi": {"pml": ["ucx", 4]}}, r"open_mpi\.pml\[1\] is 4, not text"),
        ("infiniband", {"memlock_soft_bytes": "x" * 1000}, r"memlock_soft_bytes is 'x{59}…, not a whole number"),
    ],
)
def test_a_lying_host_is_named_with_the_field(section: str, facts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        host_fabric("h1", {section: facts})


def test_a_host_that_tells_nothing_has_nothing() -> None:
    assert host_fabric("h1", {}) == HostFabric("h1", ())


@pytest.mark.parametrize(
    ("machines", "asked", "expected"),
    [
        (["connectx6"] * 2, "auto", "InfiniBand"),
        (["connectx6"] * 2, "tcp", None),
        (["roce"] * 2, "auto", "RoCE"),
        (["ethernet"] * 2, "auto", None),
        (["ethernet"] * 2, "infiniband", None),
    ],
)
def test_what_mpi_would_carry_tensors_over(machines: list[str], asked: str, expected: str | None) -> None:
    fabrics = cluster(machines)
    assert rdma_for_mpi(fabric=asked, hcas=(), fabrics=fabrics, network=choose(fabrics)) == expected
    # Without UCX MPI has no way to the adapters.
    without = {
        host: replace(one, open_mpi=one.open_mpi and replace(one.open_mpi, pml=("ob1",)))
        for host, one in fabrics.items()
    }
    assert rdma_for_mpi(fabric=asked, hcas=(), fabrics=without, network=choose(without)) is None
