"""Hosts made from the recorded trees in data/fabric: their sysfs, and which of their addresses reach each other."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.fabric.models import HostFabric, host_fabric
from hvdtrain.fabric.schedule import Reach, pairs, reaches, targets
from hvdtrain.probe import infiniband, network

FOLDER = Path(__file__).parent / "data/fabric"
_PCI_DEVICE = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class _Strings(yaml.SafeLoader):
    """Everything is text (a PCI address would be a number in base 60), and `<<` merges."""

    yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # noqa: RUF012


@functools.cache
def _tree(machine: str, number: int, nic: str) -> Mapping[str, Any]:
    words = (FOLDER / f"{machine}.yaml").read_text().replace("{n}", str(number)).replace("{nic}", nic)
    tree: Mapping[str, Any] = yaml.load(words, Loader=_Strings)  # noqa: S506
    return tree


def unpack(
    machine: str, root: Path, number: int = 1, nic: str = "eth0", changes: Mapping[str, str] | None = None
) -> Path:
    """Write a machine's tree: nested mappings are folders, `-> target` is a link, and `{n}` the host's number.

    Links that the kernel makes by rule (class and bus folders, `device`) are made by the same rule. ``changes`` are
    files written over the recorded ones.
    """
    tree = _tree(machine, number, nic)
    _write(root, {name: part for name, part in tree.items() if not name.startswith(".")})
    for folder in sorted((root / "sys/devices").rglob("*")):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if _PCI_DEVICE.fullmatch(folder.name):
            _link(root / "sys/bus/pci/devices" / folder.name, folder)
        if folder.parent.name in ("net", "infiniband"):
            _link(root / "sys/class" / folder.parent.name / folder.name, folder)
            if "virtual" not in folder.parts:
                _link(folder / "device", folder.parent.parent)
    for name, content in (changes or {}).items():
        (root / name).write_text(content + "\n")
    return root


def _write(place: Path, part: Any) -> None:
    if isinstance(part, dict):
        place.mkdir(parents=True, exist_ok=True)
        for name, inner in part.items():
            _write(place / name, inner)
    elif part.startswith("-> "):
        place.symlink_to(part.removeprefix("-> "))
    else:
        place.write_text(part if part.endswith("\n") else f"{part}\n")


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))


@functools.cache
def _fabric(machine: str, number: int, nic: str, changes: tuple[tuple[str, str], ...]) -> HostFabric:
    """What the launcher makes of the host's answer."""
    with tempfile.TemporaryDirectory() as folder:
        root = unpack(machine, Path(folder), number, nic, dict(changes))
        facts = {"network": network.collect(root), "infiniband": infiniband.collect(root)}
    return host_fabric(f"h{number}", facts)


def cluster(machines: Sequence[str], nics: Sequence[str] | None = None,
            changes: Mapping[int, Mapping[str, str]] | None = None) -> dict[str, HostFabric]:  # fmt: skip
    """Hosts h1, h2, … of these machines."""
    return {
        f"h{number}": _fabric(
            machine, number, nics[number - 1] if nics else "eth0", tuple((changes or {}).get(number, {}).items())
        )
        for number, machine in enumerate(machines, 1)
    }


def connections(fabrics: Mapping[str, HostFabric], cut: Sequence[str] = (), launcher: str | None = None,
                interfaces: Sequence[str] = ()) -> list[Reach]:  # fmt: skip
    """What the probes would find where each subnet is one wire: who has an address himself meets himself there.

    ``cut`` are addresses that nobody reaches.
    """
    hosts = [host for host in fabrics if host != launcher]
    listeners = {host: {"identity": f"id-{host}", "ports": {"4": 4000, "6": 4001}} for host in fabrics}
    found = []
    for tester, wanted in targets(pairs(hosts, launcher), fabrics, listeners, interfaces).items():
        found += reaches(tester, {want["key"]: _answer(fabrics[tester], want, cut) for want in wanted})
    return found


def _answer(tester: HostFabric, want: Mapping[str, Any], cut: Sequence[str]) -> dict[str, Any]:
    own = [address for interface in tester.interfaces for address in interface.addresses]
    if any(str(address.ip) == want["address"] for address in own):
        return {"ok": False, "reason": "other-host", "rtt_s": 0.0001, "local_address": want["address"]}
    for address in own:
        if address.scope == "global" and _is_in(address.network, want["address"]) and want["address"] not in cut:
            return {"ok": True, "reason": None, "rtt_s": 0.0002, "local_address": str(address.ip)}
    return {"ok": False, "reason": "timeout", "rtt_s": None, "local_address": None}


def _is_in(subnet: Any, address: str) -> bool:
    return ip_address(address) in subnet
