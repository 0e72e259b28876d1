"""What a launch has to know of its hosts before it can be planned, and whether they're fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvdtrain.cluster.models import Report
from hvdtrain.cluster.network import SECTIONS
from hvdtrain.cluster.quick import quick
from hvdtrain.cluster.recent import recall, remember
from hvdtrain.cluster.request import make_request
from hvdtrain.errors import StartError
from hvdtrain.hosts.models import Host
from hvdtrain.plan.facts import NetworkFacts
from hvdtrain.spec.models import JobSpec

_SHOWN = 8


@dataclass(frozen=True)
class Survey:
    """The hosts of a launch.

    Attributes:
        hosts: those that the job may use.
        network: by which they reach each other.
        dropped: host -> what it failed, of those that were left out.
    """

    hosts: tuple[Host, ...]
    network: NetworkFacts | None
    dropped: dict[str, tuple[str, ...]]


def survey(spec: JobSpec, hosts: Sequence[Host], *, check: bool, tell: Callable[[str], None]) -> Survey:
    """Look at the hosts of a job, others than this machine among them.

    Args:
        spec: of the job.
        hosts: of the job.
        check: whether to check them as ``validate-cluster --level quick`` does, beside finding their network. What
            was found in the last hour isn't asked for again.
        tell: is given a sentence for the user now and then.

    Raises:
        StartError: a host can't be reached or isn't fit, or they share no network.
    """
    request = make_request(spec)
    if not check:
        request = replace(request, sections=SECTIONS, directory=None, files=())
    if network := recall(hosts, request):
        return Survey(tuple(hosts), network.choose([host.name for host in hosts]), {})
    tell(f"looking at {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}")
    looked = quick(hosts, request)
    evidence = looked.evidence
    failing = looked.report.failing_hosts() if check else _unreached(looked.report, evidence.reached)
    usable = tuple(host for host in hosts if host.name not in failing)
    if failing and (not spec.hosts.drop_failing or not usable):
        raise _not_fit(failing)
    chosen = None if evidence.network is None else evidence.network.choose([host.name for host in usable])
    if evidence.network is not None and not failing:
        remember(hosts, request, evidence.network)
    return Survey(usable, chosen, failing)


def _unreached(report: Report, reached: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {host: faults for host, faults in report.failing_hosts().items() if host not in reached}


def _not_fit(failing: dict[str, tuple[str, ...]]) -> StartError:
    lines = [f"{host}: {'; '.join(faults)}" for host, faults in failing.items()]
    shown = "\n  ".join(lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []))
    return StartError(
        f"{len(failing)} {'host is' if len(failing) == 1 else 'hosts are'} not fit for the job:\n  {shown}",
        fix="'hvdtrain validate-cluster JOB' says how to mend each; "
        "hosts.drop_failing: true goes on without them, validate: none with them",
    )
