"""Settings that gather with their reasons, and give way to those of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MCA_PREFIX = "OMPI_MCA_"
_HOSTS_SHOWN = 4


@dataclass(frozen=True)
class FabricPlan:
    """What the job's processes and mpirun are told of the network.

    Attributes:
        kind: ``tcp``, ``infiniband``, ``roce`` or ``efa``.
        environment: variables for every worker.
        per_host: by host's name, variables for the workers there, where hosts differ.
        mca: parameters for mpirun, (name, value); no name twice. Empty under Gloo.
        reasons: what was decided and why, one sentence each.
    """

    kind: str
    environment: Mapping[str, str]
    per_host: Mapping[str, Mapping[str, str]]
    mca: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]


class Settings:
    """Collects variables and MCA parameters. What the user has set already is left as it is, and said."""

    def __init__(self, hosts: Sequence[str], already_set: Mapping[str, str]) -> None:
        self._hosts = tuple(hosts)
        self._already_set = already_set
        self._environment: dict[str, str] = {}
        self._per_host: dict[str, dict[str, str]] = {host: {} for host in hosts}
        self._mca: dict[str, str] = {}
        self._reasons: list[str] = []

    def note(self, reason: str) -> None:
        """Say something that sets nothing."""
        self._reasons.append(reason)

    def variable(self, name: str, value: str | Mapping[str, str], why: str) -> None:
        """Set a variable on all hosts, or by host; equal values become one for all."""
        if self._is_kept(name, name):
            return
        if isinstance(value, str):
            value = dict.fromkeys(self._hosts, value)
        values = set(value.values())
        if len(values) == 1 and len(value) == len(self._hosts):
            self._environment[name] = values.pop()
            self.note(f"{name}={self._environment[name]}: {why}")
            return
        for host, own in value.items():
            self._per_host[host][name] = own
        shown = ", ".join(f"{own} on {host}" for host, own in list(value.items())[:_HOSTS_SHOWN])
        self.note(f"{name} by host ({shown}{', …' if len(value) > _HOSTS_SHOWN else ''}): {why}")

    def parameter(self, name: str, value: str, why: str) -> None:
        """Set an MCA parameter of mpirun's."""
        if not self._is_kept(MCA_PREFIX + name, f"mpirun's {name}"):
            self._mca[name] = value
            self.note(f"mpirun {name}={value}: {why}")

    def plan(self, kind: str) -> FabricPlan:
        """All that was set."""
        return FabricPlan(
            kind=kind,
            environment=dict(sorted(self._environment.items())),
            per_host={host: dict(sorted(own.items())) for host, own in self._per_host.items() if own},
            mca=tuple(self._mca.items()),
            reasons=tuple(self._reasons),
        )

    def _is_kept(self, name: str, called: str) -> bool:
        if name not in self._already_set:
            return False
        self.note(f"{called} stays {self._already_set[name]}, as you have set it ({name})")
        return True
