"""The evaluation, over all ranks' samples."""

from __future__ import annotations

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.train.backend import Backend
from hvdtrain.train.sharding import shares


def evaluate(backend: Backend, task: str, global_batch: int) -> dict[str, float]:
    """The mean of each metric over all evaluation samples, whichever rank they are on (all ranks).

    Returns:
        The means as ``eval_<name>``.

    Raises:
        UsageError: the ranks have different metrics.
    """
    order = np.arange(backend.eval_samples)
    mine = shares(order, global_batch, backend.replica, backend.replicas)
    sums = backend.evaluate(share.indices for share in mine)
    # A rank without samples, or that isn't at the end of a pipeline, knows no names.
    known = [(rank, names) for rank, names in enumerate(backend.gather(sorted(sums))) if names]
    first, names = known[0] if known else (0, [])
    for rank, others in known:
        if others != names:
            raise UsageError(
                f"the task's metrics are {', '.join(others)} on rank {rank} and {', '.join(names)} on rank {first}",
                where=task,
                fix="let metrics() return the same names for every batch",
            )
    totals = backend.sum_over_ranks([sums.get(name, 0.0) for name in names])
    return {f"eval_{name}": total / backend.eval_samples for name, total in zip(names, totals, strict=True)}
