"""``--set a.b=value``: one value of the spec, given on the command line. The last one wins, over the file too."""

from __future__ import annotations

from hvdtrain.errors import InputError, Problem
from hvdtrain.spec.scalars import Kind, Scalar, shown, text_fault
from hvdtrain.spec.yaml_reader import Data, Document, KeyPath, Place, build, compose

SOURCE = "--set"


def apply_override(document: Document, override: str) -> None:
    """Set one value, ``KEY=VALUE``, in a document.

    The key's parts are joined by dots; mappings that the file lacks are made. A value in ``[]`` or ``{}`` or in quotes
    is YAML, any other is a YAML scalar as it stands (``on: off # x`` is text); nothing after ``=`` is empty text.

    Raises:
        InputError: it can't be read, or there is no such place.
    """
    key, equals, value = override.partition("=")
    path: KeyPath = tuple(part.strip() for part in key.split("."))
    if not equals:
        raise _fault(f"expected KEY=VALUE, such as options.lr=0.1, found {shown(override)}")
    if "" in path:
        raise _fault(f"expected keys joined by dots, such as options.lr, found {shown(key)}")
    if text_fault(key):
        raise _fault(f"{shown(key)} isn't valid Unicode text")
    mapping = _mapping_around(document, path)
    for place in [place for place in document.places if place[: len(path)] == path]:
        del document.places[place]
    mapping[path[-1]] = _read_value(value.strip(), key)
    document.places[path] = Place(SOURCE)


def _mapping_around(document: Document, path: KeyPath) -> dict[str | int, Data]:
    mapping: dict[str | int, Data] = document.data
    for depth, key in enumerate(path[:-1], start=1):
        inner = mapping.get(key)
        if inner is None or (isinstance(inner, Scalar) and inner.kind is Kind.NULL):
            inner = mapping[key] = {}
            document.places[path[:depth]] = Place(SOURCE)
        name = ".".join(map(str, path[:depth]))
        if isinstance(inner, list):
            raise _fault(f"{'.'.join(map(str, path))}: {name} is a list: set it as a whole, --set '{name}=[...]'")
        if not isinstance(inner, dict):
            raise _fault(f"{'.'.join(map(str, path))}: {name} isn't a mapping, it is {inner.describe()}")
        mapping = inner
    return mapping


def _read_value(text: str, key: str) -> Data:
    if not text.startswith(("[", "{", "'", '"')):
        return Scalar(text, in_quotes=not text, written=text)
    problems: list[Problem] = []
    value: Data = None
    try:
        node = compose(text, SOURCE)
        assert node is not None
        value = build(node, SOURCE, problems).data
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError([Problem(SOURCE, 0, 0, f"{key}: {problem.message}") for problem in problems])
    return value


def _fault(message: str) -> InputError:
    return InputError([Problem(SOURCE, 0, 0, message)])
