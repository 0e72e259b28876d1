"""Which ports of which adapters carry RDMA: InfiniBand's, RoCE's and EFA's own rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from hvdtrain.fabric.models import ETHERNET, INFINIBAND, Gid, HostFabric, IPAddress, Port
from hvdtrain.fabric.routes import ChosenNetwork

ROCE_V2 = "RoCE v2"
_NEAR = ("PIX", "PXB")


class LackError(Exception):
    """A host has not what the fabric needs: which host, what was found there, what to do about it."""

    def __init__(self, host: str, found: str, fix: str) -> None:
        super().__init__(f"{host}: {found}")
        self.host = host
        self.found = found
        self.fix = fix


@dataclass(frozen=True)
class Rdma:
    """Ports that carry a job.

    Attributes:
        ports: by host.
        gid_index: by host, the entry of RoCE's GID tables; empty for InfiniBand.
        notes: what was left out or is slow, one sentence each.
    """

    ports: Mapping[str, tuple[Port, ...]]
    gid_index: Mapping[str, int]
    notes: tuple[str, ...]


def find_infiniband(fabrics: Sequence[HostFabric], hcas: Sequence[str], *, nccl: bool) -> Rdma:
    """All active InfiniBand ports of each host's fastest rate, near its GPUs where it has any.

    Args:
        fabrics: of all hosts.
        hcas: ``network.hcas``, the only adapters (``mlx5_0``) and ports (``mlx5_0:1``) allowed; empty: all.
        nccl: GPUs' memory is to be carried.

    Raises:
        LackError: a host has none.
    """
    ports: dict[str, tuple[Port, ...]] = {}
    notes: list[str] = []
    for fabric in fabrics:
        active = _active(fabric, INFINIBAND, hcas)
        near = _near_gpus(fabric, active, notes) if nccl and not hcas else None
        ports[fabric.host] = _fastest(fabric.host, near or active, notes)
    return Rdma(ports, {}, (*notes, *_mixed(ports)))


def find_roce(fabrics: Sequence[HostFabric], network: ChosenNetwork, hcas: Sequence[str], *, nccl: bool) -> Rdma:
    """The port with the chosen network's RoCE v2 GID on each host; with GPUs also the other adapters near them.

    Other ports count only where their GID has the same index: NCCL and UCX take one index for all ports.

    Raises:
        LackError: a host has none.
    """
    ports: dict[str, tuple[Port, ...]] = {}
    indexes: dict[str, int] = {}
    notes: list[str] = []
    for fabric in fabrics:
        own = network.per_host[fabric.host]
        address = ip_address(own.address)
        active = _active(fabric, ETHERNET, hcas)
        by_port = {port: gid for port in active if (gid := _gid_of(port, address, own.interface))}
        if not by_port:
            raise _no_gid(fabric, active, own.interface, address)
        first, gid = next(iter(by_port.items()))
        indexes[fabric.host] = gid.index
        rails = [port for port in active if port == first or _is_rail(port, gid)]
        near = _near_gpus(fabric, rails, notes) if nccl and not hcas else None
        chosen = rails if hcas else near or [first]
        notes += [
            f"{fabric.host}: {port.name} left out: it has no RoCE v2 GID of index {gid.index}"
            for port in active
            if hcas and port not in rails
        ]
        ports[fabric.host] = _fastest(fabric.host, chosen, notes)
    return Rdma(ports, indexes, (*notes, *_mixed(ports)))


def find_efa(fabrics: Sequence[HostFabric]) -> None:
    """Make sure that each host has EFA adapters.

    Raises:
        LackError: a host has none.
    """
    for fabric in fabrics:
        if not any(hca.is_efa and any(port.is_active for port in hca.ports) for hca in fabric.hcas):
            raise LackError(fabric.host, "no active EFA adapter", "attach an EFA interface to the instance")


def _active(fabric: HostFabric, layer: str, hcas: Sequence[str]) -> list[Port]:
    """Active ports of this kind; LackError says what there is instead."""
    allowed = [port for port in fabric.ports if not hcas or port.name in hcas or port.hca in hcas]
    active = [port for port in allowed if port.link_layer == layer and port.is_active]
    if hcas:
        missing = [name for name in hcas if not any(name in (port.name, port.hca) for port in fabric.ports)]
        down = [port for port in allowed if not port.is_active]
        if missing:
            raise LackError(
                fabric.host,
                f"network.hcas names {', '.join(missing)}; {_inventory(fabric)}",
                "correct network.hcas: adapters as 'ibstat -l' lists them, ports as mlx5_0:1",
            )
        if down:
            raise LackError(fabric.host, _inventory(fabric), _FIX_DOWN)
    if active:
        return active
    of_layer = [port for port in allowed if port.link_layer == layer]
    other = "roce" if layer == INFINIBAND else "infiniband"
    if of_layer:
        fix = _FIX_DOWN
    elif allowed:
        fix = f"take network.fabric: {other} (or auto)"
    elif fabric.hcas:
        fix = "EFA is neither InfiniBand nor RoCE: take network.fabric: auto, which uses it where NCCL can"
    else:
        fix = "install the adapter's driver there (rdma-core, mlx5_ib), or take network.fabric: tcp"
    raise LackError(fabric.host, _inventory(fabric), fix)


_FIX_DOWN = (
    "see the cable, the switch's port and, if the state is INIT, the subnet manager: 'ibstat' and 'sminfo' there; "
    "or leave the host out"
)


def _inventory(fabric: HostFabric) -> str:
    """What a host has of RDMA, in words."""
    if not fabric.hcas:
        return "it has no RDMA adapter"
    words = [
        f"{hca.name} (EFA)" if hca.is_efa else f"{port.name} ({port.link_layer}, {port.state})"
        for hca in fabric.hcas
        for port in hca.ports
    ]
    return f"it has {', '.join(words) or 'adapters without ports'}"


def _near_gpus(fabric: HostFabric, ports: list[Port], notes: list[str]) -> list[Port] | None:
    """Ports whose adapter shares PCIe switches with a GPU; None unless each GPU has one."""
    near_to = {
        port: {gpu for gpu, distance in fabric.distances.get(port.hca, {}).items() if distance in _NEAR}
        for port in ports
    }
    served = {gpu for gpus in near_to.values() for gpu in gpus}
    if not fabric.gpus or not served.issuperset(fabric.gpus):
        return None
    notes += [
        f"{fabric.host}: {port.name} left out: no GPU is near it, so it is taken for storage's"
        for port, gpus in near_to.items()
        if not gpus
    ]
    return [port for port, gpus in near_to.items() if gpus]


def _fastest(host: str, ports: Sequence[Port], notes: list[str]) -> tuple[Port, ...]:
    """Ports of the fastest rate: one slow port in a ring slows all of it."""
    rate = max(port.gbit_per_s or 0 for port in ports)
    notes += [
        f"warning: {host}: {port.name} left out: it runs at {port.gbit_per_s or 0:g} Gbit/s ({port.rate}), "
        f"the others at {rate:g}"
        for port in ports
        if (port.gbit_per_s or 0) < rate
    ]
    return tuple(port for port in ports if (port.gbit_per_s or 0) == rate)


def _mixed(ports: Mapping[str, tuple[Port, ...]]) -> list[str]:
    """A warning where hosts' rates differ."""
    rates = {host: own[0].gbit_per_s or 0 for host, own in ports.items()}
    fastest, slowest = max(rates.values()), min(rates.values())
    if fastest == slowest:
        return []
    slow = [host for host, rate in rates.items() if rate < fastest]
    shown = ", ".join(f"{host} ({ports[host][0].rate})" for host in slow[:4]) + (" …" if len(slow) > 4 else "")
    return [
        f"warning: mixed rates: {shown} below the others' {fastest:g} Gbit/s; all hosts together "
        f"go at {slowest:g}, as slow as the slowest link"
    ]


def _gid_of(port: Port, address: IPAddress, interface: str) -> Gid | None:
    """The RoCE v2 entry of this address; that of the interface itself where several have it."""
    found = [gid for gid in port.gids if gid.type == ROCE_V2 and gid.stands_for(address)]
    return min(found, key=lambda gid: (gid.net_device != interface, gid.index), default=None)


def _is_rail(port: Port, first: Gid) -> bool:
    """Whether another port has a routable RoCE v2 GID of the same index and IP version."""
    return any(
        gid.index == first.index
        and gid.type == ROCE_V2
        and not gid.ip.is_link_local
        and (gid.ip.ipv4_mapped is None) == (first.ip.ipv4_mapped is None)
        for gid in port.gids
    )


def _no_gid(fabric: HostFabric, ports: Sequence[Port], interface: str, address: IPAddress) -> LackError:
    elsewhere = [
        f"{port.name} has {gid.ip.ipv4_mapped or gid.ip} on {gid.net_device}"
        for port in ports
        for gid in port.gids
        if gid.type == ROCE_V2 and not gid.ip.is_link_local
    ]
    has_v1 = any(gid.type != ROCE_V2 and gid.stands_for(address) for port in ports for gid in port.gids)
    found = f"no RoCE v2 GID for {address} on {interface}"
    if elsewhere:
        return LackError(
            fabric.host,
            f"{found}; {', '.join(elsewhere[:4])}",
            "choose RoCE's network with network.interfaces, as a subnet or by name, so that all hosts are on it",
        )
    if has_v1:
        return LackError(fabric.host, f"{found}, only RoCE v1", "turn RoCE v2 on for the adapter (cma_roce_mode)")
    return LackError(
        fabric.host, found, "give the adapter's net device an IP address; 'show_gids' lists what then has a GID"
    )
