"""What a profile expects of a number, as people write it: ``at least 512 GB``, ``8 to 64``, ``535.86 to 580``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from hvdtrain.spec.fields import UnfitError
from hvdtrain.spec.scalars import Kind, Scalar

_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
# Modules of memory have powers of 1024 and are sold by the names of powers of 1000.
_MEMORY = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40} | _BINARY
_RATE = {name: size for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)) for name in (f"{unit}bit/s", f"{unit}b/s")}
_SPEED = {f"{unit}/s": size for unit, size in (_DECIMAL | _BINARY).items()}
_TIME = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}

_NUMBER = r"\d+(?:\.\d+)?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*(\S*)")
_VERSION = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True)
class Range:
    """A range of numbers, its ends included.

    Attributes:
        text: as it was written.
        low: the least; None: none.
        high: the most; None: none.
    """

    text: str
    low: float | None = None
    high: float | None = None

    def holds(self, number: float, spared: float = 0.0) -> bool:
        """Whether a number is in it; ``spared`` is the part of the least that may be missing."""
        return (self.low is None or number >= self.low * (1 - spared)) and (self.high is None or number <= self.high)


@dataclass(frozen=True)
class Versions:
    """A range of versions; of a found one, only as many numbers count as are written: 3.9 to 3.12 has 3.12.4 in it.

    Attributes:
        text: as it was written.
        low: the oldest; None: any.
        high: the newest; None: any.
    """

    text: str
    low: tuple[int, ...] | None = None
    high: tuple[int, ...] | None = None

    def holds(self, version: str) -> bool:
        """Whether a version is in it."""
        found = numbers(version)
        if found is None:
            return False
        above = self.low is None or found[: len(self.low)] >= self.low
        return above and (self.high is None or found[: len(self.high)] <= self.high)


def numbers(version: str) -> tuple[int, ...] | None:
    """The numbers of a version, wherever they begin: ``Open MPI 4.1.4`` has 4, 1 and 4; None where there are none."""
    found = _VERSION.search(version)
    return tuple(map(int, found.group().split("."))) if found else None


def _range(value: Any, units: dict[str, float], examples: str, *, exact: bool) -> Any:
    text = _written(value)
    if text is None or isinstance(text, Range):
        return text
    words = text.split()
    unfit = UnfitError(examples)
    if words[:2] in (["at", "least"], ["at", "most"]):
        number = _quantity(" ".join(words[2:]), units, unfit)
        return Range(text, number, None) if words[1] == "least" else Range(text, None, number)
    if "to" in words:
        low, high = " ".join(words[: words.index("to")]), " ".join(words[words.index("to") + 1 :])
        last = _quantity(high, units, unfit)
        # 4 to 16 TB: the unit is said once.
        first = _quantity(
            f"{low} {high.split()[-1]}" if units and low.replace(".", "").isdigit() else low, units, unfit
        )
        if first > last:
            raise UnfitError(examples, f"'{low}' is more than '{high}'")
        return Range(text, first, last)
    number = _quantity(text, units, unfit)
    if not exact:
        raise UnfitError(examples, f"write 'at least {text}'")
    return Range(text, number, number)


def _quantity(text: str, units: dict[str, float], unfit: UnfitError) -> float:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise unfit
    number, unit = float(found[1]), found[2]
    if not units and not unit:
        return number
    if unit not in units:
        known = ", ".join(units) if units else ""
        raise UnfitError(unfit.expected, f"the units are {known}" if known else "take the unit out")
    return number * units[unit]


def _versions(value: Any) -> Any:
    text = _written(value)
    if text is None or isinstance(text, Versions):
        return text
    unfit = UnfitError("a version: 'any', '2.13', 'at least 535.86', 'at most 4' or '3.9 to 3.12'")
    words = text.split()
    if words == ["any"]:
        return Versions(text)
    ends = {("at", "least"): (2, None), ("at", "most"): (None, 2)}.get(tuple(words[:2]), (0, 0))
    if len(words) == 3 and words[1] == "to":
        ends = (0, 2)
    elif len(words) != max(end or 0 for end in ends) + 1:
        raise unfit
    if not all(_VERSION.fullmatch(words[end]) for end in ends if end is not None):
        raise unfit
    low, high = (None if end is None else numbers(words[end]) for end in ends)
    return Versions(text, low, high)


def _written(value: Any) -> Any:
    """The text of a value; None for nothing."""
    if isinstance(value, Scalar):
        return None if value.kind is Kind.NULL else " ".join(value.text.split())
    if value is None or isinstance(value, Range | Versions):
        return value
    raise UnfitError("one value")


def _kind(units: dict[str, float], examples: str, *, exact: bool = False) -> BeforeValidator:
    return BeforeValidator(lambda value: _range(value, units, examples, exact=exact))


Count = Annotated[Range | None, _kind({}, "a number: '8', 'at least 4', 'at most 16' or '4 to 8'", exact=True)]
Memory = Annotated[Range | None, _kind(_MEMORY, "a size: 'at least 512 GB', 'at most 2 TB' or '512 GB to 2 TB'")]
Space = Annotated[Range | None, _kind(_DECIMAL | _BINARY, "a size: 'at least 4 TB', 'at most 16 TB' or '4 to 16 TB'")]
Rate = Annotated[
    Range | None, _kind(_RATE, "a rate: '200 Gbit/s', 'at least 100 Gbit/s' or '100 to 400 Gbit/s'", exact=True)
]
Speed = Annotated[Range | None, _kind(_SPEED, "a speed: 'at least 2 GB/s', 'at most 9 GB/s' or '2 to 9 GB/s'")]
Time = Annotated[Range | None, _kind(_TIME, "a time: 'at most 50 us', 'at most 100 ms' or '1 to 5 s'")]
Version = Annotated[Versions | None, BeforeValidator(_versions)]
