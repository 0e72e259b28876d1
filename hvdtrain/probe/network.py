"""Network interfaces and their addresses, from sysfs and the kernel's routing socket.

``interfaces``: list of
    name: str. index: int. kind: str, one of ``loopback``, ``ethernet``, ``infiniband`` (IPoIB), ``bond``, ``bridge``,
    ``vlan``, ``wireless``, ``tun`` (tunnels of any sort) and ``virtual`` (veth, dummy, macvlan …).
    mac: str. mtu: int, bytes. operstate: str as the kernel says it (``up``, ``down``, ``unknown`` …).
    speed_mbit: int, None where the driver doesn't tell. driver, pci_address (``0000:07:00.0``): str or None.
    numa_node: int or None. bond_slaves: list of str. master: str or None, the bridge or bond that it belongs to.
    addresses: list of {family: ``inet`` or ``inet6``, address: str, prefix_length: int, scope: ``global``, ``link``,
    ``host`` or ``site``}, in the kernel's order, which is the one that Gloo takes the first of.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from pathlib import Path

from hvdtrain.probe.annotations import Any
from hvdtrain.probe.reading import integer, text

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

# rtnetlink(7), linux/if_addr.h.
_NLMSG_ERROR, _NLMSG_DONE, _RTM_NEWADDR, _RTM_GETADDR = 2, 3, 20, 22
_NLM_F_REQUEST_DUMP = 0x1 | 0x300
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_F_UNUSABLE = 0x08 | 0x40  # Duplicate found, or not yet known to be unique.
_SCOPES = {0: "global", 200: "site", 253: "link", 254: "host"}
_TIMEOUT_S = 5.0

# linux/if_arp.h.
_LOOPBACK, _INFINIBAND = 772, 32
_TUNNELS = {65534, 768, 769, 776, 778, 823}
_DEVTYPES = {"bridge": "bridge", "bond": "bond", "vlan": "vlan", "wlan": "wireless", "vxlan": "tun", "geneve": "tun",
             "wireguard": "tun"}  # fmt: skip


def collect(root: Path = Path("/")) -> dict[str, Any]:
    """Facts of section ``network``; the module's docstring names them.

    A recorded tree holds the addresses in ``ip-addr.json``, as ``ip -j addr`` prints them.
    """
    addresses = _addresses_of_this_machine() if root == Path("/") else _recorded_addresses(root)
    folder = root / "sys/class/net"
    try:
        names = sorted(entry.name for entry in folder.iterdir() if (entry / "ifindex").exists())
    except OSError:
        names = []
    found = [_interface(folder / name, addresses.get(name, [])) for name in names]
    return {"interfaces": sorted(found, key=lambda interface: (interface["index"] or 0, interface["name"]))}


def _interface(folder: Path, addresses: list[dict[str, Any]]) -> dict[str, Any]:
    speed = integer(folder / "speed")
    device = os.path.realpath(folder / "device") if (folder / "device").exists() else None
    pci = PCI_ADDRESS.findall(device) if device else []
    numa_node = integer(folder / "device/numa_node")
    return {
        "name": folder.name,
        "index": integer(folder / "ifindex"),
        "kind": _kind(folder),
        "mac": text(folder / "address"),
        "mtu": integer(folder / "mtu"),
        "operstate": text(folder / "operstate"),
        # Drivers say -1 or 4294967295 for unknown.
        "speed_mbit": speed if speed and 0 < speed < 1 << 31 else None,
        "driver": _target_name(folder / "device/driver"),
        "pci_address": pci[-1] if pci else None,
        "numa_node": numa_node if numa_node is not None and numa_node >= 0 else None,
        "bond_slaves": (text(folder / "bonding/slaves") or "").split(),
        "master": _target_name(folder / "master"),
        "addresses": addresses,
    }


def _kind(folder: Path) -> str:
    hardware = integer(folder / "type")
    if hardware == _LOOPBACK:
        return "loopback"
    if hardware == _INFINIBAND:
        return "infiniband"
    if hardware in _TUNNELS or (folder / "tun_flags").exists():
        return "tun"
    for name, kind in (("bridge", "bridge"), ("bonding", "bond"), ("wireless", "wireless"), ("phy80211", "wireless")):
        if (folder / name).exists():
            return kind
    for line in (text(folder / "uevent") or "").splitlines():
        name, _, value = line.partition("=")
        if name == "DEVTYPE" and value in _DEVTYPES:
            return _DEVTYPES[value]
    return "ethernet" if (folder / "device").exists() else "virtual"


def _target_name(link: Path) -> str | None:
    try:
        return os.path.basename(os.readlink(link))  # noqa: PTH115, PTH119
    except OSError:
        return None


def _recorded_addresses(root: Path) -> dict[str, list[dict[str, Any]]]:
    recorded = text(root / "ip-addr.json")
    found = {}
    for link in json.loads(recorded) if recorded else []:
        found[link["ifname"]] = [
            {"family": entry["family"], "address": entry["local"], "prefix_length": entry["prefixlen"],
             "scope": entry["scope"]}
            for entry in link.get("addr_info", [])
            if "local" in entry
        ]  # fmt: skip
    return found


def _addresses_of_this_machine() -> dict[str, list[dict[str, Any]]]:
    """Addresses by interface; empty where the kernel doesn't let them be asked for."""
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for message in _dump_addresses():
            entry = _address(message)
            if entry:
                index, address = entry
                found.setdefault(socket.if_indextoname(index), []).append(address)
    except OSError:
        # An interface went away meanwhile, or netlink is forbidden: what was found counts.
        pass
    return found


def _dump_addresses() -> list[bytes]:
    """Bodies of all RTM_NEWADDR messages."""
    bodies: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.bind((0, 0))
        kernel.send(struct.pack("=IHHII8x", 24, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0))
        while True:
            data = kernel.recv(1 << 18)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    return bodies
                if kind == _RTM_NEWADDR:
                    bodies.append(data[16:length])
                data = data[_aligned(length) :]


def _address(body: bytes) -> tuple[int, dict[str, Any]] | None:
    family, prefix_length, flags, scope, index = struct.unpack_from("=BBBBI", body)
    if family not in (socket.AF_INET, socket.AF_INET6) or flags & _IFA_F_UNUSABLE:
        return None
    values, rest = {}, body[8:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            break
        values[kind] = rest[4:length]
        rest = rest[_aligned(length) :]
    # On a point-to-point link IFA_ADDRESS is the other end's.
    packed = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
    if packed is None:
        return None
    return index, {
        "family": "inet" if family == socket.AF_INET else "inet6",
        "address": socket.inet_ntop(family, packed),
        "prefix_length": prefix_length,
        "scope": _SCOPES.get(scope, str(scope)),
    }


def _aligned(length: int) -> int:
    return (length + 3) & ~3
