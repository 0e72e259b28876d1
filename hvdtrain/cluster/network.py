"""Which networks reach from host to host, found by connecting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.errors import StartError
from hvdtrain.fabric.models import HostFabric, host_fabric
from hvdtrain.fabric.routes import choose_network
from hvdtrain.fabric.schedule import Reach, pairs, reaches, targets
from hvdtrain.plan.facts import NetworkFacts
from hvdtrain.remote.fanout import HostFailure, Session

# This machine, where it isn't one of the hosts; no host can be called so.
LAUNCHER = "the launching machine"
# Of the probe's facts.
SECTIONS = ("network", "infiniband")
# A connection that is dropped silently costs this.
_CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Network:
    """What hosts have, and who reaches whom.

    Attributes:
        facts: the probe's sections `SECTIONS`, by host; the launching machine's too.
        reaches: what came of the connections.
        launcher: the launching machine's name in ``facts``.
        interfaces: the only ones allowed, as ``network.interfaces`` of the job spec.
    """

    facts: Mapping[str, Mapping[str, Any]]
    reaches: tuple[Reach, ...]
    launcher: str
    interfaces: tuple[str, ...] = ()

    def choose(self, hosts: Sequence[str]) -> NetworkFacts:
        """The network of these hosts.

        Raises:
            StartError: they share none.
        """
        fabrics = self._fabrics((*hosts, self.launcher))
        launcher, allowed = self.launcher, self.interfaces
        chosen = choose_network(hosts, fabrics, self.reaches, interfaces=allowed, launcher=launcher)
        return NetworkFacts({host: fabrics[host] for host in hosts}, chosen)

    def cut_off(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Those of the hosts that reach no other one, and that no other one reaches."""
        linked = {name for reach in self.reaches if reach.ok for name in (reach.tester, reach.target)}
        return tuple(host for host in hosts if host not in linked)

    def _fabrics(self, hosts: Sequence[str]) -> dict[str, HostFabric]:
        return {host: fabric(host, self.facts[host]) for host in dict.fromkeys(hosts)}

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "facts": dict(self.facts),
            "reaches": [asdict(reach) for reach in self.reaches],
            "launcher": self.launcher,
            "interfaces": list(self.interfaces),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Network:
        """What `to_json` gave.

        Raises:
            KeyError, TypeError: something else.
        """
        results = tuple(Reach(**reach) for reach in data["reaches"])
        return cls(data["facts"], results, data["launcher"], tuple(data["interfaces"]))


def look_at_network(
    session: Session,
    hosts: Sequence[str],
    facts: Mapping[str, Mapping[str, Any]],
    launcher: str,
    *,
    interfaces: Sequence[str],
    timeout_s: float,
) -> Network:
    """Have the hosts connect with each other and with this machine. One that falls silent reaches nobody.

    Args:
        session: with the hosts and this machine.
        hosts: that have given their facts.
        facts: by host; this machine's too.
        launcher: this machine's name in ``session`` and ``facts``.
        interfaces: ``network.interfaces`` of the job spec.
        timeout_s: for each host's answers.
    """
    members = tuple(dict.fromkeys((*hosts, launcher)))
    sections = {name: {section: facts[name].get(section) for section in SECTIONS} for name in members}
    listeners = _answers(session.ask({name: {"ask": "listen"} for name in members}, timeout_s))
    fabrics = {}
    for name in listeners:
        try:
            fabrics[name] = fabric(name, sections[name])
        except StartError:
            # It is told where the network is chosen.
            continue
    wanted = targets(pairs(hosts, launcher), fabrics, listeners, interfaces)
    questions = {
        tester: {"ask": "connect", "targets": found, "timeout_s": _CONNECT_TIMEOUT_S}
        for tester, found in wanted.items()
        if tester in listeners
    }
    answers = _answers(session.ask(questions, timeout_s + _CONNECT_TIMEOUT_S)) if questions else {}
    found = [reach for tester, answer in answers.items() for reach in _reaches(tester, answer)]
    return Network(sections, tuple(found), launcher, tuple(interfaces))


def fabric(host: str, facts: Mapping[str, Any]) -> HostFabric:
    """A host's networks.

    Raises:
        StartError: the host tells what can't be.
    """
    try:
        return host_fabric(host, facts)
    except ValueError as error:
        raise StartError(f"what it says of its network can't be: {error}", where=host) from error


def _reaches(tester: str, answer: Mapping[str, Any]) -> list[Reach]:
    try:
        return reaches(tester, answer["results"])
    except (KeyError, ValueError, AttributeError):
        return []


def _answers(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    return {host: outcome for host, outcome in outcomes.items() if not isinstance(outcome, HostFailure)}
