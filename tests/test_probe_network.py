"""What the probe finds of interfaces and RDMA adapters: here, and in trees recorded elsewhere."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from recorded_hosts import unpack

from hvdtrain.probe import infiniband, network

DGX_HCAS = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9", "mlx5_10"]


def interfaces(root: Path) -> dict[str, dict[str, Any]]:
    return {interface["name"]: interface for interface in network.collect(root)["interfaces"]}


def hcas(root: Path) -> dict[str, dict[str, Any]]:
    return {hca["name"]: hca for hca in infiniband.collect(root)["hcas"]}


@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no ip to compare with")
def test_this_machine_agrees_with_ip() -> None:
    told = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, check=True).stdout)
    expected = {
        link["ifname"]: [
            (entry["family"], entry["local"], entry["prefixlen"], entry["scope"]) for entry in link["addr_info"]
        ]
        for link in told
    }
    found = interfaces(Path("/"))
    assert {
        name: [
            tuple(address[key] for key in ("family", "address", "prefix_length", "scope"))
            for address in one["addresses"]
        ]
        for name, one in found.items()
    } == expected
    assert {name: one["mtu"] for name, one in found.items()} == {link["ifname"]: link["mtu"] for link in told}
    assert found["lo"]["kind"] == "loopback"


def test_this_machine_without_adapters_tells_so() -> None:
    facts = infiniband.collect()
    if not Path("/sys/class/infiniband").exists():
        assert (facts["hcas"], facts["distances"]) == ([], {})
    if shutil.which("ompi_info"):
        assert "ob1" in facts["open_mpi"]["pml"]
        assert {"self", "tcp"} <= set(facts["open_mpi"]["btl"])


def test_bond(tmp_path: Path) -> None:
    found = interfaces(unpack("bond", tmp_path, 4))
    assert {name: one["kind"] for name, one in found.items()} == {
        "lo": "loopback",
        "ens2f0": "ethernet",
        "ens2f1": "ethernet",
        "bond0": "bond",
        "bond0.31": "vlan",
    }
    assert (found["bond0"]["bond_slaves"], found["bond0"]["speed_mbit"]) == (["ens2f0", "ens2f1"], 50000)
    slave = found["ens2f1"]
    assert (slave["master"], slave["driver"], slave["pci_address"], slave["numa_node"]) == (
        "bond0",
        "mlx5_core",
        "0000:81:00.1",
        1,
    )
    assert found["bond0"]["addresses"] == [
        {"family": "inet", "address": "10.30.0.4", "prefix_length": 24, "scope": "global"}
    ]


def test_ipoib_bridges_and_speeds_that_nobody_tells(tmp_path: Path) -> None:
    ib0 = interfaces(unpack("connectx6", tmp_path / "ib"))["ib0"]
    assert (ib0["kind"], ib0["speed_mbit"], ib0["mtu"], ib0["pci_address"]) == (
        "infiniband",
        200000,
        2044,
        "0000:24:00.0",
    )
    plain = interfaces(unpack("ethernet", tmp_path / "plain"))
    assert {name: one["kind"] for name, one in plain.items()} == {
        "lo": "loopback",
        "eth0": "ethernet",
        "docker0": "bridge",
        "virbr0": "bridge",
        "veth7ab1c2d": "virtual",
    }
    assert plain["veth7ab1c2d"]["master"] == "docker0"
    assert plain["eth0"]["numa_node"] is None
    virtual = interfaces(unpack("ipv6", tmp_path / "six"))["eth0"]
    assert (virtual["speed_mbit"], virtual["driver"], virtual["pci_address"]) == (None, "virtio_net", "0000:00:03.0")


def test_an_adapter_with_all_that_it_tells(tmp_path: Path) -> None:
    (adapter,) = infiniband.collect(unpack("connectx6", tmp_path, 3))["hcas"]
    assert adapter == {
        "name": "mlx5_0",
        "node_type": "CA",
        "board_id": "MT_0000000223",
        "firmware": "20.31.1014",
        "hca_type": "MT4123",
        "driver": "mlx5_core",
        "vendor": "0x15b3",
        "pci_address": "0000:24:00.0",
        "numa_node": 1,
        "net_devices": ["ib0"],
        "ports": [
            {
                "port": 1,
                "link_layer": "InfiniBand",
                "rate": "200 Gb/sec (4X HDR)",
                "rate_gbit_per_s": 200.0,
                "state": "ACTIVE",
                "physical_state": "LinkUp",
                "lid": 0x13,
                "gids": [
                    {
                        "index": 0,
                        "gid": "fe80:0000:0000:0000:b859:9f03:00d4:e7d3",
                        "type": "IB/RoCE v1",
                        "net_device": None,
                    }
                ],
                "counters": {"symbol_error": 0, "link_downed": 1, "port_rcv_errors": 0, "port_xmit_discards": 0},
            }
        ],
    }


def test_gid_tables_without_their_empty_entries(tmp_path: Path) -> None:
    port = hcas(unpack("roce", tmp_path, 7))["mlx5_0"]["ports"][0]
    assert [(gid["index"], gid["type"], gid["net_device"]) for gid in port["gids"]] == [
        (0, "IB/RoCE v1", "ens1f0np0"),
        (1, "RoCE v2", "ens1f0np0"),
        (2, "IB/RoCE v1", "ens1f0np0"),
        (3, "RoCE v2", "ens1f0np0"),
    ]
    assert port["gids"][3]["gid"] == "0000:0000:0000:0000:0000:ffff:0a14:0007"
    assert port["counters"] == {"out_of_sequence": 0, "packet_seq_err": 0}


def test_ports_that_are_down(tmp_path: Path) -> None:
    found = hcas(unpack("dual-port", tmp_path))
    ports = {name: hca["ports"][0] for name, hca in found.items()}
    assert [(name, port["state"], port["physical_state"]) for name, port in ports.items()] == [
        ("mlx5_0", "ACTIVE", "LinkUp"),
        ("mlx5_1", "DOWN", "Polling"),
    ]


def test_adapters_in_their_natural_order_and_their_distances_to_gpus(tmp_path: Path) -> None:
    facts = infiniband.collect(unpack("dgx", tmp_path))
    assert [hca["name"] for hca in facts["hcas"]] == DGX_HCAS
    assert len(facts["gpus"]) == 8
    near = {
        name: sorted(gpu for gpu, distance in to_gpus.items() if distance == "PXB")
        for name, to_gpus in facts["distances"].items()
    }
    first, last = ["0000:07:00.0", "0000:0f:00.0"], ["0000:b7:00.0", "0000:bd:00.0"]
    assert (near["mlx5_0"], near["mlx5_1"], near["mlx5_9"], near["mlx5_4"]) == (first, first, last, [])
    assert facts["distances"]["mlx5_0"]["0000:b7:00.0"] == "SYS"
    # mlx5_4 hangs on another host bridge of the NUMA node of the second pair.
    assert facts["distances"]["mlx5_4"]["0000:47:00.0"] == "NODE"


@pytest.mark.parametrize(
    ("one", "other", "same_node", "expected"),
    [
        ("pci0/p/up/down1/gpu", "pci0/p/up/down2/hca", True, "PIX"),
        ("pci0/p/gpu.0", "pci0/p/gpu.1", True, "PIX"),
        ("pci0/p/up/d1/up2/d3/gpu", "pci0/p/up/d2/hca", True, "PXB"),
        ("pci0/p1/gpu", "pci0/p2/hca", True, "PHB"),
        ("pci0/p1/gpu", "pci1/p2/hca", True, "NODE"),
        ("pci0/p1/gpu", "pci1/p2/hca", False, "SYS"),
    ],
)
def test_distance(one: str, other: str, same_node: bool, expected: str) -> None:
    assert infiniband.pci_distance(one.split("/"), other.split("/"), same_node) == expected


@pytest.mark.parametrize(
    ("machine", "expected"), [("connectx6", "nvidia_peermem"), ("roce", "dma-buf"), ("efa", None), ("bond", None)]
)
def test_what_lets_adapters_reach_gpus(tmp_path: Path, machine: str, expected: str | None) -> None:
    assert infiniband.collect(unpack(machine, tmp_path))["gpu_direct"] == expected


def test_dma_buf_needs_a_new_kernel(tmp_path: Path) -> None:
    root = unpack("roce", tmp_path, changes={"proc/sys/kernel/osrelease": "5.4.0-150-generic"})
    assert infiniband.collect(root)["gpu_direct"] is None


def test_efa(tmp_path: Path) -> None:
    facts = infiniband.collect(unpack("efa", tmp_path))
    assert [(hca["name"], hca["driver"], hca["vendor"]) for hca in facts["hcas"]] == [
        ("rdmap19s27", "efa", "0x1d0f"),
        ("rdmap35s27", "efa", "0x1d0f"),
    ]
    assert facts["nccl_ofi"] == "/opt/amazon/ofi-nccl/lib/libnccl-net.so"
    assert facts["distances"]["rdmap19s27"]["0000:13:1c.0"] == "PIX"


def test_limits_and_open_mpi(tmp_path: Path) -> None:
    roce = infiniband.collect(unpack("roce", tmp_path / "roce"))
    assert roce["memlock_soft_bytes"] == 8 << 20
    assert roce["open_mpi"] == {
        "version": "4.1.4",
        "ipv6": True,
        "pml": ["ob1", "ucx"],
        "btl": ["self", "tcp", "vader"],
        "mtl": [],
    }
    assert infiniband.collect(unpack("connectx6", tmp_path / "ib"))["memlock_soft_bytes"] == -1


def test_open_mpi_by_its_files_where_nothing_else_matters(tmp_path: Path) -> None:
    components = tmp_path / "usr/lib/x86_64-linux-gnu/openmpi/lib/openmpi3"
    components.mkdir(parents=True)
    for name in (
        "mca_pml_ob1.so",
        "mca_btl_tcp.so",
        "mca_btl_self.so",
        "mca_coll_tuned.so",
        "libmca_x.so",
        "mca_btl_x.la",
    ):
        (components / name).touch()
    (tmp_path / "usr/bin").mkdir()
    (tmp_path / "usr/bin/mpirun").touch()
    (tmp_path / "ompi_info.txt").write_text("ompi:version:full:5.0.3\nmca:pml:ob1:version:x\n")
    by_files = {"version": None, "ipv6": None, "pml": ["ob1"], "btl": ["self", "tcp"], "mtl": []}
    assert infiniband.collect(tmp_path)["open_mpi"] == by_files
    # Addresses as the kernel lists them: address, index, length of the prefix, scope, flags, name.
    addresses = tmp_path / "proc/net/if_inet6"
    addresses.parent.mkdir(parents=True)
    addresses.write_text(f"fe80{'0' * 27}1 02 40 20 80 eth0\n")
    assert infiniband.collect(tmp_path)["open_mpi"] == by_files
    addresses.write_text(f"fd00{'0' * 27}1 02 40 00 80 eth0\n")
    assert infiniband.collect(tmp_path)["open_mpi"]["version"] == "5.0.3"


def test_an_empty_machine(tmp_path: Path) -> None:
    assert network.collect(tmp_path) == {"interfaces": []}
    assert infiniband.collect(tmp_path) == {
        "hcas": [],
        "gpus": [],
        "distances": {},
        "gpu_direct": None,
        "memlock_soft_bytes": None,
        "open_mpi": None,
        "nccl_ofi": None,
    }


def test_files_that_make_no_sense_are_none(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    changes = {
        f"{port}/rate": "fast",
        f"{port}/lid": "none",
        f"{port}/state": "",
        f"{port}/counters/symbol_error": "many",
    }
    found = hcas(unpack("connectx6", tmp_path, changes=changes))["mlx5_0"]["ports"][0]
    assert (found["rate"], found["rate_gbit_per_s"], found["lid"], found["state"]) == ("fast", None, None, "")
    assert "symbol_error" not in found["counters"]


@pytest.mark.parametrize("module", [network, infiniband])
def test_hosts_with_python_3_8_can_run_it(module: Any) -> None:
    ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
