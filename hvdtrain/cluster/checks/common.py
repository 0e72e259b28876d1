"""What checks are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdtrain.cluster.models import Evidence, Finding, Status

NOT_REACHED = "not reached"
# What one host has: status, found, expected, fix.
Verdict = tuple[Status, str, str, str]


def ok(found: object = "") -> Verdict:
    """All is well."""
    return "ok", str(found), "", ""


def by_host(
    evidence: Evidence, subject: str, check: str, judge: Callable[[str], Verdict], hosts: Iterable[str] | None = None
) -> list[Finding]:
    """Judge each host that was reached by itself; equal verdicts become one finding, and the others are skipped."""
    reached = evidence.reached if hosts is None else tuple(hosts)
    groups: dict[Verdict, list[str]] = {}
    for name in reached:
        groups.setdefault(judge(name), []).append(name)
    if hosts is None and (missing := [name for name in evidence.names if name not in evidence.facts]):
        groups.setdefault(("skip", NOT_REACHED, "", ""), []).extend(missing)
    return [Finding(subject, check, tuple(names), *verdict) for verdict, names in groups.items()]


def equal(
    evidence: Evidence,
    subject: str,
    check: str,
    values: Mapping[str, Any],
    fix: str,
    *,
    status: Status = "fail",
    none: str = "not installed",
) -> list[Finding]:
    """Hold the hosts against each other: what most have is right.

    Where no value is that of more than half, nobody can say who is right, and all are named.

    Args:
        evidence: of all hosts.
        subject: of the findings.
        check: its name.
        values: what each host that was reached has.
        fix: with ``{value}`` for the value that is right, where there is one.
        status: of those that differ.
        none: what a host without a value is said to have.
    """
    texts = {name: none if value is None else str(value) for name, value in values.items()}
    ranked = Counter(texts.values()).most_common(2)
    right = ranked[0][0] if ranked and ranked[0][1] * 2 > len(texts) else None

    def judge(name: str) -> Verdict:
        found = texts[name]
        if found == right:
            return ("skip", none, "", "") if values[name] is None else ok(found)
        if right is None:
            return status, found, "the same on all hosts", fix.format(value="the same version or value everywhere")
        return (
            status,
            found,
            f"{right}, as {ranked[0][1]} other{'s have' if ranked[0][1] > 1 else ' has'}",
            fix.format(value=right),
        )

    return by_host(evidence, subject, check, judge)


def size(number: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
