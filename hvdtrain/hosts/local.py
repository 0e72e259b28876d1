"""Which names mean this machine. Asks no name server, which could take its time."""

from __future__ import annotations

import functools
import ipaddress
import socket
from pathlib import Path

import psutil

_ETC_HOSTS = Path("/etc/hosts")


def canonical(name: str) -> str:
    """One spelling for all that mean the same host: ``localhost`` for this machine, else lower case."""
    return "localhost" if is_this_machine(name) else _normal(name)


def is_this_machine(name: str) -> bool:
    """Whether a host name or address is this machine's own."""
    normal = _normal(name)
    try:
        if ipaddress.ip_address(normal).is_loopback:
            return True
    except ValueError:
        pass
    return normal in _own_names()


def _normal(name: str) -> str:
    """Lower case, no dot at the end, addresses in their shortest form."""
    text = name.lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


@functools.cache
def _own_names() -> frozenset[str]:
    """Host name, interface addresses, and what /etc/hosts calls those."""
    addresses = {
        _normal(address.address)
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    host_name = socket.gethostname().lower()
    return frozenset({"localhost", host_name, host_name.partition(".")[0], *addresses, *_aliases(addresses)})


def _aliases(addresses: set[str]) -> set[str]:
    names: set[str] = set()
    try:
        lines = _ETC_HOSTS.read_text(errors="replace").splitlines()
    except OSError:
        return names
    for line in lines:
        address, *aliases = line.partition("#")[0].lower().split() or [""]
        if _normal(address) in addresses or address.startswith("127."):
            names.update(aliases)
    return names
