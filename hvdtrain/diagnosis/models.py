"""What a rule is, and what a diagnosis is."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """What failed, where and why.

    Attributes:
        kind: ``exception``, ``signal``, ``oom``, ``hang``, ``lost_host`` or ``setup``.
        rank: the rank at fault; None where no rank is, or nobody knows.
        host: its host, or the host that can't be reached.
        exception: the traceback's last line.
        traceback: its lines, oldest call first.
        cause: the likely cause, one sentence without a full stop; None where no rule knows this failure.
        fix: what to do about it.
        rule: name of the rule that said so.
        evidence: the lines that show it.
    """

    kind: str
    rank: int | None = None
    host: str | None = None
    exception: str | None = None
    traceback: tuple[str, ...] = ()
    cause: str | None = None
    fix: str | None = None
    rule: str | None = None
    evidence: tuple[str, ...] = ()


# A value that is filled into a sentence may be no longer.
_LONGEST_VALUE = 300


@dataclass(frozen=True)
class Rule:
    r"""A failure that people really meet, and how to see it in the lines of a rank or of a launcher.

    Attributes:
        name: short, for tests and for ``--format json``.
        needle: words of the output without which the pattern can't match; looked for first, as that is quick.
        pattern: a regular expression with named groups, over lines joined by ``\n``; ``^`` and ``$`` match at lines.
        cause: one sentence without a full stop; ``{name}`` stands for what the group of that name found, ``{who}``
            for the rank.
        fix: a command, a setting or what else helps, with the same names.
        kind: as in `Diagnosis`.
        title: what the table in docs/failures.md says of it; default: the cause, where that has no names in it.
    """

    name: str
    needle: str | tuple[str, ...]
    pattern: str
    cause: str
    fix: str | None = None
    kind: str = "exception"
    title: str | None = None

    @functools.cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE)

    def find(self, text: str) -> re.Match[str] | None:
        """Where the text shows this failure first."""
        needles = (self.needle,) if isinstance(self.needle, str) else self.needle
        if not any(needle in text for needle in needles):
            return None
        return self._compiled.search(text)

    def explain(self, match: re.Match[str], who: str) -> tuple[str, str | None]:
        """Cause and fix, with the values filled in."""
        values = {name: _short(" ".join((value or "").split())) for name, value in match.groupdict().items()}
        values["who"] = who
        return self.cause.format_map(values), self.fix.format_map(values) if self.fix else None


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
