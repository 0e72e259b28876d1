"""Reads hosts as people write them: hostfiles of MPI, Horovod and DeepSpeed, and lists.

One grammar for all: ``[user@]host[:slots] [slots=N] [max_slots=N] [# comment]``, where the host is a name, an IPv4
address, an IPv6 address in brackets, or a range. docs/hostfiles.md explains it for users.
"""

from __future__ import annotations

import difflib
import io
import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import InputError, Problem
from hvdtrain.hosts.local import canonical
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.ranges import MAX_HOSTS, RangeError, expand, split_list

MAX_FILE_BYTES = 1 << 20
MAX_SLOTS = 10_000
# A file that is no hostfile at all mustn't fill the screen.
MAX_PROBLEMS = 50

# The hosts of a line; blanks may follow the commas of a list.
_HOSTS = re.compile(r"\s*(?P<hosts>\S+(?:(?<=,)\s+\S+)*)")
# `slots=4`, also Open MPI's `slots = 4`; or any other word.
_SETTING = re.compile(r"(?P<key>[^\s=]+)\s*=\s*(?P<value>[^\s=]*)|(?P<word>\S+)")
_KEYS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}
_ADDRESS = re.compile(r"\[(?P<address>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]+)?)\](?P<rest>.*)")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\$?")

# `slots` and `max_slots` of a line, each with the offset of its number.
_Settings = dict[str, tuple[int, int]]


@dataclass
class _FaultError(Exception):
    """Something wrong at an offset of the item or line that is being read."""

    offset: int
    message: str


@dataclass(frozen=True)
class _Line:
    """A piece of the source, and where it stands."""

    source: str
    number: int
    column: int
    text: str

    def problem(self, fault: _FaultError) -> Problem:
        column = self.column + fault.offset if self.column else 0
        return Problem(self.source, self.number, column, fault.message)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Hosts of a hostfile, in its order.

    Raises:
        InputError: the file can't be read, or has faults; all of them.
    """
    lines = io.StringIO(_decode(path), newline=None)
    hosts = _parse(_Line(str(path), number, 1, line) for number, line in enumerate(lines, 1))
    if not hosts:
        raise InputError([Problem(str(path), 0, 0, "no hosts in this file")])
    return hosts


def parse_hosts(items: Iterable[str], source: str) -> tuple[Host, ...]:
    """Hosts of a list, each item written as a line of a hostfile or as a comma-separated list of such.

    Raises:
        InputError: there are none, or an item has faults; all of them, with the item's number where there are several.
    """
    texts = list(items)
    several = len(texts) > 1
    hosts = _parse(_Line(f"{source}[{number}]" if several else source, 0, 0, text) for number, text in enumerate(texts))
    if not hosts:
        raise InputError([Problem(source, 0, 0, "no hosts in this list")])
    return hosts


def _decode(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError([Problem(str(path), 0, 0, f"can't read the hostfile: {error.strerror}")]) from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError([Problem(str(path), 0, 0, "larger than 1 MiB: this is no hostfile")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError([Problem(str(path), line, 0, "not UTF-8 text: this is no hostfile")]) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputError([Problem(str(path), line, 0, "binary data: this is no hostfile")])
    return text


def _parse(lines: Iterable[_Line]) -> tuple[Host, ...]:
    hosts: list[Host] = []
    problems: list[Problem] = []
    seen: dict[str, tuple[str, _Line]] = {}
    for line in lines:
        if len(problems) >= MAX_PROBLEMS:
            problems.append(Problem(line.source, line.number, 0, "too many faults; the rest isn't read"))
            break
        faults: list[_FaultError] = []
        for offset, item, settings in _items_of(line.text, faults):
            try:
                for host in _expand_item(item, offset, settings):
                    _refuse_duplicate(host.name, offset, line, seen)
                    hosts.append(host)
            except _FaultError as fault:
                faults.append(fault)
        problems += [line.problem(fault) for fault in faults]
        if len(hosts) > MAX_HOSTS:
            problems.append(line.problem(_FaultError(0, f"more than {MAX_HOSTS} hosts")))
            break
    if problems:
        raise InputError(problems)
    return tuple(hosts)


def _refuse_duplicate(name: str, offset: int, line: _Line, seen: dict[str, tuple[str, _Line]]) -> None:
    key = canonical(name)
    if key not in seen:
        seen[key] = (name, line)
        return
    other, first = seen[key]
    if first is line:
        where = "in the same line" if line.number else "in the same list"
    else:
        where = f"in line {first.number}" if first.number else f"in {first.source}"
    if key == "localhost" and name.lower() != other.lower():
        raise _FaultError(
            offset, f"'{name}' and '{other}' ({where}) are both this machine; list it once, with all its slots"
        )
    raise _FaultError(offset, f"host '{name}' was already listed {where}; list it once, with all its slots")


def _items_of(text: str, faults: list[_FaultError]) -> Iterator[tuple[int, str, _Settings]]:
    """The hosts and ranges of one line, each with its offset and the line's settings."""
    content = text.partition("#")[0]
    match = _HOSTS.match(content)
    if not match:
        return
    settings = _settings(content, match.end(), faults)
    for offset, item in split_list(match["hosts"]):
        at = match.start("hosts") + offset + len(item) - len(item.lstrip())
        if item.strip():
            yield at, item.strip(), settings
        else:
            faults.append(_FaultError(at, "an empty item in the list of hosts"))


def _settings(content: str, start: int, faults: list[_FaultError]) -> _Settings:
    """``slots=…`` and ``max_slots=…``, each with its value's offset."""
    settings: _Settings = {}
    for match in _SETTING.finditer(content, start):
        if match["word"]:
            message = f"'{match['word']}' isn't understood here; a line is 'host slots=N max_slots=N # comment'"
            faults.append(_FaultError(match.start(), message))
            # What follows a word out of place would be misread, too.
            break
        try:
            key, value = _setting(match)
        except _FaultError as fault:
            faults.append(fault)
            continue
        if key in settings:
            faults.append(_FaultError(match.start(), f"'{key}' is given twice"))
        settings[key] = value, match.start("value")
    return settings


def _setting(match: re.Match[str]) -> tuple[str, int]:
    key = _KEYS.get(match["key"].lower())
    if key is None:
        near = difflib.get_close_matches(match["key"].lower(), _KEYS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "; known are 'slots' and 'max_slots'"
        raise _FaultError(match.start(), f"unknown word '{match['key']}'{hint}")
    return key, _count(match["value"], match.start("value"), key, keyword=True)


def _count(text: str, offset: int, what: str, *, keyword: bool) -> int:
    if not (text.isascii() and text.isdigit()):
        after = "':'" if what == "slots" and not keyword else f"'{what}='"
        raise _FaultError(offset, f"'{text}' isn't a number of slots" if text else f"a number is missing after {after}")
    if len(text) > 9 or not 1 <= int(text) <= MAX_SLOTS:
        raise _FaultError(offset, f"{what} is {text}; it must be from 1 to {MAX_SLOTS}")
    return int(text)


def _expand_item(item: str, at: int, settings: _Settings) -> Iterator[Host]:
    user, name, count = _split_item(item, at)
    if count is not None and "slots" in settings:
        raise _FaultError(settings["slots"][1], f"the slots of '{name}' are given twice, by ':' and by 'slots='")
    maximum = settings["max_slots"][0] if "max_slots" in settings else None
    slots = count or (settings["slots"][0] if "slots" in settings else maximum or 1)
    if maximum is not None and maximum < slots:
        raise _FaultError(settings["max_slots"][1], f"max_slots is {maximum}, less than the {slots} slots")
    names = [name]
    if ":" not in name:
        try:
            names = expand(name)
        except RangeError as error:
            raise _FaultError(at, str(error)) from error
    for each in names:
        yield Host(each, slots, maximum, user)


def _split_item(item: str, at: int) -> tuple[str | None, str, int | None]:
    """``[user@]host[:slots]`` in its parts."""
    user, found, rest = item.rpartition("@")
    if found and not _USER.fullmatch(user):
        raise _FaultError(at, f"'{user}' isn't a user name")
    offset = at + len(item) - len(rest)
    if match := _ADDRESS.fullmatch(rest):
        name, tail = match["address"], match["rest"]
        try:
            ipaddress.IPv6Address(name)
        except ValueError as error:
            raise _FaultError(offset, f"'{name}' isn't an IPv6 address") from error
        if tail and not tail.startswith(":"):
            raise _FaultError(offset + match.start("rest"), f"'{tail}' isn't understood after the address")
    elif rest.startswith("[") and ":" in rest.partition("]")[0]:
        raise _FaultError(offset, f"'{rest}' isn't an IPv6 address in brackets, such as [fe80::1]:2")
    else:
        name, colon, count = rest.partition(":")
        if ":" in count:
            raise _FaultError(offset, f"'{rest}' has several colons; an IPv6 address goes in brackets: [{rest}]")
        tail = colon + count
    if not tail:
        return user or None, name, None
    return user or None, name, _count(tail[1:], offset + len(rest) - len(tail) + 1, "slots", keyword=False)
