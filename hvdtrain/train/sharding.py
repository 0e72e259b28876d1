"""Which samples each rank takes at each step: all of them once per epoch, whatever their number.

A global step takes ``batch_size`` samples per rank from one order that all ranks share, rank after rank. So two ranks
with batch B see, step for step, the samples of one process with batch 2B. The last step's remainder is spread as
evenly as it goes; ranks may then have fewer samples than others, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shard:
    """One rank's part of one global step.

    Attributes:
        indices: numbers of this rank's samples.
        global_count: samples of all ranks in this step.
    """

    indices: list[int]
    global_count: int

    def weight(self, size: int) -> float:
        """What this rank's mean loss counts in the average over ranks, so that it is the mean over all samples.

        The average is a sum of ``size`` terms over ``size``, and a mean over ``n`` of ``N`` samples has to count
        ``n / N``: the weight is ``size * n / N``, 1 for a full step.
        """
        return size * len(self.indices) / self.global_count


def steps_per_epoch(samples: int, batch_size: int, size: int) -> int:
    """Global steps that it takes to see every sample once."""
    return -(-samples // (batch_size * size))


def epoch_shards(samples: int, batch_size: int, rank: int, size: int, seed: int, epoch: int) -> list[Shard]:
    """This rank's shards of an epoch, shuffled by ``(seed, epoch)``, the same on all ranks."""
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    global_batch = batch_size * size
    return [_part(order[start : start + global_batch], rank, size) for start in range(0, samples, global_batch)]


def evaluation_batches(samples: int, batch_size: int, rank: int, size: int) -> list[list[int]]:
    """This rank's batches of the evaluation data: a contiguous part of it, in its own order."""
    own = _part(np.arange(samples), rank, size).indices
    return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]


def _part(order: np.ndarray, rank: int, size: int) -> Shard:
    each, rest = divmod(len(order), size)
    start = rank * each + min(rank, rest)
    return Shard(order[start : start + each + (rank < rest)].tolist(), len(order))
