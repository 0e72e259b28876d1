"""Which samples a rank takes at each step: every sample of the epoch exactly once, on exactly one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """One rank's part of one step.

    Attributes:
        indices: the samples, shape ``[samples]``; empty where the step has fewer samples than ranks.
        total: samples of all ranks in this step.
        weight: what the rank's mean loss is multiplied by, so that averaging gradients over the ranks gives the mean
            over the step's samples: ``len(indices) * size / total``. 1 where the ranks have equally many.
    """

    indices: Indices
    total: int
    weight: float

    @property
    def weight_of_busy(self) -> float:
        """The weight where ranks without samples don't count, as in Adasum: averaged over the others it is 1."""
        # Where some have none, all others have one sample, and all the same weight.
        return min(self.weight, float(len(self.indices)))


def epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """The order in which an epoch (from 0) visits the samples: the same on every rank, whatever their number.

    numpy keeps ``RandomState``'s streams as they are for ever (NEP 19), so hosts with different versions agree.
    """
    return np.random.RandomState([seed, epoch]).permutation(samples).astype(np.int64, copy=False)


def steps_per_epoch(samples: int, global_batch: int) -> int:
    """Steps of ``global_batch`` samples that all samples need; the last may be smaller."""
    return -(-samples // global_batch)


def shares(order: Indices, global_batch: int, rank: int, size: int) -> Iterator[Share]:
    """This rank's share of each step, as views into ``order``.

    A step takes the next ``global_batch`` samples, each rank a contiguous part, in the order of the ranks, spread
    evenly: the lower ranks may get one more.
    """
    for start in range(0, len(order), global_batch):
        step = order[start : start + global_batch]
        each, left = divmod(len(step), size)
        first = rank * each + min(rank, left)
        mine = step[first : first + each + (rank < left)]
        yield Share(mine, len(step), len(mine) * size / len(step))
