"""What hosts have of networks, as types; made from the probe's JSON, which a host may have got wrong."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Address:
    """An IP address of an interface; ``scope`` is the kernel's: global, link, host or site."""

    ip: IPAddress
    prefix_length: int
    scope: str

    @property
    def network(self) -> IPNetwork:
        """The subnet that it is in."""
        return ipaddress.ip_network(f"{self.ip}/{self.prefix_length}", strict=False)


@dataclass(frozen=True)
class Interface:
    """A network interface; the names are those of `hvdtrain.probe.network`."""

    name: str
    index: int
    kind: str
    operstate: str | None
    speed_mbit: int | None
    driver: str | None
    bond_slaves: tuple[str, ...]
    master: str | None
    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table."""

    index: int
    ip: ipaddress.IPv6Address
    type: str | None
    net_device: str | None

    def stands_for(self, address: IPAddress) -> bool:
        """Whether it is this address's entry: IPv4 ones are mapped into IPv6."""
        return address in (self.ip, self.ip.ipv4_mapped)


@dataclass(frozen=True)
class Port:
    """A port of an adapter; ``hca`` is the adapter's name, ``gbit_per_s`` its rate."""

    hca: str
    number: int
    link_layer: str | None
    gbit_per_s: float | None
    rate: str | None
    state: str | None
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """As NCCL and UCX write it: ``mlx5_0:1``."""
        return f"{self.hca}:{self.number}"

    @property
    def is_active(self) -> bool:
        """Whether traffic can pass."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Hca:
    """An RDMA adapter."""

    name: str
    driver: str | None
    net_devices: tuple[str, ...]
    ports: tuple[Port, ...]

    @property
    def is_efa(self) -> bool:
        """Whether it is AWS's, which speaks neither InfiniBand nor RoCE."""
        return self.driver == "efa" or self.name.startswith("efa_")


@dataclass(frozen=True)
class OpenMpi:
    """An Open MPI and the components that it was built with."""

    version: str | None
    pml: tuple[str, ...]
    btl: tuple[str, ...]
    mtl: tuple[str, ...]
    ipv6: bool | None


@dataclass(frozen=True)
class HostFabric:
    """All of a host's networks.

    Attributes:
        host: its name in the hostfile.
        interfaces: in the kernel's order.
        hcas: RDMA adapters.
        gpus: PCI addresses.
        distances: adapter -> GPU's PCI address -> PIX, PXB, PHB, NODE or SYS.
        gpu_direct: what lets adapters reach GPUs' memory; None: nothing does.
        memlock_bytes: memory that a process may pin; -1 for unlimited; None if unknown.
        open_mpi: None where there is none.
        nccl_ofi: path of NCCL's plugin for libfabric, or None.
    """

    host: str
    interfaces: tuple[Interface, ...]
    hcas: tuple[Hca, ...] = ()
    gpus: tuple[str, ...] = ()
    distances: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gpu_direct: str | None = None
    memlock_bytes: int | None = None
    open_mpi: OpenMpi | None = None
    nccl_ofi: str | None = None

    @property
    def ports(self) -> tuple[Port, ...]:
        """All ports of all adapters that speak InfiniBand or RoCE."""
        return tuple(port for hca in self.hcas if not hca.is_efa for port in hca.ports)

    def interface(self, name: str) -> Interface | None:
        """The interface of this name."""
        return next((interface for interface in self.interfaces if interface.name == name), None)

    def speed_mbit(self, interface: Interface) -> int | None:
        """An interface's speed; that of IPoIB is its port's where the driver doesn't tell."""
        if interface.speed_mbit is not None or interface.kind != "infiniband":
            return interface.speed_mbit
        rates = [
            port.gbit_per_s
            for hca in self.hcas
            if interface.name in hca.net_devices
            for port in hca.ports
            if port.is_active and port.gbit_per_s
        ]
        return int(max(rates) * 1000) if rates else None


def host_fabric(host: str, facts: Mapping[str, Any]) -> HostFabric:
    """A host's networks from the sections ``network`` and ``infiniband`` of its facts; a missing section is empty.

    Raises:
        ValueError: the host told something else than the probe does; it names host and field.
    """
    network = _Reader(f"{host}: network", facts.get("network", {}))
    rdma = _Reader(f"{host}: infiniband", facts.get("infiniband", {}))
    open_mpi = rdma.optional("open_mpi", dict)
    return HostFabric(
        host=host,
        interfaces=network.each("interfaces", _interface),
        hcas=rdma.each("hcas", _hca),
        gpus=rdma.each("gpus", lambda gpu: gpu.required("pci_address", str)),
        distances=_distances(rdma),
        gpu_direct=rdma.optional("gpu_direct", str),
        memlock_bytes=rdma.optional("memlock_soft_bytes", int),
        open_mpi=_open_mpi(_Reader(f"{rdma.where}.open_mpi", open_mpi)) if open_mpi is not None else None,
        nccl_ofi=rdma.optional("nccl_ofi", str),
    )


class _Reader:
    """Typed access to a JSON object that remembers where in the whole it is."""

    def __init__(self, where: str, data: Any) -> None:
        self.where = where
        if not isinstance(data, Mapping):
            raise ValueError(f"{where} is {_shown(data)}, not an object")
        self.data = data

    def optional(self, name: str, kind: type[_Kind]) -> _Kind | None:
        value = self.data.get(name)
        return None if value is None else self._checked(name, value, kind)

    def required(self, name: str, kind: type[_Kind]) -> _Kind:
        return self._checked(name, self.data.get(name), kind)

    def number(self, name: str) -> float | None:
        value = self.data.get(name)
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return value
        raise ValueError(f"{self.where}.{name} is {_shown(value)}, not a number")

    def names(self, name: str) -> tuple[str, ...]:
        values = self.optional(name, list) or []
        return tuple(self._checked(f"{name}[{place}]", value, str) for place, value in enumerate(values))

    def each(self, name: str, make: Callable[[_Reader], _Kind]) -> tuple[_Kind, ...]:
        values = self.optional(name, list) or []
        return tuple(make(_Reader(f"{self.where}.{name}[{place}]", value)) for place, value in enumerate(values))

    def parsed(self, name: str, parse: Callable[[str], _Kind]) -> _Kind:
        words = self.required(name, str)
        try:
            return parse(words)
        except ValueError:
            raise ValueError(f"{self.where}.{name} is {_shown(words)}, which it can't be") from None

    def _checked(self, name: str, value: Any, kind: type[_Kind]) -> _Kind:
        # True is an int to Python and no number to anybody else.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.where}.{name} is {_shown(value)}, not {_KINDS[kind]}")
        return value


_KINDS: Mapping[type, str] = {str: "text", int: "a whole number", list: "a list", dict: "an object", bool: "a boolean"}


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def _interface(data: _Reader) -> Interface:
    return Interface(
        name=data.required("name", str),
        index=data.optional("index", int) or 0,
        kind=data.required("kind", str),
        operstate=data.optional("operstate", str),
        speed_mbit=data.optional("speed_mbit", int),
        driver=data.optional("driver", str),
        bond_slaves=data.names("bond_slaves"),
        master=data.optional("master", str),
        addresses=data.each("addresses", _address),
    )


def _address(data: _Reader) -> Address:
    ip = data.parsed("address", ipaddress.ip_address)
    prefix_length = data.required("prefix_length", int)
    if not 0 <= prefix_length <= ip.max_prefixlen:
        raise ValueError(f"{data.where}.prefix_length is {prefix_length}, which it can't be")
    return Address(ip=ip, prefix_length=prefix_length, scope=data.required("scope", str))


def _hca(data: _Reader) -> Hca:
    name = data.required("name", str)
    return Hca(
        name=name,
        driver=data.optional("driver", str),
        net_devices=data.names("net_devices"),
        ports=data.each("ports", lambda port: _port(name, port)),
    )


def _port(hca: str, data: _Reader) -> Port:
    return Port(
        hca=hca,
        number=data.required("port", int),
        link_layer=data.optional("link_layer", str),
        gbit_per_s=data.number("rate_gbit_per_s"),
        rate=data.optional("rate", str),
        state=data.optional("state", str),
        gids=data.each("gids", _gid),
    )


def _gid(data: _Reader) -> Gid:
    return Gid(
        index=data.required("index", int),
        ip=data.parsed("gid", ipaddress.IPv6Address),
        type=data.optional("type", str),
        net_device=data.optional("net_device", str),
    )


def _distances(data: _Reader) -> dict[str, dict[str, str]]:
    found = {}
    for hca in data.optional("distances", dict) or {}:
        to_gpus = _Reader(f"{data.where}.distances.{hca}", data.data["distances"][hca])
        found[str(hca)] = {str(gpu): to_gpus.required(gpu, str) for gpu in to_gpus.data}
    return found


def _open_mpi(data: _Reader) -> OpenMpi:
    return OpenMpi(
        version=data.optional("version", str),
        pml=data.names("pml"),
        btl=data.names("btl"),
        mtl=data.names("mtl"),
        ipv6=data.optional("ipv6", bool),
    )
