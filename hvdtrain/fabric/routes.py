"""The network of a job: on each host one interface and address, such that all hosts reach each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from hvdtrain.errors import StartError
from hvdtrain.fabric.candidates import Candidate, candidates, unusable
from hvdtrain.fabric.models import HostFabric, IPNetwork
from hvdtrain.fabric.schedule import Reach

_Choice = dict[str, Candidate]
_Tested = Mapping[tuple[str, str], Mapping[str, Reach]]


@dataclass(frozen=True)
class HostNetwork:
    """What a host uses for the job; ``speed_mbit`` is None if unknown."""

    interface: str
    address: str
    prefix_length: int
    speed_mbit: int | None


@dataclass(frozen=True)
class ChosenNetwork:
    """The network of a job.

    Attributes:
        per_host: by host's name.
        launcher_address: by host's name, the launching machine's address that the host reaches.
        subnets: of all hosts, each once; one unless the hosts are on different, routed ones.
        launcher_subnets: of the launching machine's addresses, beside ``subnets``.
        launcher_interfaces: of the launching machine's addresses.
        reasons: what was chosen and why, one sentence each.
    """

    per_host: Mapping[str, HostNetwork]
    launcher_address: Mapping[str, str]
    subnets: tuple[str, ...]
    launcher_subnets: tuple[str, ...]
    launcher_interfaces: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def is_ipv6(self) -> bool:
        """Whether it is an IPv6 network; all hosts use the same family."""
        return any(":" in network.address for network in self.per_host.values())


def choose_network(
    hosts: Sequence[str],
    fabrics: Mapping[str, HostFabric],
    reaches: Iterable[Reach],
    *,
    interfaces: Sequence[str] = (),
    launcher: str | None = None,
) -> ChosenNetwork:
    """Choose each host's interface and address.

    Of the networks over which all hosts reached each other the fastest counts; of equally fast ones a subnet that all
    share comes before routed ones, then IPv4 before IPv6, then the order of the first host's interfaces. A network is
    as fast as its slowest interface.

    Args:
        hosts: of the job, in order.
        fabrics: by host; the launching machine's too.
        reaches: what the connections of `schedule.pairs` gave.
        interfaces: the only ones allowed: names, or subnets in CIDR notation.
        launcher: the launching machine's name in ``fabrics``, maybe one of ``hosts``; None: nobody needs to reach it.

    Raises:
        StartError: no network that all share; it names the pair that fails on the best one.
    """
    tested: dict[tuple[str, str], dict[str, Reach]] = {}
    for reach in reaches:
        tested.setdefault((reach.tester, reach.target), {})[reach.address] = reach
    if len(hosts) == 1 and launcher in (None, hosts[0]) and not interfaces:
        return _alone(hosts[0], fabrics[hosts[0]])
    allowed = {host: candidates(fabrics[host], interfaces) for host in hosts}
    for host in hosts:
        if not allowed[host]:
            raise _no_candidate(fabrics[host], interfaces)
    choices = _choices(hosts, allowed, tested)
    passed_over: list[str] = []
    for choice in choices:
        failure = _first_failure(hosts, choice, tested)
        if failure is None:
            reasons = [*_reasons(hosts, fabrics, choice, interfaces), *passed_over]
            return _chosen(hosts, fabrics, choice, tested, launcher, reasons)
        passed_over.append(f"network {_named(choice)} isn't used: {failure}")
    raise _none_common(hosts, allowed, choices, tested, interfaces)


def _choices(hosts: Sequence[str], allowed: Mapping[str, list[Candidate]], tested: _Tested) -> list[_Choice]:
    """All that may do, best first: each subnet that all hosts share, and what is routed to each of the first's."""
    shared = set.intersection(*({one.address.network for one in allowed[host]} for host in hosts))
    found: list[_Choice] = [
        {host: next(one for one in allowed[host] if one.address.network == network) for host in hosts}
        for network in sorted(shared, key=str)
    ]
    for start in allowed[hosts[0]]:
        star = {hosts[0]: start}
        for host in hosts[1:]:
            if routed := next((one for one in allowed[host] if _is_routed(start, one, tested)), None):
                star[host] = routed
        if len(star) == len(hosts) and star not in found:
            found.append(star)
    return sorted(found, key=_preference)


def _preference(choice: _Choice) -> tuple[int, bool, int, int, str]:
    speed = min(one.speed_mbit for one in choice.values())
    networks = _networks(choice)
    first = next(iter(choice.values()))
    return -speed, len(networks) > 1, first.address.ip.version, first.interface.index, str(networks[0])


def _is_routed(one: Candidate, other: Candidate, tested: _Tested) -> bool:
    """Whether a connection came from one to the other, either way."""
    if one.address.ip.version != other.address.ip.version:
        return False
    there = tested.get((one.host, other.host), {}).get(str(other.address.ip))
    back = tested.get((other.host, one.host), {}).get(str(one.address.ip))
    return _comes_from(there, one) or _comes_from(back, other)


def _comes_from(reach: Reach | None, candidate: Candidate) -> bool:
    """Whether a connection was made, and from this interface (or another one of the same subnet)."""
    if reach is None or not reach.ok:
        return False
    local = reach.local_address
    own = {str(address.ip) for address in candidate.interface.addresses}
    return local is None or local in own or _is_in(local, candidate.address.network)


def _is_in(address: str, network: IPNetwork) -> bool:
    try:
        return ip_address(address) in network
    except ValueError:
        return False


def _first_failure(hosts: Sequence[str], choice: _Choice, tested: _Tested) -> str | None:
    """What keeps the hosts from using this, in words; None if nothing does."""
    for tester in hosts:
        for target in hosts:
            results = tested.get((tester, target))
            if results is None:
                continue
            address = str(choice[target].address.ip)
            reach = results.get(address)
            if reach is None or not reach.ok:
                return f"{tester} can't reach {target} at {address}: {_cause(reach)}"
            if not _comes_from(reach, choice[tester]):
                return (
                    f"{tester} reaches {target} at {address} from {reach.local_address}, "
                    f"which isn't on its {choice[tester].interface.name}"
                )
    for host in hosts if len(hosts) > 1 else ():
        if not any(host in pair and set(pair) <= set(hosts) for pair in tested):
            return f"no connection with {host} was tried"
    return None


_CAUSES = {
    "timeout": "no answer",
    "refused": "connection refused",
    "unreachable": "no route",
    "other-host": "another host answers at this address",
}


def _cause(reach: Reach | None) -> str:
    if reach is None:
        return "it was not tried"
    return _CAUSES.get(reach.reason or "", reach.reason or "no answer")


def _networks(choice: _Choice) -> list[IPNetwork]:
    return list(dict.fromkeys(one.address.network for one in choice.values()))


def _named(choice: _Choice) -> str:
    """The subnets; a few of them."""
    names = [str(network) for network in _networks(choice)]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reasons(
    hosts: Sequence[str], fabrics: Mapping[str, HostFabric], choice: _Choice, interfaces: Sequence[str]
) -> list[str]:
    speed = min(one.speed_mbit for one in choice.values())
    rate = f" at {speed / 1000:g} Gbit/s" if speed else ""
    names = {one.interface.name for one in choice.values()}
    where = f"interface {names.pop()}{rate}" if len(names) == 1 else f"interfaces differ{rate}: " + ", ".join(
        f"{host} {choice[host].interface.name}" for host in hosts[:4]
    ) + (" …" if len(hosts) > 4 else "")  # fmt: skip
    kind = "subnets that are routed to each other" if len(_networks(choice)) > 1 else "a subnet that all share"
    found = [f"network {_named(choice)} ({where}): {kind}, over which all hosts reach each other"]
    if interfaces:
        found.append(f"interfaces {', '.join(interfaces)} only, as network.interfaces says")
    slow = {host for host in hosts if choice[host].speed_mbit == speed}
    fastest = max(one.speed_mbit for one in choice.values())
    if speed and fastest > speed and len(slow) <= len(hosts) / 2:
        found.append(
            f"warning: {', '.join(sorted(slow))} at {speed / 1000:g} Gbit/s, the others at {fastest / 1000:g}: "
            "every ring is as slow as its slowest link"
        )
    internal = {
        interface.name
        for host in hosts
        for interface in fabrics[host].interfaces
        if interface.kind != "loopback" and (unusable(interface) or "").startswith("of the host's own")
    }
    if internal - {one.interface.name for one in choice.values()}:
        found.append(
            f"never used: {', '.join(sorted(internal))} (for what runs on one host: containers, virtual machines)"
        )
    return found


def _chosen(
    hosts: Sequence[str],
    fabrics: Mapping[str, HostFabric],
    choice: _Choice,
    tested: _Tested,
    launcher: str | None,
    reasons: list[str],
) -> ChosenNetwork:
    at_launcher = _launcher_candidates(hosts, fabrics, choice, tested, launcher) if launcher is not None else {}
    subnets = tuple(str(network) for network in _networks(choice))
    launcher_subnets = dict.fromkeys(str(one.address.network) for one in at_launcher.values())
    return ChosenNetwork(
        per_host={
            host: HostNetwork(
                interface=choice[host].interface.name,
                address=str(choice[host].address.ip),
                prefix_length=choice[host].address.prefix_length,
                speed_mbit=choice[host].speed_mbit or None,
            )
            for host in hosts
        },
        launcher_address={host: str(one.address.ip) for host, one in at_launcher.items()},
        subnets=subnets,
        launcher_subnets=tuple(name for name in launcher_subnets if name not in subnets),
        launcher_interfaces=tuple(dict.fromkeys(one.interface.name for one in at_launcher.values())),
        reasons=tuple(reasons),
    )


def _launcher_candidates(
    hosts: Sequence[str], fabrics: Mapping[str, HostFabric], choice: _Choice, tested: _Tested, launcher: str
) -> dict[str, Candidate]:
    """For each host the address at which it reaches the launching machine: the same for all, if there is one."""
    if launcher in choice:
        return dict.fromkeys(hosts, choice[launcher])
    networks = set(_networks(choice))
    known = sorted(candidates(fabrics[launcher]), key=lambda one: one.address.network not in networks)
    reached = {
        host: [one for one in known if _is_reached(tested.get((host, launcher), {}).get(str(one.address.ip)))]
        for host in hosts
    }
    for host in hosts:
        if not reached[host]:
            tried = tested.get((host, launcher), {})
            causes = ", ".join(f"{address}: {_cause(reach)}" for address, reach in tried.items()) or "nothing was tried"
            raise StartError(
                f"{host} can't reach the launching machine ({causes})",
                where=host,
                fix="let TCP connections from the hosts to this machine through its firewall, "
                "or launch from a machine that they reach",
            )
    shared = next((one for one in known if all(one in reached[host] for host in hosts)), None)
    return {host: shared or reached[host][0] for host in hosts}


def _is_reached(reach: Reach | None) -> bool:
    return reach is not None and reach.ok


def _alone(host: str, fabric: HostFabric) -> ChosenNetwork:
    """One host talks with itself over loopback."""
    loopback = next((interface for interface in fabric.interfaces if interface.kind == "loopback"), None)
    if loopback is None or not loopback.addresses:
        raise StartError("it has no loopback interface", where=host, fix="bring it up: ip link set lo up")
    address = loopback.addresses[0]
    return ChosenNetwork(
        per_host={host: HostNetwork(loopback.name, str(address.ip), address.prefix_length, None)},
        launcher_address={host: str(address.ip)},
        subnets=(str(address.network),),
        launcher_subnets=(),
        launcher_interfaces=(loopback.name,),
        reasons=(f"network {loopback.name}: one host",),
    )


def _no_candidate(fabric: HostFabric, interfaces: Sequence[str]) -> StartError:
    seen = ", ".join(f"{interface.name} ({unusable(interface, interfaces)})" for interface in fabric.interfaces)
    if interfaces:
        return StartError(
            f"none of its interfaces is one of network.interfaces ({', '.join(interfaces)}): {seen or 'it has none'}",
            where=fabric.host,
            fix="correct network.interfaces; where names differ from host to host, give subnets such as 10.1.0.0/16",
        )
    return StartError(
        f"it has no interface that can carry the job: {seen or 'none was found'}",
        where=fabric.host,
        fix="bring an interface up there and give it an address, or take the host out",
    )


def _none_common(
    hosts: Sequence[str],
    allowed: Mapping[str, list[Candidate]],
    choices: Sequence[_Choice],
    tested: _Tested,
    interfaces: Sequence[str],
) -> StartError:
    """Say which pair fails on the best network, or that there is none."""
    only = f" (network.interfaces: {', '.join(interfaces)})" if interfaces else ""
    if choices:
        failures = [f"on {_named(choice)} {_first_failure(hosts, choice, tested)}" for choice in choices[:3]]
        return StartError(
            f"the hosts share no network{only}: {'; '.join(failures)}",
            fix="let the hosts open TCP connections to each other on all ports of this network (firewall, cloud "
            "security group), bring the link up, or take the host out",
        )
    first, other = hosts[0], _unrouted(hosts, allowed, tested)
    networks = [f"{host} has {', '.join(sorted({str(one.address.network) for one in allowed[host]}))}"
                for host in (first, other)]  # fmt: skip
    causes = sorted({_cause(reach) for reach in tested.get((first, other), {}).values() if not reach.ok})
    return StartError(
        f"the hosts share no network{only}: {'; '.join(networks)}; "
        f"{first} can't reach {other}: {', '.join(causes) or 'nothing was tried'}",
        fix="put the hosts on one network, or let routers and firewalls pass TCP between theirs",
    )


def _unrouted(hosts: Sequence[str], allowed: Mapping[str, list[Candidate]], tested: _Tested) -> str:
    """A host that the first one has no way to; the second one if each has one, but on different interfaces."""
    for host in hosts[1:]:
        if not any(_is_routed(start, one, tested) for start in allowed[hosts[0]] for one in allowed[host]):
            return host
    return hosts[1]
