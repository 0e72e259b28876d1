"""Embedding tables that are cut over ranks, each of which has samples of its own: recommenders in PyTorch.

The tables of a recommender are larger than the rest of it by far, and each sample reads a few rows of them. So each
rank keeps a part of the rows and answers the others' questions, while the dense layers are data parallel (Naumov et
al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.collectives import carried
from hvdtrain.parallel.torch.cuts import Cut, bounds, mark

PADDING = -1  # In a bag: no item here.

# Rows that are drawn at once, a multiple of 16, see `_normal_rows`.
_ROWS_AT_ONCE = 2**16


class ParallelEmbedding(nn.Module):  # type: ignore[misc]
    """One embedding table for each field, all of them cut by rows over a group.

    The tables' rows are one long list, which is cut as evenly as can be, however uneven the tables are. In the forward
    pass each rank asks the owners for the rows of its samples, each row once (an alltoall of row numbers), and gets
    their vectors (another one); in the backward pass the vectors' gradients go back (a third one). An owner's gradient
    is the plain sum over the group's ranks of the gradients of their own losses: to train on the mean of these losses
    it is still to be divided by their number.

    All ranks of the group make each forward and each backward pass together; one that has no samples calls the layer
    with ids of shape ``[0, fields]`` and goes backward from the sum of what it makes of the result.

    Args:
        tables: number of rows of each table.
        width: size of a vector.
        group: ranks that share the rows. With one rank alone Horovod isn't called.
        mode: None: each field of a sample has one id. ``sum`` or ``mean``: it has a bag of ids, whose vectors are
            pooled; `PADDING` in a bag is no item, and a bag without any gives zeros.
        sparse: the gradient is a sparse tensor, with the rows that were asked for, as of ``nn.Embedding``. Takes an
            optimizer that can use it, such as `torch.optim.SGD`, `SparseAdam` or `Adagrad`.

    Attributes:
        weight: this rank's rows ``[rows, width]``, in the order of the tables. Drawn as ``nn.Embedding(sum(tables),
            width)`` draws them, whatever the size of the group, and as many random numbers are used up.

    Raises:
        UsageError: a table without rows, or a mode that there isn't.
    """

    def __init__(
        self,
        tables: Sequence[int],
        width: int,
        group: Group,
        *,
        mode: Literal["sum", "mean"] | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        _check_arguments(tables, mode)
        self.tables, self.width, self.group, self.mode, self.sparse = tuple(tables), width, group, mode, sparse
        parts = [bounds(sum(tables), group.size, rank) for rank in range(group.size)]
        self._first, last = parts[group.rank]
        self.weight = mark(nn.Parameter(_normal_rows(sum(tables), width, self._first, last)), Cut("embedding", 0))
        starts = list(accumulate(tables, initial=0))[:-1]
        # Buffers move to the model's device; these follow from the arguments, so that no checkpoint needs them.
        self.register_buffer("_sizes", torch.tensor(self.tables), persistent=False)
        self.register_buffer("_starts", torch.tensor(starts), persistent=False)
        self.register_buffer("_ends", torch.tensor([end for _, end in parts]), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The vectors of each sample's ids.

        Args:
            ids: whole numbers ``[samples, fields]``, or with a `mode` ``[samples, fields, items]``; in column i those
                of table i, from 0. There may be no samples.

        Returns:
            ``[samples, fields, width]``.

        Raises:
            UsageError: ids of another shape or type, or out of their table's range.
        """
        self._check(ids)
        by_field = (-1,) if self.mode is None else (-1, 1)
        if self.mode is None:
            return self._look_up(ids + self._starts.view(by_field))
        is_item = ids != PADDING
        # What stands for no item has to be some row: the table's first, with a weight of 0.
        vectors = self._look_up(ids.clamp(min=0) + self._starts.view(by_field))
        weights = is_item.to(vectors.dtype)
        if self.mode == "mean":
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
        return (vectors * weights.unsqueeze(-1)).sum(-2)

    def extra_repr(self) -> str:
        """What ``print`` shows of the layer."""
        rows = f"{len(self.weight)} of {sum(self.tables)} rows"
        return f"{len(self.tables)} tables, width {self.width}, {rows}, mode={self.mode}"

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """The vectors ``[*rows.shape, width]`` of rows of the long list, whoever has them."""
        if self.group.size == 1:
            return functional.embedding(rows, self.weight, sparse=self.sparse)
        asked, position = torch.unique(rows, return_inverse=True)
        # Sorted, as the owners are: up to each owner's end there are so many.
        splits = torch.diff(torch.searchsorted(asked, self._ends), prepend=self._ends.new_zeros(1))
        splits = splits.to("cpu", torch.int32)
        wanted, wanted_splits = _all_to_all(asked, splits, "rows", self.group)
        vectors = functional.embedding(wanted - self._first, self.weight, sparse=self.sparse)
        answers = _Answer.apply(vectors, wanted_splits, splits, self.group)
        return functional.embedding(position, answers)

    def _check(self, ids: torch.Tensor) -> None:
        names = ["samples", "fields"] if self.mode is None else ["samples", "fields", "items"]
        if ids.ndim != len(names) or ids.shape[1] != len(self.tables) or ids.dtype not in (torch.int64, torch.int32):
            raise UsageError(
                f"ids are {ids.dtype} of shape {list(ids.shape)}, for {len(self.tables)} tables and mode={self.mode}",
                fix=f"give int64 of shape [{', '.join(names)}], a field for each table",
            )
        lowest = 0 if self.mode is None else PADDING
        sizes = self._sizes.view(-1, *[1] * (len(names) - 2))
        wrong = (ids < lowest) | (ids >= sizes)
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            table, number = place[1], int(ids[tuple(place)])
            raise UsageError(
                f"sample {place[0]} has id {number} for table {table}, which has {self.tables[table]} rows",
                fix=f"give ids from {lowest} to {self.tables[table] - 1}, or the table more rows",
            )


class _Answer(torch.autograd.Function):  # type: ignore[misc]
    """Vectors to those who asked for them; backward, their gradients to those who gave the vectors."""

    @staticmethod
    def forward(
        ctx: Any, vectors: torch.Tensor, splits: torch.Tensor, answer_splits: torch.Tensor, group: Group
    ) -> torch.Tensor:
        ctx.group, ctx.answer_splits = group, answer_splits
        return _all_to_all(vectors, splits, "vectors", group)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradients[0].contiguous(), ctx.answer_splits, "gradients", ctx.group)[0], None, None, None


def _all_to_all(
    tensor: torch.Tensor, splits: torch.Tensor, kind: str, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the group's ranks have for this one, in their order, and how much is from each; ``splits``: for each."""
    received, counts = hvd.alltoall(carried(tensor), splits, f"hvdtrain.{group.name}.{kind}", group.process_set)
    return received.view(tensor.dtype), counts


def _normal_rows(total: int, width: int, first: int, last: int) -> torch.Tensor:
    """Some rows of ``torch.randn(total, width)``, without having all of them at a time.

    PyTorch draws in blocks of 16, and the last block of a tensor that isn't a multiple of 16 is special. So whole
    blocks may be drawn one after the other, but for the last ones.
    """
    rows = torch.empty(last - first, width)
    ends = [*range(_ROWS_AT_ONCE, total - _ROWS_AT_ONCE, _ROWS_AT_ONCE), total]
    for start, end in zip([0, *ends], ends, strict=False):
        drawn = torch.randn(end - start, width)
        mine = slice(max(first, start), max(first, start, min(last, end)))
        rows[mine.start - first : mine.stop - first] = drawn[mine.start - start : mine.stop - start]
    return rows


def _check_arguments(tables: Sequence[int], mode: str | None) -> None:
    if not tables or min(tables) < 1:
        raise UsageError(f"tables of {list(tables)} rows", fix="give each table one row at least")
    if mode not in (None, "sum", "mean"):
        raise UsageError(f"an embedding's mode is {mode!r}", fix="give None, 'sum' or 'mean'")
