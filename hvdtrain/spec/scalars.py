"""Single values of a spec before their type is known: the text as written, and what YAML 1.2 reads in it.

YAML 1.1, which PyYAML follows, takes ``no`` for false, ``22:22`` for 1342, ``010`` for 8 and ``1e-3`` for text. Here
the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema) says what a value without quotes can be, and
the key that it is given to says what it is: ``OMP_NUM_THREADS: 1`` is text, ``processes: 1`` a number.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a scalar can be in YAML 1.2."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    NULL = "null"


_CORE_SCHEMA = (
    (Kind.NULL, re.compile(r"null|Null|NULL|~|")),
    (Kind.BOOLEAN, re.compile(r"true|True|TRUE|false|False|FALSE")),
    (Kind.INTEGER, re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")),
    (Kind.NUMBER, re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")),
    (Kind.NUMBER, re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")),
)
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_SHOWN_LENGTH = 60


def core_kind(text: str) -> Kind:
    """What YAML 1.2 reads in a scalar without quotes."""
    return next((kind for kind, pattern in _CORE_SCHEMA if pattern.fullmatch(text)), Kind.TEXT)


@dataclass(frozen=True)
class Scalar:
    """One value of a spec.

    Attributes:
        text: the value's text, with variables filled in.
        in_quotes: whether it stands in quotes (or in a block), and so is text, whatever it looks like.
        written: the text as the user wrote it. Messages show this one, since a variable may hold a secret.
        from_variable: whether a variable was filled in.
    """

    text: str
    in_quotes: bool
    written: str
    from_variable: bool = False

    @property
    def kind(self) -> Kind:
        """What it is in YAML."""
        return Kind.TEXT if self.in_quotes else core_kind(self.text)

    @property
    def typed_kind(self) -> Kind:
        """What it is for a key that takes a number or a boolean: there ``"${N}"`` counts like ``${N}``."""
        return core_kind(self.text) if self.from_variable else self.kind

    def number(self) -> int | float:
        """The number in it; ``typed_kind`` says that there is one.

        Raises:
            ValueError: it is too large.
        """
        if self.typed_kind is Kind.INTEGER:
            base = {"0o": 8, "0x": 16}.get(self.text[:2], 10)
            try:
                return int(self.text, base)
            except ValueError:  # more digits than Python converts
                raise ValueError("the number is too large") from None
        if self.text[-1:] in "fFnN":
            return float(self.text.replace(".", ""))
        value = float(self.text)
        if math.isinf(value):
            raise ValueError("the number is too large")
        return value

    def value(self) -> str | int | float | bool | None:
        """The value as YAML has it, for a key that takes values of any type.

        Raises:
            ValueError: it is a number that is too large.
        """
        if self.kind is Kind.TEXT:
            return self.text
        if self.kind is Kind.NULL:
            return None
        if self.kind is Kind.BOOLEAN:
            return self.text.lower() == "true"
        return self.number()

    def describe(self) -> str:
        """What was found, for a message."""
        if self.from_variable:
            return f"what {shown(self.written)} stands for"
        if self.kind is Kind.NULL:
            return "nothing"
        if self.kind is Kind.BOOLEAN:
            return self.text.lower()
        kind = "text" if self.kind is Kind.TEXT else "number"
        return f"the {kind} {shown(self.text) if kind == 'text' else self.text[:_SHOWN_LENGTH]}"


def shown(text: str) -> str:
    """A text of the user's in quotes, cut to a length that fits a line, control characters escaped."""
    if len(text) > _SHOWN_LENGTH:
        text = f"{text[: _SHOWN_LENGTH - 1]}…"
    return "'" + "".join(char if char.isprintable() else repr(char)[1:-1] for char in text) + "'"


def text_fault(text: str) -> str | None:
    """What makes a text unfit to be passed to any program, or None."""
    found = _NO_TEXT.search(text)
    if found is None:
        return None
    return "it holds a NUL character" if found[0] == "\0" else "it isn't valid Unicode text"
