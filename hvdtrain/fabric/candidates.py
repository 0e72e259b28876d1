"""Which of a host's addresses may carry a job at all."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.fabric.models import Address, HostFabric, Interface, IPNetwork

# Made by Docker, libvirt, Kubernetes' network plugins, LXC and others for what runs on this host alone. Their
# addresses are often the same on every host.
_INTERNAL = re.compile(
    r"docker\w*|br-[0-9a-f]{12}|virbr\d+(-nic)?|veth\w+|vnet\d+|cni\w*|cbr\d+|flannel\S*|cali\w+|vxlan\.calico|tunl\d+"
    r"|cilium\w*|lxc\w*|lxdbr\d+|lxcbr\d+|kube-\w+|nodelocaldns|weave\w*|podman\d+|nerdctl\d+|ovs-\w+|ifb\d+|dummy\d+"
)
_NOT_UP = {"down", "lowerlayerdown", "notpresent", "dormant", "testing"}


@dataclass(frozen=True)
class Candidate:
    """An address that may carry the job.

    Attributes:
        host: whose it is.
        interface: on which it is.
        address: with its subnet.
        speed_mbit: the interface's; 0 if unknown, so that a known one is preferred.
    """

    host: str
    interface: Interface
    address: Address
    speed_mbit: int


def candidates(fabric: HostFabric, wanted: Sequence[str] = ()) -> list[Candidate]:
    """The host's addresses that may carry the job, fastest first, IPv4 before IPv6.

    Never loopback, link-local addresses, interfaces that are down, or those of the host's own containers, unless
    ``wanted`` (names or subnets) names them.
    """
    found = [
        Candidate(fabric.host, interface, address, fabric.speed_mbit(interface) or 0)
        for interface in fabric.interfaces
        if unusable(interface, wanted) is None
        for address in interface.addresses
        if _is_routable(address) and _is_wanted(interface, address, wanted)
    ]
    return sorted(found, key=lambda one: (-one.speed_mbit, one.address.ip.version, one.interface.index))


def unusable(interface: Interface, wanted: Sequence[str] = ()) -> str | None:
    """Why an interface can't carry the job; None if it can."""
    if interface.kind == "loopback":
        return "loopback"
    if interface.operstate in _NOT_UP:
        return "down"
    if not interface.addresses:
        return "no address"
    if not any(_is_routable(address) for address in interface.addresses):
        return "link-local addresses only"
    if wanted:
        matches = any(_is_wanted(interface, address, wanted) for address in interface.addresses)
        return None if matches else "not in network.interfaces"
    return "of the host's own containers or virtual machines" if _INTERNAL.fullmatch(interface.name) else None


def _is_routable(address: Address) -> bool:
    return address.scope in ("global", "site") and not address.ip.is_link_local and not address.ip.is_loopback


def _is_wanted(interface: Interface, address: Address, wanted: Sequence[str]) -> bool:
    if not wanted:
        return True
    for word in wanted:
        network = as_network(word)
        if interface.name == word or (network is not None and address.ip in network):
            return True
    return False


def as_network(word: str) -> IPNetwork | None:
    """The subnet (or single address) that a word is; None for an interface's name."""
    try:
        return ipaddress.ip_network(word, strict=False)
    except ValueError:
        return None
