"""Open MPI's parameters, and UCX's and libfabric's variables.

Meaning: Open MPI's "FAQ: Tuning the run-time characteristics of MPI TCP communications" and "… of MPI InfiniBand,
RoCE, and iWARP communications" (for v4.x); UCX's own description of UCX_TLS (``ucx_info -fc``). What Open MPI does with
networks was tried with 4.1.4: IPv6 subnets are refused; an IPv4 subnet that a host isn't in costs a warning; an
interface that a host hasn't keeps its processes from reaching each other; PML ucx without a device ends the job.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from hvdtrain.errors import StartError
from hvdtrain.fabric.models import HostFabric
from hvdtrain.fabric.rdma import Rdma
from hvdtrain.fabric.routes import ChosenNetwork
from hvdtrain.fabric.settings import MCA_PREFIX, Settings

# Parameter and value. Debian's configuration leaves out the same (/etc/openmpi/openmpi-mca-params.conf). Seen with its
# Open MPI 4.1.4 and libfabric 1.17: ranks that never came back from MPI_Init, each in ofi's
# opal_common_ofi_export_memory_monitor, where a thread waits for a lock of its own.
_NO_BROKEN_TRANSPORT = ("btl", "^openib,uct,ofi")
_WHY_LEFT_OUT = "as Debian has it: openib is dead, and ofi may hang in MPI_Init"
FIX_NO_UCX = "install an Open MPI built with UCX there (Debian's openmpi-bin is; NVIDIA's HPC-X is)"


def why_no_ucx(fabrics: Mapping[str, HostFabric]) -> tuple[str, str] | None:
    """Host and reason why MPI can't use UCX; None if it can on all hosts."""
    for host, fabric in fabrics.items():
        if fabric.open_mpi is None:
            return host, "no Open MPI was found on PATH"
        if "ucx" not in fabric.open_mpi.pml:
            return host, f"its Open MPI {fabric.open_mpi.version or ''} was built without UCX"
    return None


def set_tcp(settings: Settings, network: ChosenNetwork, fabrics: Mapping[str, HostFabric], why: str) -> None:
    """MPI's data over TCP, and shared memory within a host.

    Raises:
        StartError: an IPv6 network and an Open MPI without IPv6.
    """
    settings.parameter("pml", "ob1", why)
    known = [fabric.open_mpi for fabric in fabrics.values() if fabric.open_mpi]
    # Its name since Open MPI 5; in 4.x the component of that name does nothing.
    shared_memory = "sm" if known and all("vader" not in one.btl and "sm" in one.btl for one in known) else "vader"
    settings.parameter("btl", f"tcp,self,{shared_memory}", "TCP between hosts and shared memory on one")
    if network.is_ipv6:
        _check_ipv6(fabrics)
        by_host = {host: own.interface for host, own in network.per_host.items()}
        why = "the interface of the job's network, by name: Open MPI takes no IPv6 subnets"
    else:
        by_host = {host: _subnet(own.address, own.prefix_length) for host, own in network.per_host.items()}
        why = "the job's network, as a subnet, since names of interfaces may differ"
    if len(set(by_host.values())) == 1:
        settings.parameter("btl_tcp_if_include", next(iter(by_host.values())), why)
    else:
        settings.variable(f"{MCA_PREFIX}btl_tcp_if_include", by_host, why)


def set_ucx(settings: Settings, rdma: Rdma) -> None:
    """MPI's data over RDMA with UCX, and shared memory within a host."""
    settings.parameter("pml", "ucx", "RDMA, with the UCX that Open MPI has on every host")
    settings.parameter(*_NO_BROKEN_TRANSPORT, _WHY_LEFT_OUT)
    settings.variable(
        "UCX_NET_DEVICES",
        {host: ",".join(port.name for port in ports) for host, ports in rdma.ports.items()},
        "these ports, and no Ethernet beside them",
    )
    settings.variable("UCX_TLS", "ib,sm,self", "RDMA between hosts and shared memory on one; never TCP unnoticed")
    if rdma.gid_index:
        settings.variable(
            "UCX_IB_GID_INDEX",
            {host: str(index) for host, index in rdma.gid_index.items()},
            "the entry with RoCE v2 for the network's address",
        )


def set_ofi(settings: Settings) -> None:
    """MPI's data over EFA with libfabric."""
    settings.parameter("pml", "cm", "EFA, with the libfabric that Open MPI has on every host")
    settings.parameter("mtl", "ofi", "libfabric")
    settings.parameter(*_NO_BROKEN_TRANSPORT, _WHY_LEFT_OUT)


def set_one_host(settings: Settings) -> None:
    """MPI's data within this machine."""
    settings.parameter("pml", "ob1", "shared memory: all ranks are on this machine")
    settings.parameter(*_NO_BROKEN_TRANSPORT, _WHY_LEFT_OUT)


def set_contact(settings: Settings, network: ChosenNetwork) -> None:
    """How mpirun's daemons and processes find each other, whatever carries MPI's data."""
    if network.is_ipv6:
        names = [*(own.interface for own in network.per_host.values()), *network.launcher_interfaces]
        value = ",".join(dict.fromkeys(names))
    else:
        value = ",".join((*network.subnets, *network.launcher_subnets))
    also = ", and the launching machine's own" if network.launcher_subnets else ""
    settings.parameter("oob_tcp_if_include", value, f"mpirun's daemons meet on the job's network{also}")


def _subnet(address: str, prefix_length: int) -> str:
    return str(ipaddress.ip_network(f"{address}/{prefix_length}", strict=False))


def _check_ipv6(fabrics: Mapping[str, HostFabric]) -> None:
    for host, fabric in fabrics.items():
        if fabric.open_mpi and fabric.open_mpi.ipv6 is False:
            raise StartError(
                "its Open MPI was built without IPv6, and the hosts share no IPv4 network",
                where=host,
                fix="install an Open MPI built with --enable-ipv6 (Debian's is), or give the hosts IPv4 addresses",
            )
