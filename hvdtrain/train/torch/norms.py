"""The norm of a gradient that ranks share, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable

import horovod.torch as hvd
import torch

from hvdtrain.parallel.groups import Groups
from hvdtrain.parallel.torch.cuts import cut_of

# As torch.nn.utils.clip_grad_norm_ has it, so that one process and many do the same.
_EPSILON = 1e-6


def clip(
    groups: Groups,
    limit: float,
    *,
    sharded: bool,
    squared_norm: Callable[[Callable[[torch.nn.Parameter], bool]], torch.Tensor],
    scale: Callable[[torch.Tensor], None],
) -> None:
    """Scale all gradients down to a 2-norm, over the whole model whichever ranks have its parts (all ranks).

    Args:
        groups: this rank's place.
        limit: the largest norm.
        sharded: whether each replica has another part of the gradients.
        squared_norm: sum of the squares, in float64, of this rank's gradients whose parameters are to be counted.
        scale: multiplies this rank's gradients.
    """

    def counts(parameter: torch.nn.Parameter) -> bool:
        """Each element once: on the first of the ranks that have the same."""
        cut = cut_of(parameter)
        axes = ("tensor",) if sharded else ("tensor", "embedding", "data")
        return all(groups.coordinates[axis] == 0 for axis in axes if cut is None or cut.axis != axis)

    if groups.grid.is_data_parallel and not sharded:
        total = squared_norm(lambda _: True)
    else:
        total = hvd.allreduce(squared_norm(counts), op=hvd.Sum, name="hvdtrain.squared norm")
    factor = limit / (total.sqrt() + _EPSILON)
    if factor < 1:
        scale(factor)
