"""Level standard: what the hosts' network, disks and memory really do, measured."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from hvdtrain.cluster import gpu_speed
from hvdtrain.cluster.bandwidth import Pair, Timing, analyse, packed, rounds, suspects, timing
from hvdtrain.cluster.collectives import reduce_on
from hvdtrain.cluster.diagnostics import diagnose
from hvdtrain.cluster.effort import FULL, STANDARD, Effort
from hvdtrain.cluster.gather import probe_commands
from hvdtrain.cluster.measured import Measured, judge
from hvdtrain.cluster.models import Evidence, Finding, Level, Report, Request
from hvdtrain.cluster.progress import SILENT, Progress
from hvdtrain.cluster.quick import Looked, quick
from hvdtrain.errors import StartError
from hvdtrain.hosts.models import Host
from hvdtrain.plan.facts import NetworkFacts
from hvdtrain.remote.bootstrap import probe_sources
from hvdtrain.remote.fanout import Answer, HostFailure, Session

# A single TCP stream may not fill a link that is faster than this, and clouds limit each stream.
_ONE_STREAM_MBIT = 10_000
_STREAMS = 4
_PINGS = 300
# Beside the time that is measured: connecting, and machines that are busy.
_SLACK_S = 6.0
_MAX_ROUNDS_AGAIN = 6
# From open dialogues, what was measured and what the hosts told to further findings.
More = Callable[[Session, Measured, Evidence, Progress], Iterable[Finding]]


def standard(hosts: Sequence[Host], request: Request, progress: Progress = SILENT) -> Looked:
    """All of level quick, then the measurements on the hosts that answered; about a minute for any number of hosts."""
    return measured_level("standard", STANDARD, hosts, request, progress)


def full(hosts: Sequence[Host], request: Request, progress: Progress = SILENT) -> Looked:
    """The same for longer and three times over, each GPU's own speed, and what the hosts' own tools say."""

    def tools(session: Session, measured: Measured, evidence: Evidence, progress: Progress) -> tuple[Finding, ...]:
        progress.tell("with nvidia-smi, dcgmi and ib_write_bw, where they are")
        names = [host for host in measured.hosts if host not in measured.lost]
        return diagnose(session, names, measured.network, evidence)

    return measured_level("full", FULL, hosts, request, progress, tools)


def measured_level(
    level: Level,
    effort: Effort,
    hosts: Sequence[Host],
    request: Request,
    progress: Progress,
    more: More = lambda *_: (),
) -> Looked:
    """Level quick, and so much of measurements; ``more`` adds findings from the same dialogues with the hosts."""
    began, started = time.time(), time.monotonic()
    looked = quick(hosts, request, progress)
    evidence, findings = looked.evidence, looked.report.findings
    measured = None
    if names := evidence.reached:
        commands = probe_commands((host for host in evidence.hosts if host.name in names), request)
        network = chosen_network(evidence)
        with Session(commands, probe_sources()) as session:
            measured = measure(session, names, network, request, effort, progress)
            others = more(session, measured, evidence, progress)
        # One job takes all of them: a host on which it can't start would fail the others.
        unfit = {*measured.lost, *looked.report.failing_hosts()}
        together = [host for host in (network.chosen.per_host if network else names[:1]) if host not in unfit]
        gpus: tuple[Finding, ...] = ()
        if together:
            progress.tell(f"allreduces of Horovod's own on {len(together)} host{'s' if len(together) != 1 else ''}")
            measured.allreduces = reduce_on(evidence, together, effort)
            gpus = gpu_speed.judge(measured.allreduces.gpus) if effort.gpu_s else ()
        findings = (*findings, *judge(measured), *gpus, *others)
    report = Report(began, time.monotonic() - started, level, evidence.names, findings,
                    measurements=measured.to_json() if measured else None)  # fmt: skip
    return replace(looked, report=report, measured=measured)


def measure_links(evidence: Evidence, progress: Progress = SILENT) -> Measured:
    """Only the links between the hosts that gave facts."""
    names, network = evidence.reached, chosen_network(evidence)
    measured = Measured(tuple(names), network)
    if network is not None:
        commands = probe_commands((host for host in evidence.hosts if host.name in names), evidence.request)
        with Session(commands, probe_sources()) as session:
            _measure_network(session, network, measured, evidence.request.timeout_s, STANDARD, progress)
    return measured


def chosen_network(evidence: Evidence) -> NetworkFacts | None:
    """The network of all hosts but those that are cut off; None if there is none, which level quick tells."""
    if evidence.network is None:
        return None
    hosts = [host for host in evidence.reached if host not in evidence.network.cut_off(evidence.reached)]
    if len(hosts) < 2:
        return None
    try:
        # To measure, no host has to reach the launching machine.
        return replace(evidence.network, launcher=hosts[0]).choose(hosts)
    except StartError:
        return None


def measure(
    session: Session,
    hosts: Sequence[str],
    network: NetworkFacts | None,
    request: Request,
    effort: Effort = STANDARD,
    progress: Progress = SILENT,
) -> Measured:
    """Measure all over open dialogues with the probes; a host that falls silent costs its timeout once.

    Args:
        session: with the hosts.
        hosts: that answer.
        network: whose addresses are used; None: it isn't measured.
        request: its working directory is where disks are measured.
        effort: how much is measured.
        progress: is told what begins.
    """
    measured = Measured(tuple(hosts), network)
    if network is not None:
        _measure_network(session, network, measured, request.timeout_s, effort, progress)
    if request.directory:
        progress.tell(f"disks, in {request.directory}")
        question = {"ask": "disk-speed", "folder": request.directory, "size_bytes": effort.disk_bytes}
        timeout_s = request.timeout_s + 2 * effort.disk_s
        answers = _ask_all(session, measured, {**question, "limit_s": effort.disk_s}, timeout_s)
        _keep(measured, "disk-write", answers, "write")
        _keep(measured, "disk-read", answers, "read")
    progress.tell("memory")
    question = {"ask": "memory-speed", "size_bytes": effort.memory_bytes, "duration_s": effort.memory_s}
    _keep(measured, "memory-bandwidth", _ask_all(session, measured, question, request.timeout_s), None)
    return measured


# --- disk and memory ---------------------------------------------------------------------------------------------


def _ask_all(session: Session, measured: Measured, question: Answer, timeout_s: float) -> dict[str, Any]:
    hosts = [host for host in measured.hosts if host not in measured.lost]
    return _answered(measured, session.ask(dict.fromkeys(hosts, question), timeout_s + _SLACK_S))


def _answered(measured: Measured, outcomes: Mapping[str, Answer | HostFailure]) -> dict[str, Any]:
    """The answers; one that says why there is none has ``error``, and a host that fell silent is lost."""
    answers: dict[str, Any] = {}
    for host, outcome in outcomes.items():
        if not isinstance(outcome, HostFailure):
            answers[host] = outcome
        elif outcome.kind == "refused":
            answers[host] = {"error": outcome.text}
        else:
            measured.lost[host] = outcome.text
    return answers


def _keep(measured: Measured, name: str, answers: Mapping[str, Any], part: str | None) -> None:
    speeds: dict[str, float] = {}
    skipped: dict[str, str] = {}
    errors: dict[str, str] = {}
    for host, answer in answers.items():
        rate = _rate(answer.get(part) if part else answer)
        if rate is not None:
            speeds[host] = rate
        elif "skipped" in answer:
            skipped[host] = str(answer["skipped"])
        else:
            errors[host] = str(answer.get("error") or "its answer is no measurement")
    measured.speeds[name], measured.skipped[name], measured.errors[name] = speeds, skipped, errors


def _rate(answer: Any) -> float | None:
    """Bytes/s; None for what can't be a measurement."""
    if not isinstance(answer, dict):
        return None
    done, seconds = answer.get("bytes"), answer.get("seconds")
    if isinstance(done, int) and isinstance(seconds, (int, float)) and done > 0 and seconds > 0:
        return done / seconds
    return None


# --- network -----------------------------------------------------------------------------------------------------


def _measure_network(
    session: Session,
    network: NetworkFacts,
    measured: Measured,
    timeout_s: float,
    effort: Effort,
    progress: Progress,
) -> None:
    """The tournaments, and once more what is suspected or failed."""
    hosts = tuple(network.chosen.per_host)
    each = timing(len(hosts), effort.links_s)
    found: dict[Pair, list[float]] = {}
    tournament = rounds(hosts)
    for repeat in range(effort.repeats):
        times = f", {repeat + 1} of {effort.repeats} times" if effort.repeats > 1 else ""
        progress.tell(f"links between {len(hosts)} hosts, in {len(tournament)} rounds{times}")
        for number, pairs in enumerate(tournament, 1):
            progress.tick(f"round {number} of {len(tournament)}")
            _run(session, network, measured, pairs, each, timeout_s)
        for pair, rate in measured.bit_per_s.items():
            found.setdefault(pair, []).append(rate)
    measured.bit_per_s = {pair: median(rates) for pair, rates in found.items()}
    limits = suspects(analyse(hosts, measured.bit_per_s), measured.bit_per_s)
    before = dict(measured.bit_per_s)
    again = packed([*limits, *measured.failures])[:_MAX_ROUNDS_AGAIN]
    if again:
        progress.tell("what is suspected, once more")
    for pairs in again:
        _run(session, network, measured, pairs, each, timeout_s)
    for (one, other), limit in limits.items():
        for pair in ((one, other), (other, one)):
            if pair in before:
                measured.bit_per_s[pair] = max(before[pair], min(measured.bit_per_s[pair], limit))


def _run(
    session: Session, network: NetworkFacts, measured: Measured, pairs: Iterable[Pair], each: Timing, timeout_s: float
) -> None:
    """One round: the second of each pair expects the first, which measures both directions."""
    pairs = [pair for pair in pairs if not set(pair) & set(measured.lost)]
    limit_s = 2 * (each.warm_up_s + each.duration_s) + _SLACK_S
    common = {"streams": _streams(network), "limit_s": limit_s, "pings": _PINGS}
    common |= {"warm_up_s": each.warm_up_s, "duration_s": each.duration_s}
    requests = {
        server: {"address": network.chosen.per_host[server].address, "token": secrets.token_hex(16), **common}
        for _, server in pairs
    }
    expected = _answered(
        measured, session.ask({server: {"ask": "expect", **asked} for server, asked in requests.items()}, timeout_s)
    )
    questions = {
        client: {"ask": "exchange", **requests[server], "port": expected[server]["port"]}
        for client, server in pairs
        if isinstance(expected.get(server, {}).get("port"), int)
    }
    answers = _answered(measured, session.ask(questions, limit_s + timeout_s))
    for client, server in pairs:
        answer = answers.get(client) or expected.get(server) or {}
        _note(measured, client, server, answer)


def _streams(network: NetworkFacts) -> int:
    speeds = [own.speed_mbit for own in network.chosen.per_host.values()]
    return 1 if all(speed is not None and speed <= _ONE_STREAM_MBIT for speed in speeds) else _STREAMS


def _note(measured: Measured, client: str, server: str, answer: Answer) -> None:
    if measured.lost.keys() & {client, server}:
        return
    out, into, rtt_s = _rate(answer.get("out")), _rate(answer.get("in")), answer.get("rtt_s")
    if out is None or into is None or not isinstance(rtt_s, float):
        measured.failures[client, server] = str(answer.get("error") or "no data came through")
        return
    # The order of the two is that of the round; in the second look it may be the other.
    for pair in ((client, server), (server, client)):
        measured.failures.pop(pair, None)
    measured.rtt_s[client, server] = min(rtt_s, measured.rtt_s.get((client, server), rtt_s))
    for pair, rate in (((client, server), out), ((server, client), into)):
        measured.bit_per_s[pair] = 8 * rate
