"""Gradients combined by Adasum in place of their sum: ``horovod.adasum`` of a job spec."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from hvdtrain.parallel.adasum import require_mpi, require_size
from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.compression import Nothing, Reduction, Whole


class Adasum:
    """A reducer (`hvdtrain.parallel.torch.compression.Reducer`) whose dot products are over a whole bucket.

    The paper's are over one parameter's gradients each: give `GradientExchange` ``bucket_mb=0``, and the divisor 1, for
    this is no sum. All ranks get the same bits. They must be all of Horovod's ranks, and a power of two.

    Raises:
        UsageError: the ranks run under Gloo.
    """

    def __init__(self) -> None:
        require_mpi(hvd)

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """As `Reducer.start`.

        Raises:
            UsageError: the bucket is of more than 2 GiB.
            NotImplementedError: the group isn't of all ranks, or their number no power of two.
        """
        if group.size == 1 or bucket.numel() == 0:
            return Nothing()
        # Horovod ends the process where it can't reckon with halves: on a CPU it needs a build for AVX and F16C.
        tensor = bucket if bucket.dtype in (torch.float32, torch.float64) else bucket.float()
        require_size(tensor.numel() * tensor.element_size())
        return Whole(bucket, tensor, group, f"{name}.adasum", op=hvd.Adasum)
