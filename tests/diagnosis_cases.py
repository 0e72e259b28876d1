"""The saved outputs of tests/data/diagnosis, each with what must be found in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data" / "diagnosis"
# Titles that aren't names of rules.
UNKNOWN, FINE = "unknown", "fine"


@dataclass(frozen=True)
class Case:
    """One saved output: the rule that must win, the rank that must be named, what was run, and its text."""

    rule: str
    rank: int | None
    name: str
    text: str

    def __str__(self) -> str:
        return self.name or self.rule


def cases(file: str) -> list[Case]:
    """The sections of a file."""
    _, *parts = re.split(r"^=== (.*)\n", (DATA / file).read_text(), flags=re.MULTILINE)
    found = []
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        rule, rank, name = [*title.split(), ""][:3]
        found.append(Case(rule, None if rank == "-" else int(rank), name, text))
    return found


CASES = [*cases("recorded.txt"), *cases("written.txt")]


def recorded(name: str) -> Case:
    """The recorded case of that name."""
    return next(case for case in CASES if case.name == name)
