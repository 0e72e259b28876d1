"""What a validation found, as types and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from hvdtrain.cluster.network import Network
from hvdtrain.hosts.models import Host
from hvdtrain.remote.ssh import SshSettings

Status = Literal["ok", "warn", "fail", "skip"]
Level = Literal["quick", "standard", "full"]
Facts = Mapping[str, Any]
# Of the JSON; to be raised when a reader of the former one would take something wrong.
VERSION = 1
_MEASURED = {"bandwidth", "latency", "allreduce", "disk-write", "disk-read", "memory-bandwidth", "gpu-matmul",
             "gpu-memory", "gpu-host-copy", "ib-write-bw"}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What one check says about hosts that are alike in it.

    Attributes:
        subject: group of the check: ``reach``, ``software``, ``files``, ``machine``, ``gpus``,
            ``fabric``, ``network`` or ``profile``.
        check: its name, unique.
        hosts: names, in the order of the hostfile.
        status: ``ok``, ``warn``, ``fail`` or ``skip``.
        found: what these hosts have; for ``skip`` the reason.
        expected: what they should have; empty where all is well.
        fix: what to do; empty where all is well.
    """

    subject: str
    check: str
    hosts: tuple[str, ...]
    status: Status
    found: str = ""
    expected: str = ""
    fix: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether ``found`` is a measurement, which says something also where all is well."""
        return self.check in _MEASURED or self.check.startswith("measured.")


@dataclass(frozen=True)
class Request:
    """What is asked of the hosts.

    Attributes:
        ssh: how they are reached.
        python: absolute path of the job's Python on the hosts.
        directory: absolute path of the working directory; None: not looked at.
        paths: data paths that must be there.
        files: scripts that must be equal everywhere, absolute paths.
        interfaces: the only ones that the job's network may use, as in the job spec.
        fabric, hcas: likewise, for Horovod's own allreduce.
        controller: likewise.
        sections: of the probe's facts; empty: all.
        timeout_s: for each host.
    """

    ssh: SshSettings = field(default_factory=SshSettings)
    python: str | None = None
    directory: str | None = None
    paths: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    fabric: str = "auto"
    hcas: tuple[str, ...] = ()
    controller: str = "auto"
    sections: tuple[str, ...] = ()
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Report:
    """The whole result.

    Attributes:
        time: Unix seconds at the start.
        duration_s: how long it took.
        level: ``quick``, ``standard`` or ``full``.
        hosts: all that were asked, in order.
        findings: in the order of the checks.
        profile: name of the profile that was held against them; None without one.
        measurements: what was measured, as `Measured.to_json` gives it; None at a level that measures nothing.
    """

    time: float
    duration_s: float
    level: Level
    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    profile: str | None = None
    measurements: Mapping[str, Any] | None = None

    @property
    def failed(self) -> bool:
        """Whether some check failed."""
        return any(finding.status == "fail" for finding in self.findings)

    def failing_hosts(self) -> dict[str, tuple[str, ...]]:
        """Host -> the checks that it failed, as ``check: what was found``."""
        failing: dict[str, tuple[str, ...]] = {}
        for finding in self.findings:
            if finding.status == "fail":
                for host in finding.hosts:
                    failing[host] = (*failing.get(host, ()), f"{finding.check}: {finding.found}")
        return failing

    def counts(self) -> Counter[str]:
        """How many results there are of each status, counted by host and check."""
        counts: Counter[str] = Counter()
        for finding in self.findings:
            counts[finding.status] += len(finding.hosts)
        return counts

    def to_json(self) -> dict[str, Any]:
        """For a file and for programs."""
        return {"version": VERSION, "ok": not self.failed, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """What was kept.

        Raises:
            KeyError, TypeError, ValueError: it's something else, or of another version.
        """
        if data["version"] != VERSION:
            raise ValueError(f"it has version {data['version']}, and this hvdtrain reads version {VERSION}")
        findings = tuple(Finding(**{**finding, "hosts": tuple(finding["hosts"])}) for finding in data["findings"])
        if any(finding.status not in get_args(Status) for finding in findings):
            raise ValueError("it has a status that isn't known")
        hosts = tuple(str(host) for host in data["hosts"])
        return cls(
            time=float(data["time"]),
            duration_s=float(data["duration_s"]),
            level=data["level"],
            hosts=hosts,
            findings=findings,
            profile=data["profile"],
            measurements=data.get("measurements"),
        )


@dataclass(frozen=True)
class Unreached:
    """Why a host gave no facts; ``kind`` is `SshFault`'s or `HostFailure`'s."""

    kind: str
    what: str
    fix: str


@dataclass(frozen=True)
class Evidence:
    """All that the checks look at.

    Attributes:
        hosts: all of them, in order.
        request: what was asked.
        facts: the probe's facts, by host; only of those that gave some.
        unreached: the others.
        clocks: host -> how far its clock is ahead of this machine's, and the error's bound, in seconds.
        unchecked_keys: hosts for which the user's ssh configuration turns host-key checks off.
        network: who reaches whom; None where there is only this machine, or nobody answered.
    """

    hosts: tuple[Host, ...]
    request: Request
    facts: Mapping[str, Facts]
    unreached: Mapping[str, Unreached]
    clocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unchecked_keys: frozenset[str] = frozenset()
    network: Network | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names."""
        return tuple(host.name for host in self.hosts)

    @property
    def reached(self) -> tuple[str, ...]:
        """Names of those that gave facts."""
        return tuple(name for name in self.names if name in self.facts)

    def value(self, host: str, *path: str) -> Any:
        """A fact, or None where it isn't there or isn't where it belongs."""
        node: Any = self.facts.get(host)
        for step in path:
            node = node.get(step) if isinstance(node, Mapping) else None
        return node
