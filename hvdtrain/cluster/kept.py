"""Reports that are kept, and what changed since."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.cluster.models import Finding, Report
from hvdtrain.errors import InputError, Problem, StartError

_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Change:
    """One check that says something else than before, for hosts in which it changed alike."""

    check: str
    hosts: tuple[str, ...]
    before: str
    now: str


def keep(report: Report, path: Path) -> None:
    """Write a report for its owner only, in one step.

    Raises:
        StartError: it can't be written.
    """
    write_own(path, json.dumps(report.to_json(), indent=2) + "\n", "the report", "--output")


def write_own(path: Path, text: str, what: str, option: str) -> None:
    """Write a file for its owner only, in one step.

    Args:
        path: what is there is replaced.
        text: the content.
        what: the file's name in messages.
        option: that named it.

    Raises:
        StartError: it can't be written.
    """
    # The file that a link stands for, not the link.
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        said = f"{what} can't be written: {error.strerror}"
        raise StartError(said, where=str(path), fix=f"correct {option}") from error


def read_report(path: Path) -> Report:
    """A report that was kept.

    Raises:
        InputError: it's none.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES)
        return Report.from_json(json.loads(content))
    except OSError as error:
        raise InputError([Problem(str(path), 0, 0, f"can't read the report: {error.strerror}")]) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"this is no report of validate-cluster: {error}"
        raise InputError([Problem(str(path), 0, 0, message)]) from None


def compare(before: Report, now: Report) -> tuple[Change, ...]:
    """What changed, by check; also hosts that came or went."""
    old, new = _by_place(before), _by_place(now)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for host in dict.fromkeys((*before.hosts, *now.hosts)):
        if (host in before.hosts) != (host in now.hosts):
            words = ("was validated", "wasn't validated")
            groups.setdefault(("host", *(words if host in before.hosts else words[::-1])), []).append(host)
    for place in dict.fromkeys((*old, *new)):
        check, host = place
        was, is_now = old.get(place, "not checked"), new.get(place, "not checked")
        if was != is_now and host in before.hosts and host in now.hosts:
            groups.setdefault((check, was, is_now), []).append(host)
    return tuple(Change(check, tuple(hosts), was, is_now) for (check, was, is_now), hosts in groups.items())


def _by_place(report: Report) -> dict[tuple[str, str], str]:
    return {(finding.check, host): _said(finding) for finding in report.findings for host in finding.hosts}


def _said(finding: Finding) -> str:
    if finding.status == "ok" and finding.is_measured:
        # It differs from one measurement to the next.
        return "ok"
    return f"{finding.status}, {finding.found}" if finding.found else finding.status
