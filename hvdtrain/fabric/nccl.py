"""NCCL's variables. Their meaning: NVIDIA's "NCCL user guide, Environment Variables"."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.fabric.models import HostFabric
from hvdtrain.fabric.rdma import Rdma
from hvdtrain.fabric.routes import ChosenNetwork
from hvdtrain.fabric.settings import Settings

# As `nvidia-smi topo` orders them. NCCL's own PHB is what `nvidia-smi` calls PHB and NODE.
_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
_DIRECT = {
    "PXB": "each GPU has an adapter behind its own PCIe switches, and {module} lets it read the GPU's memory",
    "PHB": "GPUs and adapters meet at the CPU, and {module} lets adapters read GPUs' memory from there; "
    "from the other CPU's it goes through host memory",
}
_FIX_NO_MODULE = "'modprobe nvidia-peermem' there, or NVIDIA's open kernel module with Linux 5.12 or newer"


def set_sockets(settings: Settings, network: ChosenNetwork) -> None:
    """The interface over which NCCL's ranks find each other, whatever carries the data."""
    settings.variable(
        "NCCL_SOCKET_IFNAME",
        {host: f"={own.interface}" for host, own in network.per_host.items()},
        "this interface, and no other whose name begins so",
    )
    if network.is_ipv6:
        settings.variable("NCCL_SOCKET_FAMILY", "AF_INET6", "the network is IPv6, and NCCL would try IPv4 first")


def set_rdma(settings: Settings, rdma: Rdma, fabrics: Mapping[str, HostFabric]) -> None:
    """Adapters, RoCE's GID, and whether adapters read GPUs' memory themselves (GPUDirect)."""
    settings.variable(
        "NCCL_IB_HCA",
        {host: "=" + ",".join(port.name for port in ports) for host, ports in rdma.ports.items()},
        "these ports exactly: active, of the right kind, of the fastest rate",
    )
    if rdma.gid_index:
        settings.variable(
            "NCCL_IB_GID_INDEX",
            {host: str(index) for host, index in rdma.gid_index.items()},
            "the entry with RoCE v2 for the network's address",
        )
    levels, why = {}, []
    for host, fabric in fabrics.items():
        if fabric.gpus:
            levels[host], reason = _direct_level(fabric, rdma)
            why.append(reason)
    if levels:
        settings.variable("NCCL_NET_GDR_LEVEL", levels, "; ".join(dict.fromkeys(why)))


def set_no_rdma(settings: Settings, fabrics: Mapping[str, HostFabric]) -> None:
    """Keep NCCL from RDMA that the job isn't to use."""
    if any(port.is_active for fabric in fabrics.values() for port in fabric.ports):
        settings.variable("NCCL_IB_DISABLE", "1", "NCCL takes RDMA adapters of its own accord, and the fabric is tcp")
    if any(hca.is_efa for fabric in fabrics.values() for hca in fabric.hcas):
        settings.variable(
            "NCCL_NET", "Socket", "hosts with NCCL's plugin for EFA would take EFA, and the fabric is tcp"
        )


def _direct_level(fabric: HostFabric, rdma: Rdma) -> tuple[str, str]:
    """NCCL_NET_GDR_LEVEL for a host, and why: the farthest that a GPU's nearest adapter is from it."""
    if fabric.gpu_direct is None:
        return "LOC", (
            f"nothing lets adapters read GPUs' memory on {fabric.host}, so it passes host memory; {_FIX_NO_MODULE}"
        )
    used = [fabric.distances.get(port.hca, {}) for port in rdma.ports[fabric.host]]
    nearest = [
        min((_DISTANCES.index(own[gpu]) for own in used if own.get(gpu) in _DISTANCES), default=len(_DISTANCES) - 1)
        for gpu in fabric.gpus
    ]
    level = "PXB" if max(nearest) <= _DISTANCES.index("PXB") else "PHB"
    return level, _DIRECT[level].format(module=fabric.gpu_direct)
