"""A diagnosis for people."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdtrain.diagnosis.models import Diagnosis, Rule
from hvdtrain.diagnosis.rules import RULES, SYMPTOMS
from hvdtrain.diagnosis.saved import Saved

_KINDS = {
    "exception": "failed",
    "signal": "was ended by a signal",
    "oom": "ran out of memory",
    "hang": "hung",
    "lost_host": "was lost",
    "setup": "couldn't start",
}

_ALL: tuple[Rule, ...] = (*RULES, *SYMPTOMS)


def render(saved: Saved) -> str:
    """Who failed first, where, its traceback, the cause and the fix; where none is known, the most telling lines."""
    found = saved.diagnosis
    if found is None:
        return "\n".join([f"{saved.source}: no failure is to be seen; its last lines:", *_indented(saved.telling)])
    lines = [_who(found), *_indented(found.traceback or found.evidence)]
    if found.cause is None:
        if not found.traceback and not found.evidence:
            lines += _indented(saved.telling)
        lines.append("cause: not known; see the lines above")
    else:
        lines.append(f"cause: {found.cause}")
        if found.fix:
            lines.append(f"fix: {found.fix}")
    return "\n".join(lines)


def known() -> str:
    """All failures that are known, as the Markdown table of docs/failures.md: of two, the first wins."""
    rows = [f"| `{rule.name}` | {_cell(rule.title or rule.cause)} | {_cell(rule.fix or '')} |" for rule in _ALL]
    return "\n".join(["| name | cause | fix |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    """What a rule fills in from the output stands here as a word in capitals."""
    return re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), text).replace("|", "\\|")


def _who(found: Diagnosis) -> str:
    who = "the job" if found.rank is None else f"rank {found.rank}"
    where = (
        f" on {found.host}" if found.host and found.rank is not None else f" (host {found.host})" if found.host else ""
    )
    return f"{who}{where} {_KINDS.get(found.kind, 'failed')}"


def _indented(lines: tuple[str, ...]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
