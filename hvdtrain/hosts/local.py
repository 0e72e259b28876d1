"""Which names mean this machine. Asks no name server, which could take its time."""

from __future__ import annotations

import functools
import ipaddress
import socket
from pathlib import Path

import psutil

_ETC_HOSTS = Path("/etc/hosts")
_RESOLV_CONF = Path("/etc/resolv.conf")


def canonical(name: str) -> str:
    """One spelling for all that mean the same host: ``localhost`` for this machine, else lower case."""
    return "localhost" if is_this_machine(name) else _normal(name)


def is_this_machine(name: str) -> bool:
    """Whether a host name or address is this machine's own."""
    normal = _normal(name)
    try:
        address = ipaddress.ip_address(normal)
    except ValueError:
        return normal in _own_names()
    # A connection to 0.0.0.0 or :: ends at this machine, too.
    return address.is_loopback or address.is_unspecified or normal in _own_names()


def _normal(name: str) -> str:
    """Lower case, no dot at the end, addresses in their shortest form."""
    text = name.lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return str(getattr(address, "ipv4_mapped", None) or address)


@functools.cache
def _own_names() -> frozenset[str]:
    """Host name, short and full, interface addresses, and what /etc/hosts calls those."""
    addresses = {
        _normal(address.address)
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    host_name = socket.gethostname().lower()
    short = host_name.partition(".")[0]
    full = {f"{short}.{domain}" for domain in _domains()}
    return frozenset({"localhost", host_name, short, *full, *addresses, *_aliases(addresses)})


def _domains() -> set[str]:
    """The domain that a name server is asked for this machine's short name in: what ``hostname --fqdn`` adds."""
    words = (line.split() for line in _lines(_RESOLV_CONF))
    return {line[1] for line in words if len(line) > 1 and line[0] in ("domain", "search")}


def _aliases(addresses: set[str]) -> set[str]:
    names: set[str] = set()
    for line in _lines(_ETC_HOSTS):
        address, *aliases = line.partition("#")[0].split() or [""]
        if _normal(address) in addresses or address.startswith("127."):
            names.update(aliases)
    return names


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").lower().splitlines()
    except OSError:
        return []
