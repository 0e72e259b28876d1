"""Recorded fabrics, and the whole plan of each."""

from __future__ import annotations

from typing import Any

PORT = "sys/class/infiniband/{}/ports/1/{}"
EDR = {PORT.format("mlx5_0", "rate"): "100 Gb/sec (4X EDR)"}
DGX_HCAS = "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_6:1,mlx5_7:1,mlx5_8:1,mlx5_9:1"
DGX_LESS = DGX_HCAS.replace("mlx5_3:1,", "")

# Machines with interface names and changed files; controller, NCCL, fabric asked for; and all that follows: kind,
# environment, environment by host, MCA parameters.
WHOLE: dict[
    str, tuple[dict[str, Any], tuple[str, bool, str], tuple[str, dict[str, str], dict[str, Any], tuple[Any, ...]]]
] = {
    "connectx6 infiniband, nccl and gloo": (
        {"machines": ["connectx6"] * 2},
        ("gloo", True, "auto"),
        (
            "infiniband",
            {
                "HOROVOD_GLOO_IFACE": "ib0",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.10.0.1",
                "NCCL_IB_HCA": "=mlx5_0:1",
                "NCCL_NET_GDR_LEVEL": "PXB",
                "NCCL_SOCKET_IFNAME": "=ib0",
            },
            {},
            (),
        ),
    ),
    "connectx6 infiniband, nccl and mpi": (
        {"machines": ["connectx6"] * 2},
        ("mpi", True, "infiniband"),
        (
            "infiniband",
            {
                "NCCL_IB_HCA": "=mlx5_0:1",
                "NCCL_NET_GDR_LEVEL": "PXB",
                "NCCL_SOCKET_IFNAME": "=ib0",
                "UCX_NET_DEVICES": "mlx5_0:1",
                "UCX_TLS": "ib,sm,self",
            },
            {},
            (("pml", "ucx"), ("btl", "^openib,uct,ofi"), ("oob_tcp_if_include", "10.10.0.0/16")),
        ),
    ),
    "connectx6 infiniband, gloo on cpus": (
        {"machines": ["connectx6"] * 2},
        ("gloo", False, "infiniband"),
        ("infiniband", {"HOROVOD_GLOO_IFACE": "ib0", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.10.0.1"}, {}, ()),
    ),
    "infiniband there, tcp asked for": (
        {"machines": ["connectx6"] * 2},
        ("mpi", True, "tcp"),
        (
            "tcp",
            {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=ib0"},
            {},
            (
                ("pml", "ob1"),
                ("btl", "tcp,self,vader"),
                ("btl_tcp_if_include", "10.10.0.0/16"),
                ("oob_tcp_if_include", "10.10.0.0/16"),
            ),
        ),
    ),
    "roce, dma-buf, gpus across the host bridge": (
        {"machines": ["roce"] * 2},
        ("mpi", True, "auto"),
        (
            "roce",
            {
                "NCCL_IB_GID_INDEX": "3",
                "NCCL_IB_HCA": "=mlx5_0:1",
                "NCCL_NET_GDR_LEVEL": "PHB",
                "NCCL_SOCKET_IFNAME": "=ens1f0np0",
                "UCX_IB_GID_INDEX": "3",
                "UCX_NET_DEVICES": "mlx5_0:1",
                "UCX_TLS": "ib,sm,self",
            },
            {},
            (("pml", "ucx"), ("btl", "^openib,uct,ofi"), ("oob_tcp_if_include", "10.20.0.0/24")),
        ),
    ),
    "roce with an old kernel on one host": (
        {"machines": ["roce"] * 2, "changes": {2: {"proc/sys/kernel/osrelease": "5.4.0"}}},
        ("gloo", True, "roce"),
        (
            "roce",
            {
                "HOROVOD_GLOO_IFACE": "ens1f0np0",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.20.0.1",
                "NCCL_IB_GID_INDEX": "3",
                "NCCL_IB_HCA": "=mlx5_0:1",
                "NCCL_SOCKET_IFNAME": "=ens1f0np0",
            },
            {"h1": {"NCCL_NET_GDR_LEVEL": "PHB"}, "h2": {"NCCL_NET_GDR_LEVEL": "LOC"}},
            (),
        ),
    ),
    "bonded roce, nccl, mpi without ucx": (
        {"machines": ["bond"] * 2},
        ("mpi", True, "auto"),
        (
            "roce",
            {"NCCL_IB_GID_INDEX": "5", "NCCL_IB_HCA": "=mlx5_bond_0:1", "NCCL_SOCKET_IFNAME": "=bond0"},
            {},
            (
                ("pml", "ob1"),
                ("btl", "tcp,self,vader"),
                ("btl_tcp_if_include", "10.30.0.0/24"),
                ("oob_tcp_if_include", "10.30.0.0/24"),
            ),
        ),
    ),
    "bonded roce, nothing that could use it": (
        {"machines": ["bond"] * 2},
        ("gloo", False, "auto"),
        ("tcp", {"HOROVOD_GLOO_IFACE": "bond0", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.30.0.1"}, {}, ()),
    ),
    "eight adapters by eight gpus, storage left alone": (
        {"machines": ["dgx"] * 2},
        ("mpi", True, "auto"),
        (
            "infiniband",
            {
                "NCCL_IB_HCA": f"={DGX_HCAS}",
                "NCCL_NET_GDR_LEVEL": "PXB",
                "NCCL_SOCKET_IFNAME": "=enp97s0f0",
                "UCX_NET_DEVICES": DGX_HCAS,
                "UCX_TLS": "ib,sm,self",
            },
            {},
            (("pml", "ucx"), ("btl", "^openib,uct,ofi"), ("oob_tcp_if_include", "10.70.0.0/16")),
        ),
    ),
    "one of eight links at a quarter of its rate": (
        {"machines": ["dgx"] * 2, "changes": {2: {PORT.format("mlx5_3", "rate"): "50 Gb/sec (1X HDR)"}}},
        ("mpi", True, "auto"),
        (
            "infiniband",
            {"NCCL_NET_GDR_LEVEL": "PXB", "NCCL_SOCKET_IFNAME": "=enp97s0f0", "UCX_TLS": "ib,sm,self"},
            {
                "h1": {"NCCL_IB_HCA": f"={DGX_HCAS}", "UCX_NET_DEVICES": DGX_HCAS},
                "h2": {"NCCL_IB_HCA": f"={DGX_LESS}", "UCX_NET_DEVICES": DGX_LESS},
            },
            (("pml", "ucx"), ("btl", "^openib,uct,ofi"), ("oob_tcp_if_include", "10.70.0.0/16")),
        ),
    ),
    "a down port beside an active one, no ip on infiniband": (
        {"machines": ["dual-port"] * 2},
        ("mpi", False, "auto"),
        (
            "infiniband",
            {"UCX_NET_DEVICES": "mlx5_0:1", "UCX_TLS": "ib,sm,self"},
            {},
            (("pml", "ucx"), ("btl", "^openib,uct,ofi"), ("oob_tcp_if_include", "192.168.4.0/24")),
        ),
    ),
    "mixed rates, hdr and one edr host": (
        {"machines": ["connectx6"] * 3, "changes": {3: EDR}},
        ("gloo", True, "auto"),
        (
            "infiniband",
            {
                "HOROVOD_GLOO_IFACE": "ib0",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.10.0.1",
                "NCCL_IB_HCA": "=mlx5_0:1",
                "NCCL_NET_GDR_LEVEL": "PXB",
                "NCCL_SOCKET_IFNAME": "=ib0",
            },
            {},
            (),
        ),
    ),
    "efa with aws-ofi-nccl and libfabric in mpi": (
        {"machines": ["efa"] * 2},
        ("mpi", True, "auto"),
        (
            "efa",
            {"FI_PROVIDER": "efa", "NCCL_SOCKET_IFNAME": "=ens5"},
            {},
            (("pml", "cm"), ("mtl", "ofi"), ("btl", "^openib,uct,ofi"), ("oob_tcp_if_include", "172.31.16.0/20")),
        ),
    ),
    "efa there, tcp asked for": (
        {"machines": ["efa"] * 2},
        ("gloo", True, "tcp"),
        (
            "tcp",
            {
                "HOROVOD_GLOO_IFACE": "ens5",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "172.31.16.1",
                "NCCL_NET": "Socket",
                "NCCL_SOCKET_IFNAME": "=ens5",
            },
            {},
            (),
        ),
    ),
    "ethernet, names differ, gloo": (
        {"machines": ["ethernet"] * 3, "nics": ["eno1", "enp5s0", "eno1"]},
        ("gloo", False, "auto"),
        (
            "tcp",
            {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.1.0.1"},
            {
                "h1": {"HOROVOD_GLOO_IFACE": "eno1"},
                "h2": {"HOROVOD_GLOO_IFACE": "enp5s0"},
                "h3": {"HOROVOD_GLOO_IFACE": "eno1"},
            },
            (),
        ),
    ),
    "ethernet, names differ, mpi and nccl": (
        {"machines": ["ethernet"] * 2, "nics": ["eno1", "enp5s0"]},
        ("mpi", True, "auto"),
        (
            "tcp",
            {},
            {"h1": {"NCCL_SOCKET_IFNAME": "=eno1"}, "h2": {"NCCL_SOCKET_IFNAME": "=enp5s0"}},
            (
                ("pml", "ob1"),
                ("btl", "tcp,self,vader"),
                ("btl_tcp_if_include", "10.1.0.0/24"),
                ("oob_tcp_if_include", "10.1.0.0/24"),
            ),
        ),
    ),
    "ipv6 only, mpi and nccl": (
        {"machines": ["ipv6"] * 2},
        ("mpi", True, "auto"),
        (
            "tcp",
            {"NCCL_SOCKET_FAMILY": "AF_INET6", "NCCL_SOCKET_IFNAME": "=eth0"},
            {},
            (
                ("pml", "ob1"),
                ("btl", "tcp,self,vader"),
                ("btl_tcp_if_include", "eth0"),
                ("oob_tcp_if_include", "eth0"),
            ),
        ),
    ),
    "ipv6 only, names differ": (
        {"machines": ["ipv6"] * 2, "nics": ["eth0", "ens3"]},
        ("mpi", False, "auto"),
        (
            "tcp",
            {},
            {"h1": {"OMPI_MCA_btl_tcp_if_include": "eth0"}, "h2": {"OMPI_MCA_btl_tcp_if_include": "ens3"}},
            (("pml", "ob1"), ("btl", "tcp,self,vader"), ("oob_tcp_if_include", "eth0,ens3")),
        ),
    ),
    "ipv6 only, gloo": (
        {"machines": ["ipv6"] * 2},
        ("gloo", False, "auto"),
        ("tcp", {"HOROVOD_GLOO_IFACE": "eth0", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "fd00:5::1"}, {}, ()),
    ),
}
