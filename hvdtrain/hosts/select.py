"""Leaves hosts out, or all but some."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from hvdtrain.errors import InputError, Problem
from hvdtrain.hosts.local import canonical
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.ranges import RangeError, expand, split_list


def select(
    hosts: Sequence[Host], include: Iterable[str], exclude: Iterable[str], *, missing_ok: bool = False
) -> tuple[Host, ...]:
    """The hosts that ``include`` names (all, if it's empty) without those that ``exclude`` names, in their order.

    Args:
        hosts: the hosts to choose from.
        include: names, ranges, or comma-separated lists of them.
        exclude: the same.
        missing_ok: whether names that no host has, and a choice of no host, are fine: hosts that come and go.

    Raises:
        InputError: a name that no host has, or no host is left; a range that is none.
    """
    known = {canonical(host.name): host.name for host in hosts}
    problems: list[Problem] = []
    included = _names(include, "include", None if missing_ok else known, problems)
    excluded = _names(exclude, "exclude", None if missing_ok else known, problems)
    chosen = tuple(
        host
        for host in hosts
        if (not included or canonical(host.name) in included) and canonical(host.name) not in excluded
    )
    if not chosen and not problems and not missing_ok:
        problems.append(Problem("hosts", 0, 0, "include and exclude leave no host"))
    if problems:
        raise InputError(problems)
    return chosen


def _names(texts: Iterable[str], source: str, known: dict[str, str] | None, problems: list[Problem]) -> set[str]:
    """The names in texts; those that aren't known are problems, if it is known who there is."""
    names: set[str] = set()
    for text in texts:
        for _, item in split_list(text):
            try:
                expanded = [item[1:-1]] if item.startswith("[") and ":" in item else expand(item.strip())
            except RangeError as error:
                problems.append(Problem(source, 0, 0, str(error)))
                continue
            if known is not None and (missing := [name for name in expanded if canonical(name) not in known]):
                problems.append(Problem(source, 0, 0, _not_found(missing, known)))
            names.update(map(canonical, expanded))
    return names


def _not_found(missing: list[str], known: dict[str, str]) -> str:
    if len(missing) > 1:
        return f"no host is named '{missing[0]}', nor are {len(missing) - 1} more of that range"
    near = difflib.get_close_matches(canonical(missing[0]), known, n=1)
    return f"no host is named '{missing[0]}'" + (f"; did you mean '{known[near[0]]}'?" if near else "")
