"""Gloo's variables, as Horovod 0.28.1 reads them (``horovod/common/gloo/gloo_context.cc``)."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain import contract
from hvdtrain.errors import StartError
from hvdtrain.fabric.models import HostFabric, Interface
from hvdtrain.fabric.routes import ChosenNetwork
from hvdtrain.fabric.settings import Settings


def set_gloo(settings: Settings, network: ChosenNetwork, fabrics: Mapping[str, HostFabric]) -> None:
    """Gloo's interface, and where it meets the launching machine.

    Raises:
        StartError: Gloo would use another address of the interface than the one that all hosts reach.
    """
    for host, own in network.per_host.items():
        interface = fabrics[host].interface(own.interface)
        first = _first_address(interface) if interface else None
        if first is not None and first != own.address:
            raise StartError(
                f"Gloo takes the first address of an interface, which is {first} on {own.interface}, "
                f"and the other hosts reach {own.address}",
                where=host,
                fix="take controller: mpi, or make the address that the hosts share the interface's first",
            )
    settings.variable(
        contract.GLOO_INTERFACE,
        {host: own.interface for host, own in network.per_host.items()},
        "Gloo's connections; without it Horovod takes any interface whose name all hosts share",
    )
    if network.launcher_address:
        settings.variable(
            contract.GLOO_RENDEZVOUS, network.launcher_address, "the launching machine, as the hosts reach it"
        )


def _first_address(interface: Interface) -> str | None:
    """What ``getifaddrs`` names first: IPv4 before IPv6."""
    addresses = sorted(interface.addresses, key=lambda address: address.ip.version)
    return str(addresses[0].ip) if addresses else None
