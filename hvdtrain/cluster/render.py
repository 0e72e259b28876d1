"""A report for people: what is wrong first, then each subject, then one line for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hvdtrain.cluster.groups import fold
from hvdtrain.cluster.kept import Change
from hvdtrain.cluster.models import Finding, Report, Status

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_STYLES: dict[str, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_WORST: tuple[Status, ...] = ("fail", "warn", "skip", "ok")


def render(report: Report) -> Iterator[RenderableType]:
    """The parts to print, top to bottom."""
    from rich.text import Text

    problems = [f for status in ("fail", "warn") for f in report.findings if f.status == status]
    for finding in problems:
        yield _problem(finding)
    table = _grid("subject", "result")
    for subject, findings in _subjects(report.findings):
        table.add_row(Text(subject), _results(findings, report.hosts))
        for check in dict.fromkeys(f.check for f in findings if f.status in ("fail", "warn") or _tells(f)):
            table.add_row(Text(f"  {check}"), _groups([f for f in findings if f.check == check]))
    yield table
    yield Text(_summary(report), _STYLES["fail" if report.failed else "ok"])


def render_changes(changes: Sequence[Change], since: str) -> Iterator[RenderableType]:
    """What changed since a former report."""
    from rich.text import Text

    yield Text(f"\nchanged since {since}:" if changes else f"\nnothing has changed since {since}")
    table = _grid("check", "hosts", "before", "now")
    for change in changes:
        table.add_row(*(Text(cell) for cell in (change.check, fold(change.hosts), change.before, change.now)))
    if changes:
        yield table


def _problem(finding: Finding) -> RenderableType:
    from rich.text import Text

    text = Text(finding.status, _STYLES[finding.status])
    text.append(f"  {fold(finding.hosts)}: {finding.check}: {finding.found}", "")
    if finding.expected:
        text.append(f"\n      expected: {finding.expected}", "")
    if finding.fix:
        text.append(f"\n      fix: {finding.fix}", "")
    return text.append("\n")


def _grid(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _subjects(findings: Iterable[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    subjects: dict[str, list[Finding]] = {}
    for finding in findings:
        subjects.setdefault(finding.subject, []).append(finding)
    yield from subjects.items()


def _tells(finding: Finding) -> bool:
    """Whether a check where all is well has something to say."""
    return finding.status == "ok" and finding.is_measured and bool(finding.found)


def _results(findings: Sequence[Finding], hosts: Sequence[str]) -> RenderableType:
    """Each host's worst status in a subject; checks that are skipped count only where all are."""
    from rich.text import Text

    groups: dict[Status, list[str]] = {}
    for host in hosts:
        own = {finding.status for finding in findings if host in finding.hosts}
        groups.setdefault(next(s for s in ("fail", "warn", "ok", "skip") if s in own or s == "skip"), []).append(host)
    parts = [Text(f"{fold(groups[s])} ").append(s, _STYLES[s]) for s in ("ok", "skip", "warn", "fail") if s in groups]
    return Text(", ").join(parts)


def _groups(findings: Sequence[Finding]) -> RenderableType:
    from rich.text import Text

    ranked = sorted(findings, key=lambda finding: _WORST.index(finding.status), reverse=True)
    return Text(", ").join(
        Text(f"{fold(f.hosts)} ").append(f.status, _STYLES[f.status]).append(f" {f.found}" if f.found else "", "")
        for f in ranked
    )


def _summary(report: Report) -> str:
    failing = report.failing_hosts()
    total = len(report.hosts)
    hosts = f"{total} host{'s' if total != 1 else ''}"
    counts = report.counts()
    rest = ", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "fail", "skip") if counts[status])
    verdict = f"{hosts} fit"
    if failing:
        verdict = f"{len(failing)} of {hosts} failed: {fold(failing)}" if total > 1 else f"{fold(failing)} failed"
    profile = f", profile {report.profile}" if report.profile else ""
    return f"{verdict} ({rest}; level {report.level}{profile}, {report.duration_s:.1f} s)"
