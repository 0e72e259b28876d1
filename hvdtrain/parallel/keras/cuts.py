"""Parts of variables that ranks share, as arrays: cutting them from a whole one, and putting them together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.parallel.cut import Cut, bounds


def part_of(whole: NDArray[Any], cut: Cut, parts: int, part: int) -> NDArray[Any]:
    """A copy of one rank's part of a variable, or of what an optimizer keeps for it."""
    pieces = []
    for block in np.split(whole, cut.blocks, cut.dim):
        first, end = bounds(block.shape[cut.dim], parts, part)
        pieces.append(block.take(range(first, end), cut.dim))
    return np.concatenate(pieces, cut.dim)


def whole_of(parts: Sequence[NDArray[Any]], cut: Cut) -> NDArray[Any]:
    """All ranks' parts, in the order of their coordinate on the axis, put together."""
    by_block = [np.split(part, cut.blocks, cut.dim) for part in parts]
    return np.concatenate([pieces[block] for block in range(cut.blocks) for pieces in by_block], cut.dim)
