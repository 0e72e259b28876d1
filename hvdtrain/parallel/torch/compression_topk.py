"""Only the largest gradients travel; what is left waits for the next step."""

from __future__ import annotations

import math
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.compression import Plain, Reduction

# Of a bucket's elements, one in so many is looked at to guess how large the k-th largest is, and the guess is made for
# more of them than are wanted, so that it's seldom too high.
_SAMPLED, _MARGIN = 61, 1.3
_SMALL = 1 << 16  # elements; below it a whole selection takes less than a millisecond


class TopK:
    """``topk``: of gradient plus residual the k entries of largest magnitude are sent and summed; the rest stays here.

    Error feedback as in Stich et al., 2018, "Sparsified SGD with memory", algorithm 1: the residual of a bucket holds
    what wasn't sent, and is added to its next gradient, so that nothing is lost, only late. Lin et al., 2018, "Deep
    gradient compression", has more that isn't here (momentum correction, clipping before the sum, a warm-up of the
    ratio). Training takes another course than without, so that it's never chosen by ``auto``.

    An entry is 8 bytes (index and value), and each rank receives all others' entries. A bucket for which that's no
    fewer bytes than the plain sum (k times the ranks is its size or more) is summed whole.

    Args:
        ratio: the part of a bucket's elements that is sent.

    Raises:
        UsageError: the ratio isn't above 0 and at most 1.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise UsageError(f"top-k's ratio is {ratio:g}", fix="give the part to be sent, above 0 and at most 1")
        self._ratio = ratio
        self._plain = Plain()
        self._residuals: dict[str, tuple[int, torch.Tensor]] = {}

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """As `Reducer.start`."""
        k = max(1, math.ceil(self._ratio * bucket.numel()))
        if group.size == 1 or bucket.dtype != torch.float32 or k * group.size >= bucket.numel():
            return self._plain.start(bucket, group, name)
        residual = self._residual(bucket, group, name)
        residual += bucket
        chosen = largest(residual, k)
        entries = torch.stack([chosen.int(), residual[chosen].view(torch.int32)])
        residual[chosen] = 0
        return _Entries(bucket, entries, group, f"{name}.topk")

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by bucket; each rank has its own, to be saved and loaded by the same rank."""
        return {name: {"ranks": ranks, "residual": residual} for name, (ranks, residual) in self._residuals.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take residuals back. One of another number of ranks, or of another size, is dropped at its bucket's start."""
        self._residuals = {name: (kept["ranks"], kept["residual"].clone()) for name, kept in state.items()}

    def _residual(self, bucket: torch.Tensor, group: Group, name: str) -> torch.Tensor:
        ranks, residual = self._residuals.get(name, (0, bucket))
        if ranks != group.size or residual.shape != bucket.shape:
            residual = torch.zeros_like(bucket)
        residual = residual.to(bucket.device)
        self._residuals[name] = group.size, residual
        return residual


class _Entries:
    """The allgather of all ranks' entries: (2, k) of int32, the indices and the values' bits."""

    def __init__(self, bucket: torch.Tensor, entries: torch.Tensor, group: Group, name: str) -> None:
        self._bucket = bucket
        self._handle = hvd.allgather_async(entries, name=name, process_set=group.process_set)

    def proceed(self) -> None:
        """As `Reduction.proceed`."""

    def finish(self) -> None:
        """As `Reduction.finish`."""
        gathered = hvd.synchronize(self._handle)
        self._bucket.zero_()
        # Rank after rank: within one no index comes twice, so that sums have one order, and the same bits, everywhere.
        for entries in gathered.view(-1, 2, gathered.shape[1]):
            self._bucket.index_add_(0, entries[0], entries[1].view(torch.float32))


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k entries of largest magnitude, shape (k,), int64; NaN counts as the largest.

    A selection from millions of elements is slow on a CPU (150 ms from 8 million), so that those which can't be among
    them are left out first, below a threshold that a sample suggests. The result is the same as without.
    """
    magnitudes = values.abs()
    if values.numel() > _SMALL:
        sample = magnitudes[::_SAMPLED]
        wanted = min(sample.numel(), math.ceil(_MARGIN * k / _SAMPLED))
        threshold = sample.topk(wanted, sorted=False).values.min()
        candidates = (magnitudes >= threshold).nonzero().squeeze(1)
        if k <= candidates.numel() < values.numel():
            return candidates[magnitudes[candidates].topk(k, sorted=False).indices]
    return magnitudes.topk(k, sorted=False).indices
