"""Node ranges such as ``node[01-16]`` and ``rack[1-2]n[1-4]``, as ClusterShell reads them."""

from __future__ import annotations

import ipaddress
import math
import re

# More hosts than any Horovod job has had. A range is counted before it is expanded.
MAX_HOSTS = 10_000

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
NAME = re.compile(_NAME)
# RFC 1035 2.3.4
MAX_NAME = 253
_NUMBERS = re.compile(r"[0-9.]+")
_RANGE = re.compile(rf"(?:{_NAME})?(?:\[[0-9,/-]+\][A-Za-z0-9_.-]*)+")
_PART = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?")


class RangeError(ValueError):
    """Text that names no hosts; the message says why."""


def expand(text: str) -> list[str]:
    """The names that a name or range stands for, in order. Leading zeros are kept.

    Raises:
        RangeError: not a host name or range, or too many hosts.
    """
    if "[" not in text and "]" not in text:
        return [_checked(text)]
    if not _RANGE.fullmatch(text):
        raise RangeError(f"'{text}' isn't a range of hosts such as node[01-16]")
    size = math.prod(_size(text, group) for group in re.findall(r"\[([^\]]*)\]", text))
    if size > MAX_HOSTS:
        raise RangeError(f"'{text}' stands for {size} hosts; the limit is {MAX_HOSTS}")
    # Only where there is a range: the import takes as long as the rest of the command line.
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        names = list(NodeSet(text))
    except NodeSetException as error:
        raise RangeError(f"'{text}' isn't a range of hosts: {error}") from error
    return [_checked(name) for name in names]


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise RangeError(f"'{name}' isn't a host name")
    if len(name) > MAX_NAME:
        raise RangeError(f"a host name of {len(name)} characters; the limit is {MAX_NAME}")
    # ssh would take '4' for 0.0.0.4.
    if _NUMBERS.fullmatch(name):
        try:
            ipaddress.IPv4Address(name)
        except ValueError as error:
            raise RangeError(f"'{name}' is neither a host name nor an IPv4 address") from error
    return name


def _size(text: str, group: str) -> int:
    size = 0
    for part in group.split(","):
        match = _PART.fullmatch(part)
        if not match or len(part) > 30:
            raise RangeError(f"'{text}' isn't a range of hosts: '{part}' is neither a number nor first-last")
        if match[2] and len(match[1]) != len(match[2]) and any(re.match("0.", end) for end in (match[1], match[2])):
            raise RangeError(
                f"'{text}' isn't a range of hosts: '{match[1]}' and '{match[2]}' have different lengths; "
                "with leading zeros, write such as 001-100 or 01-99,100"
            )
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step == 0:
            raise RangeError(
                f"'{text}' isn't a range of hosts: '{part}' ends before it starts"
                if step
                else f"'{text}' isn't a range of hosts: '{part}' has a step of 0"
            )
        size += (last - first) // step + 1
    return size


def split_list(text: str) -> list[tuple[int, str]]:
    """Items of a comma-separated list with their offsets; commas inside brackets belong to the range."""
    items = []
    start = depth = 0
    for index, character in enumerate(text + ","):
        depth += (character == "[") - (character == "]")
        # A bracket that is never closed must not swallow the rest without a word: the item is refused later.
        if character == "," and (depth <= 0 or index == len(text)):
            items.append((start, text[start:index]))
            start = index + 1
    return items
