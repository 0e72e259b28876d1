"""Types of the spec's keys: they read what the loader found there, and say what they expect instead.

Each takes a `Scalar` of the loader or, from Python code, an ordinary value. Messages never quote a value: the
loader adds what was found, in the user's own words.
"""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from hvdtrain.spec.scalars import Kind, Scalar, core_kind, text_fault

# Set by horovodrun, mpirun or this launcher for each worker, or decided by the key `controller`.
RESERVED_VARIABLES = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_ELASTIC",
    "HOROVOD_GLOO_RENDEZVOUS_*", "HOROVOD_SECRET_KEY", "HVDTRAIN_*", "OMPI_COMM_WORLD_*", "PMIX_*",
)  # fmt: skip

# Bash exports its functions under names such as `BASH_FUNC_module%%`.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|BASH_FUNC_[^\s=*?\[\]]+%%")
_VARIABLE_PATTERN = re.compile(r"[A-Za-z0-9_%*?\[\]!-]+")
_IDENTIFIER = r"[^\W\d]\w*"
_TASK = rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}"
_WORD = re.compile(r"(--?)?[A-Za-z/.]*[A-Za-z][\w./=-]*")  # needs no quotes in a YAML list
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NAME_BYTES = 200  # most file systems allow 255


class UnfitError(ValueError):
    """A value that isn't what its key takes.

    Args:
        expected: what the key takes, to be read after "expected".
        fix: what to do, where more can be said.
    """

    def __init__(self, expected: str, fix: str | None = None) -> None:
        super().__init__(f"expected {expected}")
        self.expected = expected
        self.fix = fix


def _text(value: Any) -> Any:
    if not isinstance(value, Scalar):
        return value
    return None if value.kind is Kind.NULL and not value.from_variable else value.text


def _path(value: Any) -> Any:
    if isinstance(value, Scalar) and value.text == "~":  # YAML's null, but a user's home where a path is expected
        return value.text
    text = _text(value)
    if text == "":
        raise UnfitError("a path")
    return text


def _whole_number(value: Any) -> Any:
    number = _number(value, "a whole number")
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _number(value: Any, expected: str = "a number") -> Any:
    if not isinstance(value, Scalar):
        return value
    if value.typed_kind in (Kind.INTEGER, Kind.NUMBER):
        return value.number()
    if value.typed_kind is Kind.NULL:
        return None
    if value.from_variable:
        raise UnfitError(expected)
    digits = value.text.replace("_", "")
    if core_kind(digits) not in (Kind.INTEGER, Kind.NUMBER):
        raise UnfitError(expected)
    raise UnfitError(expected, "take the quotes off" if digits == value.text else f"write {digits}")


def _boolean(value: Any) -> Any:
    if not isinstance(value, Scalar):
        return value
    if value.typed_kind is Kind.BOOLEAN:
        return value.text.lower() == "true"
    meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
    word = value.text.lower()
    fix = f"write {meant.get(word, word)}" if word in meant or word in ("true", "false") else None
    raise UnfitError("true or false", None if value.from_variable else fix)


def _optional_boolean(value: Any) -> Any:
    return None if isinstance(value, Scalar) and value.typed_kind is Kind.NULL else _boolean(value)


def _any(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _any(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_any(item) for item in value]
    return value.value() if isinstance(value, Scalar) else value


def _nothing(value: Any) -> Any:
    return None if isinstance(value, Scalar) and value.kind is Kind.NULL else value


def _empty_section(value: Any) -> Any:
    return {} if _nothing(value) is None else value


def _command(value: Any) -> Any:
    if isinstance(value, Scalar) and value.kind is Kind.TEXT and not value.from_variable:
        raise UnfitError("a list of program and arguments", _as_list(value.text))
    return _nothing(value)


def _as_list(line: str) -> str | None:
    """How a shell line would be written as a list, if that needs no escapes."""
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    if not words or any(set(word) & set('"\\$') or not word.isprintable() for word in words):
        return None
    listed = [word if _WORD.fullmatch(word) and core_kind(word) is Kind.TEXT else f'"{word}"' for word in words]
    return f"write [{', '.join(listed)}]"


def _check_command(command: tuple[str, ...]) -> tuple[str, ...]:
    if not command:
        raise UnfitError("a program and its arguments")
    if not command[0]:
        raise ValueError("the program, its first item, is empty")
    return command


def _check_interpreter(path: str) -> str:
    if not path.startswith("/"):
        raise UnfitError("the absolute path of a Python, the same on all hosts")
    return path


def _check_task(task: str) -> str:
    if not re.fullmatch(_TASK, task):
        raise UnfitError("module:Class, such as my_package.my_module:MyTask")
    return task


def check_name(name: str) -> str:
    """Check that a job's name can be a folder's.

    Raises:
        UnfitError: it can't.
    """
    if not name or text_fault(name):
        raise UnfitError("a name")
    if name in (".", "..") or "/" in name or _CONTROL.search(name):
        raise UnfitError("a name that can be a folder's: no '/', no control characters, not '.' or '..'")
    if name.startswith("-") or name != name.strip():
        raise UnfitError("a name that doesn't begin with '-' and has no space at its ends")
    if len(name.encode()) > _NAME_BYTES:
        raise UnfitError(f"a name of at most {_NAME_BYTES} bytes")
    return name


def _check_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise UnfitError("the name of a variable (letters, digits and '_')")
    if is_reserved(name):
        raise ValueError("Horovod or hvdtrain sets this variable for each worker; take it out")
    return name


def _check_pattern(name: str) -> str:
    if set(name) & set("*?["):
        if not _VARIABLE_PATTERN.fullmatch(name):
            raise UnfitError("the name of a variable, or a pattern such as HF_*")
        return name
    return _check_variable(name)


def is_reserved(variable: str) -> bool:
    """Whether a variable belongs to Horovod or the launcher."""
    return any(fnmatchcase(variable, pattern) for pattern in RESERVED_VARIABLES)


# Before-validators stand outside of `| None`, so that they see the loader's own nothing first.
Text = Annotated[str, BeforeValidator(_text)]
OptionalText = Annotated[str | None, BeforeValidator(_text)]
AnyValue = Annotated[Any, BeforeValidator(_any)]
Boolean = Annotated[bool, BeforeValidator(_boolean)]
OptionalPath = Annotated[Path | None, BeforeValidator(_path)]
JobName = Annotated[str, BeforeValidator(_text), AfterValidator(check_name)]
VariableName = Annotated[str, BeforeValidator(_text), AfterValidator(_check_variable)]
VariablePattern = Annotated[str, BeforeValidator(_text), AfterValidator(_check_pattern)]
TaskName = Annotated[
    Annotated[str, AfterValidator(_check_task), Field(json_schema_extra={"pattern": rf"^{_TASK}$|\$\{{"})] | None,
    BeforeValidator(_text),
]
Command = Annotated[Annotated[tuple[Text, ...], AfterValidator(_check_command)] | None, BeforeValidator(_command)]
Interpreter = Annotated[
    Annotated[str, AfterValidator(_check_interpreter), Field(json_schema_extra={"pattern": r"^/|\$\{"})] | None,
    BeforeValidator(_text),
]


def whole_number_or(word: str, *, null: bool = False) -> BeforeValidator:
    """Reads a whole number of at least 1, or one word, or null.

    Everything is checked here: pydantic tells a fault of a union once for each of its types.
    """
    expected = f"a whole number, {word} or null" if null else f"a whole number or {word}"

    def read(value: Any) -> Any:
        if getattr(value, "text", value) == word:
            return word
        try:
            number = _whole_number(value)
        except UnfitError as error:
            raise UnfitError(expected, error.fix) from error
        if number is None and null:
            return None
        if not isinstance(number, int):
            raise UnfitError(expected)
        if number < 1:
            raise UnfitError("at least 1")
        return number

    return BeforeValidator(read)


# To be combined with the key's own limits.
WHOLE_NUMBER = BeforeValidator(_whole_number)
NUMBER = BeforeValidator(_number)
OPTIONAL_BOOLEAN = BeforeValidator(_optional_boolean)
CHOICE = BeforeValidator(_text)
SECTION = BeforeValidator(_empty_section)
