"""From pydantic's errors to sentences for the person who wrote the spec."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hvdtrain.errors import Problem
from hvdtrain.spec.fields import UnfitError
from hvdtrain.spec.models import JobSpec, Section
from hvdtrain.spec.scalars import Scalar, shown
from hvdtrain.spec.yaml_reader import Data, Document, KeyPath

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "path_type": "a path",
}
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
}
_LONGEST_KEY = 60  # of a longer one no key is near


def faulty_paths(error: ValidationError, document: Document) -> list[KeyPath]:
    """Paths of the values that pydantic refused, also where it refused a value's key."""
    return [_path(details, document)[0] for details in error.errors(include_url=False, include_input=False)]


def problems_of(
    error: ValidationError, document: Document, known: Container[KeyPath], root: type[Section] = JobSpec
) -> Iterator[Problem]:
    """One sentence with its place for each fault that pydantic found in values that aren't known as faulty.

    ``root`` is the model that refused them.
    """
    for details in error.errors(include_url=False, include_input=False):
        path, at_key = _path(details, document)
        if details["type"] == "extra_forbidden":
            yield document.problem(path, _unknown_key(path, root), at_key=True)
        elif at_key:
            key = Scalar(str(path[-1]), in_quotes=True, written=str(path[-1]))
            yield document.problem(path, f"{dotted(path)}: {_sentence(details, key, path)}", at_key=True)
        elif path not in known:
            yield document.problem(path, f"{dotted(path)}: {_sentence(details, document.get(path), path)}")


def _path(details: ErrorDetails, document: Document) -> tuple[KeyPath, bool]:
    """The path of a faulty value, and whether its key is at fault: pydantic then adds a step of its own."""
    path = details["loc"]
    if path[-1] == "[key]" and document.get(path) is None:
        return path[:-1], True
    return path, False


def _sentence(details: ErrorDetails, found: Data, path: KeyPath) -> str:
    """What is wrong, what was found and how to fix it."""
    cause = details.get("ctx", {}).get("error")
    fix = None
    if isinstance(cause, UnfitError):
        expected, fix = cause.expected, cause.fix
    elif isinstance(cause, ValueError):
        return str(cause)
    else:
        expected = _expected(details)
        fix = _nearest_choice(details, found)
    if expected == "text" and path[0] in ("env", "command") and isinstance(found, Scalar):  # so it is null
        fix = 'write "" for empty text'
    sentence = f"expected {expected}, found {_describe(found)}"
    return f"{sentence}; {fix}" if fix else sentence


def _nearest_choice(details: ErrorDetails, found: Data) -> str | None:
    """What somebody may have meant who wrote no value of a choice."""
    if details["type"] != "literal_error" or not isinstance(found, Scalar):
        return None
    choices = re.findall("'([^']*)'", str(details["ctx"]["expected"]))
    near = get_close_matches(found.written, choices, n=1) if len(found.written) <= _LONGEST_KEY else []
    return f"did you mean '{near[0]}'?" if near else None


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind in _LIMITS:
        words, name = _LIMITS[kind]
        return f"{words} {context[name]:g}"
    return _EXPECTED[kind]


def _describe(found: Data) -> str:
    if isinstance(found, Scalar):
        return found.describe()
    if isinstance(found, dict):
        return "a mapping"
    if isinstance(found, list):
        return "a list" if found else "an empty list"
    return "nothing"


def _unknown_key(path: KeyPath, root: type[Section]) -> str:
    *parent, name = path
    siblings = [known for known in key_paths(root) if known[:-1] == tuple(parent)]
    # Of keys with the same name the one in the same section counts.
    places = {str(known[-1]): known for known in (*key_paths(root), *siblings)}
    near = get_close_matches(str(name), places, n=1) if len(str(name)) <= _LONGEST_KEY else []
    if near:
        return f"unknown key {shown(dotted(path))}; did you mean '{dotted(places[near[0]])}'?"
    return f"unknown key {shown(dotted(path))}; the keys here are {', '.join(str(known[-1]) for known in siblings)}"


def dotted(path: KeyPath) -> str:
    """A path as it is written in messages: ``hosts.list[0]``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def key_paths(section: type[Section] = JobSpec, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of the spec, or of another model, sections included, in their order."""
    for attribute, field in section.model_fields.items():
        name = field.alias or attribute
        yield (*prefix, name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from key_paths(inner, (*prefix, name))
