"""YAML to plain data that remembers where each value stands, safe against documents made to harm.

PyYAML scans and composes; what its scalars mean is decided by hvdtrain.spec.scalars. Aliases are copied into the places
where they are used, so the sizes counted here are those after that, and a bomb of aliases ends at the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML built without libyaml
    from yaml import SafeLoader  # type: ignore[assignment]

from hvdtrain.errors import InputError, Problem
from hvdtrain.spec.scalars import Scalar, shown, text_fault
from hvdtrain.spec.yaml_errors import explain_reader_error, explain_yaml_error

MAX_BYTES = 1 << 20
MAX_VALUES = 50_000
MAX_DEPTH = 50

Data = Any  # Scalar | list[Data] | dict[str, Data]
KeyPath = tuple[str | int, ...]

_TEXT = "tag:yaml.org,2002:str"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_PLAIN = "plain"


@dataclass(frozen=True)
class Place:
    """Where a value stands: source, and line and column, from 1, of its key and of itself (0: no such place)."""

    source: str
    key: tuple[int, int] = (0, 0)
    value: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class FileKind:
    """What a file should be, in the words of messages.

    Attributes:
        name: ``job spec``.
        least: what can't be missing.
        example: a line of one.
    """

    name: str
    least: str
    example: str


JOB_SPEC = FileKind("job spec", "'task' or 'command'", "task: module:Class")


@dataclass
class Document:
    """A file as read.

    Attributes:
        data: mappings, lists and, in them, `Scalar`.
        places: where each of them stands, by its path of keys.
    """

    data: Data
    places: dict[KeyPath, Place]

    def place(self, path: KeyPath) -> Place:
        """The place of a value, or of the nearest mapping around it that has one."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path]

    def get(self, path: KeyPath) -> Data | None:
        """The value at a path, or None."""
        node: Data = self.data
        for step in path:
            if isinstance(node, dict):
                node = node.get(step)
            elif isinstance(node, list) and isinstance(step, int) and step < len(node):
                node = node[step]
            else:
                return None
        return node

    def problem(self, path: KeyPath, message: str, *, at_key: bool = False) -> Problem:
        """A fault of the value at a path, or of its key."""
        place = self.place(path)
        line, column = place.key if at_key else place.value
        return Problem(place.source, line, column, message)


class _Loader(SafeLoader):
    """Marks scalars without quotes in place of guessing at their type."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else _TEXT
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


def read_document(path: Path, problems: list[Problem], kind: FileKind = JOB_SPEC) -> Document:
    """Read a spec's file, or one of another kind; faults that leave a document are added to ``problems``.

    Raises:
        InputError: no document can be had from it.
    """
    source = str(path)
    node = compose(_read_text(path, kind), source)
    if node is None:
        raise InputError([Problem(source, 0, 0, f"the file is empty: a {kind.name} has at least {kind.least}")])
    if not isinstance(node, yaml.MappingNode):
        found = "a list" if isinstance(node, yaml.SequenceNode) else f"the text {shown(node.value)}"
        message = f"expected a mapping (lines such as '{kind.example}'), found {found}"
        raise InputError([Problem(source, *_position(node), message)])
    return build(node, source, problems)


def compose(text: str, source: str) -> yaml.Node | None:
    """YAML's nodes, None for an empty document.

    Raises:
        InputError: it isn't YAML, or larger or deeper than a spec may be.
    """
    try:
        _check_limits(text, source)
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise InputError([explain_yaml_error(error, text, source)]) from None
    except yaml.reader.ReaderError as error:
        raise InputError([explain_reader_error(error, text, source)]) from None
    return node


def build(node: yaml.Node, source: str, problems: list[Problem]) -> Document:
    """Data and places of a node; faults that leave a document are added to ``problems``.

    Raises:
        InputError: with its aliases filled in it is too large or too deep.
    """
    builder = _Builder(source)
    data = builder.build(node, (), _position(node))
    problems += builder.problems
    return Document(data, builder.places)


def _read_text(path: Path, kind: FileKind) -> str:
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise InputError([Problem(source, 0, 0, f"this is a folder: give the {kind.name}'s YAML file in it")]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError([Problem(source, 0, 0, f"can't read the {kind.name}: {reason}")]) from None
    if len(content) > MAX_BYTES:
        raise InputError([Problem(source, 0, 0, f"the file is larger than 1 MiB: is it a {kind.name}?")])
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError([Problem(source, 0, 0, "the file is in UTF-16: save it as UTF-8")])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8", errors="replace").removeprefix("\ufeff")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"byte 0x{content[error.start]:02x} isn't UTF-8: save the file as UTF-8"
        raise InputError([Problem(source, line, column, message)]) from None


def _check_limits(text: str, source: str) -> None:
    """Stop a document that would need much time, or more stack than there is, to compose."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.NodeEvent):
            values += 1
        if depth > MAX_DEPTH:
            raise _too_deep(source, event)
        if values > MAX_VALUES:
            raise _too_large(source, event)


def _too_deep(source: str, where: yaml.Node | yaml.Event) -> InputError:
    return InputError([Problem(source, *_position(where), f"lists and mappings are nested deeper than {MAX_DEPTH}")])


def _too_large(source: str, where: yaml.Node | yaml.Event) -> InputError:
    message = f"the file has more than {MAX_VALUES} values or 1 MiB of text, aliases counted wherever they're used"
    return InputError([Problem(source, *_position(where), message)])


def _position(where: yaml.Node | yaml.Event) -> tuple[int, int]:
    assert where.start_mark is not None
    return where.start_mark.line + 1, where.start_mark.column + 1


class _Builder:
    def __init__(self, source: str) -> None:
        self.source = source
        self.places: dict[KeyPath, Place] = {}
        self.problems: list[Problem] = []
        self._values = 0
        self._characters = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: KeyPath, key: tuple[int, int]) -> Data:
        self._count(node)
        self.places[path] = Place(self.source, key, _position(node))
        if node.tag not in (_PLAIN, _TEXT, *_COLLECTIONS):
            self._fault(node, f"the tag {shown(_short_tag(node.tag))} isn't used here: take it out")
        if isinstance(node, yaml.ScalarNode):
            return Scalar(node.value, in_quotes=node.tag != _PLAIN, written=node.value)
        with self._opened(node, path):
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, index), _position(item)) for index, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            entries = self._entries(node, path)
            return {name: self.build(value, (*path, name), _position(key)) for name, (key, value) in entries.items()}

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Keys and values of a mapping, those that ``<<`` merges into it included; its own win."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            self._count(key)
            if not isinstance(key, yaml.ScalarNode):
                self._fault(key, "a key must be text, and this is a list or a mapping")
            elif key.value in lines:
                self._fault(key, f"the key {shown(key.value)} is given twice, first in line {lines[key.value]}")
            elif fault := _key_fault(key):
                self._fault(key, fault)
            else:
                lines[key.value] = key.start_mark.line + 1
                if key.value == "<<" and key.tag == _PLAIN:
                    merged = self._merged(value, path)
                else:
                    own[key.value] = (key, value)
        return merged | own

    def _merged(self, value: yaml.Node, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            self._count(mapping)
            if not isinstance(mapping, yaml.MappingNode):
                self._fault(mapping, "'<<' merges mappings: give it *name of an anchor, or a list of these")
                continue
            with self._opened(mapping, path):
                # Of several mappings the first wins.
                entries = self._entries(mapping, path) | entries
        return entries

    @contextmanager
    def _opened(self, node: yaml.Node, path: KeyPath) -> Iterator[None]:
        if id(node) in self._open:
            place = Problem(
                self.source, *_position(node), "this value contains itself: an alias in it names its anchor"
            )
            raise InputError([place])
        if len(path) >= MAX_DEPTH or len(self._open) >= MAX_DEPTH:
            raise _too_deep(self.source, node)
        self._open.add(id(node))
        yield
        self._open.remove(id(node))

    def _count(self, node: yaml.Node) -> None:
        self._values += 1
        if isinstance(node, yaml.ScalarNode):
            self._characters += len(node.value)
        if self._values > MAX_VALUES or self._characters > MAX_BYTES:
            raise _too_large(self.source, node)

    def _fault(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(self.source, *_position(node), message))


def _key_fault(key: yaml.ScalarNode) -> str | None:
    if not key.value:
        return "a key is missing before ':'"
    if "${" in key.value:
        return "variables are filled in in values, not in keys"
    fault = text_fault(key.value)
    return f"this key can't be used: {fault}" if fault else None


def _short_tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")
