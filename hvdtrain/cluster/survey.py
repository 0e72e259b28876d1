"""What a launch has to know of its hosts before it can be planned, and whether they're fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvdtrain.cluster.models import Report
from hvdtrain.cluster.network import SECTIONS
from hvdtrain.cluster.progress import Progress
from hvdtrain.cluster.quick import quick
from hvdtrain.cluster.recent import Known, recall, remember
from hvdtrain.cluster.request import make_request
from hvdtrain.cluster.standard import measure_links, standard
from hvdtrain.errors import StartError
from hvdtrain.hosts.models import Host
from hvdtrain.plan.facts import NetworkFacts
from hvdtrain.spec.models import JobSpec

_SHOWN = 8


@dataclass(frozen=True)
class Survey:
    """The hosts of a launch.

    Attributes:
        hosts: those that the job may use, in the order in which it shall use them.
        network: by which they reach each other.
        dropped: host -> what it failed, of those that were left out.
        order: why the hosts are in another order than the user's; empty where they aren't.
    """

    hosts: tuple[Host, ...]
    network: NetworkFacts | None
    dropped: dict[str, tuple[str, ...]]
    order: str = ""


def survey(spec: JobSpec, hosts: Sequence[Host], *, check: bool, tell: Callable[[str], None]) -> Survey:
    """Look at the hosts of a job, others than this machine among them.

    Args:
        spec: of the job.
        hosts: of the job.
        check: whether to check them as the spec's ``validate`` says and to measure what it asks for, beside finding
            their network. What was found in the last hour isn't asked for again.
        tell: is given a sentence for the user now and then.

    Raises:
        StartError: a host can't be reached or isn't fit, or they share no network.
    """
    request = make_request(spec)
    level = spec.validate_ if check else "none"
    if level == "none":
        request = replace(request, sections=SECTIONS, directory=None, files=())
    is_ordered = check and spec.network.rank_order == "measured"
    looked_for = f"{level} links" if is_ordered else level
    if known := recall(hosts, request, looked_for):
        return _surveyed(hosts, known, {})
    tell(f"looking at {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}")
    progress = Progress(lambda text: tell(f"measuring {text}"))
    looked = standard(hosts, request, progress) if level == "standard" else quick(hosts, request)
    evidence = looked.evidence
    failing = looked.report.failing_hosts() if level != "none" else _unreached(looked.report, evidence.reached)
    usable = tuple(host for host in hosts if host.name not in failing)
    if failing and (not spec.hosts.drop_failing or not usable):
        raise _not_fit(failing)
    if evidence.network is None:
        return Survey(usable, None, failing)
    order = None
    if is_ordered:
        order = tuple((looked.measured or measure_links(evidence, progress)).rank_order)
    found = Known(evidence.network, order)
    if not failing:
        remember(hosts, request, found, looked_for)
    return _surveyed(usable, found, failing)


def _surveyed(hosts: Sequence[Host], known: Known, dropped: dict[str, tuple[str, ...]]) -> Survey:
    network = known.network.choose([host.name for host in hosts])
    if known.rank_order is None:
        return Survey(tuple(hosts), network, dropped)
    place = {name: number for number, name in enumerate(known.rank_order)}
    ring = tuple(sorted(hosts, key=lambda host: place.get(host.name, len(place))))
    why = f"ring {' - '.join(host.name for host in ring)}: their links were measured (network.rank_order)"
    return Survey(ring, network, dropped, why)


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
