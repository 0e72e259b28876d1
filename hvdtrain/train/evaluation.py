"""What the loop asks of the task's data: that all ranks have the same, and the evaluation."""

from __future__ import annotations

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.train.backend import Backend
from hvdtrain.train.sharding import shares


def check_data(backend: Backend, task: str) -> None:
    """No rank may think that it has other data: the ranks would take different numbers of steps and hang (all ranks).

    Raises:
        UsageError: a rank has another number of samples than rank 0, or there are none.
    """
    mine = (backend.train_samples, backend.eval_samples)
    rank_0 = backend.broadcast_object(mine)
    if mine != rank_0:
        raise UsageError(
            f"rank {backend.rank} has {mine[0]} training and {mine[1]} evaluation samples, rank 0 has {rank_0[0]} "
            f"and {rank_0[1]}",
            where=task,
            fix="let train_data() and eval_data() give every rank the same samples; the loop shares them out",
        )
    if not backend.train_samples:
        raise UsageError("train_data() has no samples", where=task)


def evaluate(backend: Backend, task: str, global_batch: int) -> dict[str, float]:
    """The mean of each metric over all evaluation samples, whichever rank they are on (all ranks).

    Returns:
        The means as ``eval_<name>``.

    Raises:
        UsageError: the ranks have different metrics.
    """
    order = np.arange(backend.eval_samples)
    sums = backend.evaluate(share.indices for share in shares(order, global_batch, backend.rank, backend.size))
    # A rank without samples knows no names; rank 0 has as many samples as any.
    names = backend.broadcast_object(sorted(sums))
    if sums and sorted(sums) != names:
        raise UsageError(
            f"the task's metrics are {', '.join(sorted(sums))} on rank {backend.rank} and {', '.join(names)} on rank 0",
            where=task,
            fix="let metrics() return the same names for every batch",
        )
    totals = backend.sum_over_ranks([sums.get(name, 0.0) for name in names])
    return {f"eval_{name}": total / backend.eval_samples for name, total in zip(names, totals, strict=True)}
