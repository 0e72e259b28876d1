"""How a parameter that ranks share is cut over an axis of the grid, whatever the framework. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

_MARK = "hvdtrain_cut"

Parameter = TypeVar("Parameter")


@dataclass(frozen=True)
class Cut:
    """One parameter's cut over one axis of the grid.

    Attributes:
        axis: of the grid (``tensor`` or ``embedding``).
        dim: of the parameter.
        blocks: parts of that dimension that are cut each by itself, as query, key and value of a fused projection.
    """

    axis: str
    dim: int
    blocks: int = 1


def bounds(total: int, parts: int, part: int) -> tuple[int, int]:
    """Where a part begins and ends, when ``total`` is cut as evenly as can be: the first parts may get one more."""
    each, left = divmod(total, parts)
    first = part * each + min(part, left)
    return first, first + each + (part < left)


def mark(parameter: Parameter, cut: Cut) -> Parameter:
    """Note on a parameter that it is one rank's part. Checkpoints, gradient norms and exchanges ask for it."""
    setattr(parameter, _MARK, cut)
    return parameter


def cut_of(parameter: Any) -> Cut | None:
    """The cut of a parameter; None: each rank has the whole of it."""
    found: Cut | None = getattr(parameter, _MARK, None)
    return found
