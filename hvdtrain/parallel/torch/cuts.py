"""How a parameter that ranks share is cut, so that its parts can be put together again on any other grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.parallel.cut import Cut, bounds, cut_of, mark

__all__ = ["Cut", "bounds", "cut_of", "mark", "part_of", "whole_of"]


def part_of(whole: torch.Tensor, cut: Cut, parts: int, part: int) -> torch.Tensor:
    """A copy of one rank's part of a parameter (or of its gradient, or of what an optimizer keeps for it)."""
    pieces = []
    for block in whole.chunk(cut.blocks, cut.dim):
        first, last = bounds(block.shape[cut.dim], parts, part)
        pieces.append(block.narrow(cut.dim, first, last - first))
    return torch.cat(pieces, cut.dim)


def whole_of(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """All ranks' parts, in the order of their coordinate on the axis, put together."""
    by_block = [part.tensor_split(_block_ends(part.shape[cut.dim], cut.blocks), cut.dim) for part in parts]
    return torch.cat([pieces[block] for block in range(cut.blocks) for pieces in by_block], cut.dim)


def _block_ends(size: int, blocks: int) -> list[int]:
    return [size // blocks * block for block in range(1, blocks)]
