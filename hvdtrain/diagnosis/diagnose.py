"""From the lines of the ranks and of the launcher to a `Diagnosis`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hvdtrain.diagnosis import noise, tracebacks
from hvdtrain.diagnosis.models import Diagnosis, Rule
from hvdtrain.diagnosis.rules import RULES, SYMPTOMS
from hvdtrain.diagnosis.tracebacks import Trace

# A rule's words count so near before the exception that ended a rank, and in so many last lines of other ranks.
_NEAR = 60
# And a symptom's in so many, as they repeat themselves.
_SAID = 100
_MOST_EVIDENCE = 6
_TAIL = 12
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "killed",
    signal.SIGSEGV: "segmentation-fault",
    signal.SIGBUS: "bus-error",
    signal.SIGILL: "illegal-instruction",
}
_FIRST = re.compile(
    r"^hvdtrain: rank (?P<own>\d+) on (?P<place>\S+) (?:ended|was|hung)|"
    r"process rank (?P<mpi>\d+) with PID \d+ on node (?P<host>\S+) exited on signal|"
    r"^\s*Process name: (?:\[\[\d+,\d+\],)?(?P<rank>\d+)\]?$|^Process (?P<gloo>\d+) exit with status code",
    re.MULTILINE,
)

Found = tuple[Rule, re.Match[str], str]


def diagnose(
    ranks: Mapping[int, Sequence[str]],
    launcher: Sequence[str],
    *,
    first: int | None = None,
    hosts: Mapping[int, str] | None = None,
    traceback: Sequence[str] = (),
    exit_code: int | None = None,
    oom: bool = False,
    hang: str | None = None,
) -> Diagnosis | None:
    """What failed first, and why.

    Args:
        ranks: the last lines of each rank, without prefixes.
        launcher: those of horovodrun and mpirun.
        first: the rank that failed first, if that is known otherwise than from the lines.
        hosts: where the ranks ran.
        traceback: what that rank's Python reported of its exception, if it did.
        exit_code: of that rank's command, negative for a signal.
        oom: whether the kernel has killed a process there because memory ran out.
        hang: why the supervisor ended a job that didn't go on.

    Returns:
        None where nothing in the lines, and no argument, speaks of a failure. `Diagnosis.cause` is None where it is a
        failure that no rule knows.
    """
    lines = {rank: list(own) for rank, own in ranks.items()}
    if first is not None and traceback:
        lines[first] = [*lines.get(first, []), *traceback]
    traces = {rank: tracebacks.find(own) for rank, own in lines.items()}
    said, where = _named(launcher)
    culprit = _culprit(traces, said if first is None else first)
    found = (
        _kernel_killed(culprit, oom)
        or _cause(lines, traces, launcher, culprit)
        or _own_exception(traces, culprit)
        or _hung(culprit, lines, hang)
        or _symptom(lines, launcher, culprit)
        or _ended(culprit, lines, exit_code)
    )
    if found is None:
        return None
    trace = _last_own(traces.get(found.rank, [])) if found.rank is not None else None
    host = found.host
    if host is None and found.rank is not None:
        host = (hosts or {}).get(found.rank) or (where if found.rank == said else None)
    if trace is not None and not found.traceback:
        found = replace(found, exception=trace.exception, traceback=trace.lines)
    return replace(found, host=host)


def explain(lines: Sequence[str]) -> tuple[str, str | None] | None:
    """The likely cause and the fix that one rank's lines show; None where no rule knows them."""
    found = _search(lines, _last_own(tracebacks.find(lines))) or _first_match(SYMPTOMS, "\n".join(lines))
    return found[0].explain(found[1], "this rank") if found else None


def _named(launcher: Sequence[str]) -> tuple[int | None, str | None]:
    """The rank that horovodrun or mpirun says ended first, and its host where they say that."""
    match = _FIRST.search("\n".join(launcher))
    if match is None:
        return None, None
    return next(int(match[name]) for name in ("own", "mpi", "rank", "gloo") if match[name]), match["host"] or match[
        "place"
    ]


def _culprit(traces: Mapping[int, list[Trace]], first: int | None) -> int | None:
    """Whom to look at first: who ended first, unless that one only followed another rank that says why."""
    own = [rank for rank, found in traces.items() if _last_own(found)]
    if first is not None and (first in own or not own):
        return first
    return own[0] if own else first


def _last_own(traces: Sequence[Trace]) -> Trace | None:
    """The exception that ended the rank, if it was its own and not a consequence."""
    return traces[-1] if traces and not noise.is_consequence(traces[-1].exception) else None


def _kernel_killed(rank: int | None, oom: bool) -> Diagnosis | None:
    if not oom:
        return None
    return _by_name("host-memory-kernel", rank)


def _by_name(name: str, rank: int | None, evidence: tuple[str, ...] = ()) -> Diagnosis:
    """What a rule says that is known to hold otherwise than from the lines."""
    rule = next(rule for rule in (*RULES, *SYMPTOMS) if rule.name == name)
    cause = rule.cause.format(who="a process" if rank is None else f"rank {rank}")
    return Diagnosis(rule.kind, rank, cause=cause, fix=rule.fix, rule=name, evidence=evidence)


def _cause(
    lines: Mapping[int, Sequence[str]],
    traces: Mapping[int, list[Trace]],
    launcher: Sequence[str],
    culprit: int | None,
) -> Diagnosis | None:
    """What a rule says: of the culprit, else of horovodrun or mpirun, else of any rank."""
    if culprit is not None and culprit in lines:
        trace = _last_own(traces[culprit])
        if found := _search(lines[culprit], trace):
            return _diagnosis(found, culprit)
        if trace is not None:
            return None
    told = [launcher[index] for index in noise.telling(launcher)]
    if found := _search(told, _last_own(tracebacks.find(told))):
        return _diagnosis(found, culprit if found[0].kind in ("signal", "oom") else None)
    others = {rank: own[-_NEAR:] for rank, own in lines.items() if rank != culprit}
    # Of the first rule that any of them shows: a look at each alone would take too long with many ranks.
    found = _first_match(RULES, "\n".join(line for own in others.values() for line in own))
    if found is None:
        return None
    alone = ((rank, _first_match(found[:1], "\n".join(own))) for rank, own in others.items())
    return next((_diagnosis(match, rank) for rank, match in alone if match), _diagnosis(found, None))


def _search(lines: Sequence[str], trace: Trace | None) -> Found | None:
    """The rule for a rank's end: what its exception says, else what stands near before it, else all of its lines."""
    if trace is None:
        return _first_match(RULES, "\n".join(lines))
    text = "\n".join(trace.lines)
    near = "\n".join(lines[max(0, trace.start - _NEAR) : trace.end])
    return _first_match(RULES, text) or _first_match(RULES, near) or _first_match(SYMPTOMS, text)


def _first_match(rules: Iterable[Rule], text: str) -> Found | None:
    for rule in rules:
        if match := rule.find(text):
            return rule, match, text
    return None


def _diagnosis(found: Found, rank: int | None) -> Diagnosis:
    rule, match, text = found
    groups = match.groupdict()
    if rank is None and (named := groups.get("rank") or groups.get("number")):
        rank = int(named)
    cause, fix = rule.explain(match, f"rank {rank}" if rank is not None else "a process")
    return Diagnosis(
        rule.kind,
        rank,
        groups.get("host") or groups.get("other"),
        cause=cause,
        fix=fix,
        rule=rule.name,
        evidence=_lines_of(match, text),
    )


def _lines_of(match: re.Match[str], text: str) -> tuple[str, ...]:
    """The whole lines in which a rule's words stand."""
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    lines = [line for line in text[start : end if end >= 0 else None].split("\n") if line.strip()]
    return tuple(lines if len(lines) <= _MOST_EVIDENCE else [*lines[:2], *lines[2 - _MOST_EVIDENCE :]])


def _own_exception(traces: Mapping[int, list[Trace]], culprit: int | None) -> Diagnosis | None:
    """An exception that no rule knows: it is its own explanation."""
    trace = _last_own(traces.get(culprit, [])) if culprit is not None else None
    if trace is None:
        return None
    kind = "signal" if trace.fatal else "exception"
    return Diagnosis(kind, culprit, exception=trace.exception, traceback=trace.lines, evidence=(trace.exception,))


def _hung(rank: int | None, lines: Mapping[int, Sequence[str]], why: str | None) -> Diagnosis | None:
    """A hang that the supervisor saw; Horovod's own words on it name the tensors."""
    if why is None:
        return None
    text = "\n".join(line for own in lines.values() for line in own)
    stalled = _first_match([rule for rule in SYMPTOMS if rule.kind == "hang"], text)
    if stalled:
        said = _diagnosis(stalled, rank)
        return replace(said, kind="hang", rank=rank)
    return Diagnosis("hang", rank, evidence=(why,))


def _symptom(lines: Mapping[int, Sequence[str]], launcher: Sequence[str], culprit: int | None) -> Diagnosis | None:
    """What is left where nothing tells the cause itself: the most telling of the consequences."""
    own = lines.get(culprit, ()) if culprit is not None else ()
    everything = "\n".join(
        [*own, *launcher, *(line for rank in lines for line in lines[rank][-_SAID:] if rank != culprit)]
    )
    found = _first_match(SYMPTOMS, everything)
    if found is None:
        return None
    named = found[1].groupdict().get("missing")
    said = _diagnosis(found, None)
    if named and named.isdecimal():
        return replace(said, rank=int(named))
    return said if said.rank is not None else _diagnosis(found, culprit)


def _ended(rank: int | None, lines: Mapping[int, Sequence[str]], code: int | None) -> Diagnosis | None:
    """Only an exit status is known."""
    if rank is None and not code:
        return None
    own = lines.get(rank, ()) if rank is not None else ()
    evidence = tuple(own[index] for index in noise.telling(own)[-_TAIL:])
    # A shell says 128 + number of a command that a signal ended.
    number = -code if code is not None and code < 0 else code - 128 if code is not None and code > 128 else 0
    if number in _SIGNALS:
        return _by_name(_SIGNALS[number], rank, evidence)
    return Diagnosis("signal" if code is not None and code < 0 else "exception", rank, evidence=evidence)
