"""Gradients in fewer bytes on the wire: what ``horovod.compression`` of a job spec names.

Each kind is a `Reducer`. All ranks of a group get the same bits, and only float32 is made smaller: integers and float64
travel as they are. bfloat16, which Horovod refuses, works with every kind.

Half-width sums on a CPU are 2.6 times as slow as float32 ones, and Horovod knows no bfloat16. So 16-bit gradients don't
go by its allreduce there: an alltoall gives each rank all others' words of its own slice, which it sums in float32, and
an allgather brings the slices' sums, rounded once, back to all. These two move the bytes that a ring-allreduce of the
same words does (2 (n-1)/n of them on each link), and each bucket's two are `Reduction`'s two phases, so that one
bucket's sums are computed while another's words are on the wire. Two ranks tell each other all of their words, which
are as many bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import horovod.torch as hvd
import torch

# The public function always makes a new tensor; this fills one that is there.
from horovod.torch.mpi_ops import _allgather_async

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.collectives import carried
from hvdtrain.parallel.torch.memory import Memory

# Numbers whose float32 stay in a core's cache.
_AT_ONCE = 1 << 18


class Reduction(Protocol):
    """One bucket's sum under way. Every rank of the group makes the same calls in the same order."""

    def proceed(self) -> None:
        """Wait for the phase that runs, and begin the next one if there is one."""

    def finish(self) -> None:
        """Wait for all phases; the bucket then holds the sum over the group."""


class Reducer(Protocol):
    """A way to sum buckets over a group."""

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """Begin to sum a contiguous tensor of one dimension in place; the same name for the same bucket each step."""


def make_reducer(kind: str) -> Reducer:
    """The reducer of this name: none, fp16, bf16, topk or auto.

    Raises:
        UsageError: there is no such kind.
    """
    from hvdtrain.parallel.torch.compression_auto import Auto
    from hvdtrain.parallel.torch.compression_topk import TopK

    kinds: dict[str, Callable[[], Reducer]] = {
        "none": Plain,
        "fp16": Half,
        "bf16": BFloat16,
        "topk": TopK,
        "auto": Auto,
    }
    if kind not in kinds:
        raise UsageError(f"there is no compression {kind!r}", fix=f"choose one of {', '.join(kinds)}")
    return kinds[kind]()


class Plain:
    """``none``: Horovod's allreduce. bfloat16 (and on a CPU float16) is summed in float32, and rounded once."""

    def __init__(self) -> None:
        self._memory = defaultdict[str, Memory](Memory)

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """As `Reducer.start`."""
        if group.size == 1 or bucket.numel() == 0:
            return Nothing()
        if bucket.dtype == torch.bfloat16 or (bucket.dtype == torch.float16 and not bucket.is_cuda):
            return self._words(bucket, group, name, bucket.dtype)
        return Whole(bucket, bucket, group, name)

    def _words(self, bucket: torch.Tensor, group: Group, name: str, dtype: torch.dtype) -> Reduction:
        kind = WordsOfTwo if group.size == 2 else WordsOfMany
        return kind(bucket, group, name, dtype, self._memory[name])


class Half(Plain):
    """``fp16``: float32 gradients as float16, 10 bits of fraction.

    A gradient or a sum beyond 65504 becomes infinite, and one below 6e-8 zero: scale the loss, or take bf16.
    """

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """As `Reducer.start`."""
        if group.size == 1 or bucket.dtype != torch.float32:
            return super().start(bucket, group, name)
        if bucket.is_cuda:  # a GPU sums halves as fast as anything else
            return Whole(bucket, bucket.half(), group, f"{name}.fp16")
        return self._words(bucket, group, f"{name}.fp16", torch.float16)


class BFloat16(Plain):
    """``bf16``: float32 gradients as bfloat16, 7 bits of fraction and float32's range."""

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """As `Reducer.start`."""
        if group.size == 1 or bucket.dtype != torch.float32 or bucket.numel() == 0:
            return super().start(bucket, group, name)
        return self._words(bucket, group, f"{name}.bf16", torch.bfloat16)


class Nothing:
    """The reduction of a group of one, or of no elements: there is nothing to wait for."""

    def proceed(self) -> None:
        """As `Reduction.proceed`."""

    def finish(self) -> None:
        """As `Reduction.finish`."""


class Whole:
    """Horovod's allreduce of a tensor with the bucket's values: the bucket itself, or a copy of another type."""

    def __init__(self, bucket: torch.Tensor, tensor: torch.Tensor, group: Group, name: str, op: Any = hvd.Sum) -> None:
        self._bucket, self._tensor = bucket, tensor
        self._handle = hvd.allreduce_async_(tensor, op=op, name=name, process_set=group.process_set)

    def proceed(self) -> None:
        """As `Reduction.proceed`."""

    def finish(self) -> None:
        """As `Reduction.finish`."""
        hvd.synchronize(self._handle)
        if self._tensor is not self._bucket:
            self._bucket.copy_(self._tensor)


def add(total: torch.Tensor, words: torch.Tensor, memory: Memory) -> None:
    """Add 16-bit words to float32 numbers, both of shape (n,).

    On a CPU 3 to 4 times as fast as ``total += words``, which converts each number by itself.
    """
    for numbers, piece in zip(total.split(_AT_ONCE), words.split(_AT_ONCE), strict=True):
        numbers += memory.get("numbers", piece.numel(), torch.float32, total.device).copy_(piece)


class WordsOfTwo:
    """The sum of two ranks' 16-bit words: each gets all of the other's, and rounds no sum.

    Args:
        bucket: shape (n,), any floating type.
        group: two ranks.
        name: of the collective, which adds its own end to it.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        memory: of this bucket.
    """

    def __init__(self, bucket: torch.Tensor, group: Group, name: str, dtype: torch.dtype, memory: Memory) -> None:
        self._bucket, self._memory = bucket, memory
        size, device = bucket.numel(), bucket.device
        own = memory.get("own", size, dtype, device).copy_(bucket)
        self._both = memory.get("both", 2 * size, dtype, device)
        self._handle = _allgather_async(carried(own), carried(self._both), f"{name}.both", group.process_set)

    def proceed(self) -> None:
        """As `Reduction.proceed`."""

    def finish(self) -> None:
        """As `Reduction.finish`."""
        hvd.synchronize(self._handle)
        # In the same order on both ranks, so that they get the same bits.
        first, second = self._both.view(2, -1)
        total = self._bucket
        if total.dtype != torch.float32:
            total = self._memory.get("total", first.numel(), torch.float32, first.device)
        total.copy_(first)
        add(total, second, self._memory)
        if total is not self._bucket:
            self._bucket.copy_(total)


class WordsOfMany:
    """The sum of 16-bit words: alltoall, sums in float32, allgather (this module's beginning says why).

    Args:
        bucket: shape (n,), any floating type.
        group: two ranks or more.
        name: of the collectives, which add their own ends to it.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        memory: of this bucket.
    """

    def __init__(self, bucket: torch.Tensor, group: Group, name: str, dtype: torch.dtype, memory: Memory) -> None:
        self._bucket, self._group, self._name, self._memory = bucket, group, name, memory
        self._words = memory.get("words", math.ceil(bucket.numel() / group.size) * group.size, dtype, bucket.device)
        self._words[: bucket.numel()].copy_(bucket)
        self._words[bucket.numel() :].zero_()
        self._slices = hvd.alltoall_async(carried(self._words), name=f"{name}.slices", process_set=group.process_set)
        self._sums: int | None = None

    def proceed(self) -> None:
        """As `Reduction.proceed`."""
        if self._sums is not None:
            return
        slices = hvd.synchronize(self._slices)[0].view(self._words.dtype).view(self._group.size, -1)
        size, dtype, device = slices.shape[1], slices.dtype, slices.device
        # One slice after the other: several times as fast on a CPU as a sum over the first dimension.
        total = self._memory.get("total", size, torch.float32, device).copy_(slices[0])
        for words in slices[1:]:
            add(total, words, self._memory)
        # The owner takes its rounded sums too, or it would have other bits than the rest.
        rounded = self._memory.get("rounded", size, dtype, device).copy_(total)
        name, process_set = f"{self._name}.sums", self._group.process_set
        # This rank's words are sent, so that their memory can take the sums.
        self._sums = _allgather_async(carried(rounded), carried(self._words), name, process_set)

    def finish(self) -> None:
        """As `Reduction.finish`."""
        self.proceed()
        hvd.synchronize(self._sums)
        self._bucket.copy_(self._words[: self._bucket.numel()])
