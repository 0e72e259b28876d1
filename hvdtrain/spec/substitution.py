"""``${NAME}`` and ``${NAME:-default}`` in values, after YAML was read: a variable's value never becomes structure.

As in a shell, the default also stands for an empty variable, and ``$NAME`` without braces stays as it is, for the
programs that know it. ``$${`` gives ``${``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hvdtrain.errors import InputError
from hvdtrain.spec.scalars import Scalar, shown, text_fault
from hvdtrain.spec.yaml_reader import MAX_BYTES, Data, Document, KeyPath

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<body>[^{}]*)\}|\$\{.*", re.DOTALL)
_BODY = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>.*))?", re.DOTALL)
_FORMS = "write ${NAME}, or ${NAME:-default} with no braces in the default; $${ gives the characters ${"


def substitute(document: Document, environ: Mapping[str, str]) -> dict[KeyPath, list[str]]:
    """Fill variables into a document's values.

    Returns:
        For each value that couldn't be filled in, what is wrong with it; its text stays.

    Raises:
        InputError: they would add more than `MAX_BYTES` characters to the spec.
    """
    filler = _Filler(document, environ)
    document.data = filler.fill(document.data, ())
    return filler.faults


class _Filler:
    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self.faults: dict[KeyPath, list[str]] = {}
        self._document = document
        self._environ = environ
        self._characters = 0

    def fill(self, node: Data, path: KeyPath) -> Data:
        if isinstance(node, dict):
            return {key: self.fill(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [self.fill(value, (*path, index)) for index, value in enumerate(node)]
        return self._fill_scalar(node, path)

    def _fill_scalar(self, scalar: Scalar, path: KeyPath) -> Scalar:
        faults: list[str] = []
        pieces: list[str] = []
        end = 0
        variables = False
        for reference in _REFERENCE.finditer(scalar.text):
            pieces.append(scalar.text[end : reference.start()])
            end = reference.end()
            if reference[0] == "$${":
                pieces.append("${")
                continue
            variables = True
            value, fault = self._value(reference)
            self._count(len(value), path)
            pieces.append(value)
            faults += [fault] if fault else []
        text = "".join([*pieces, scalar.text[end:]])
        if not faults and (fault := text_fault(text)):
            faults.append(f"{'a value filled in here' if variables else 'this text'} can't be used: {fault}")
        if faults:
            self.faults[path] = faults
            return scalar
        return replace(scalar, text=text, from_variable=variables)

    def _value(self, reference: re.Match[str]) -> tuple[str, str | None]:
        """A reference's value, or what is wrong with it."""
        body = _BODY.fullmatch(reference["body"] or "")
        if body is None:
            return "", f"can't read {shown(reference[0])}: {_FORMS}"
        name, default = body["name"], body["default"]
        value = self._environ.get(name)
        if default is not None:
            return value or default, None
        if value is None:
            return "", f"the variable {name} isn't set: export it, or give a default: ${{{name}:-...}}"
        return value, None

    def _count(self, characters: int, path: KeyPath) -> None:
        self._characters += characters
        if self._characters > MAX_BYTES:
            message = "variables would add more than 1 MiB of text to the spec"
            raise InputError([self._document.problem(path, message)])
