"""Gradients in fewer bytes on the wire: what ``horovod.compression`` of a job spec names.

Each kind is a `Reducer`. All ranks of a group get the same bits, and only float32 is made smaller: integers and float64
travel as they are. bfloat16, which Horovod refuses, works with every kind.

Half-width sums on a CPU are 2.6 times as slow as float32 ones, and Horovod knows no bfloat16. So 16-bit gradients don't
go by its allreduce there: an alltoall gives each rank all others' words of its own slice, which it sums in float32, and
an allgather brings the slices' sums, rounded once, back to all. These two move the bytes that a ring-allreduce of the
same words does (2 (n-1)/n of them on each link), and each bucket's two are `Reduction`'s two phases, so that one
bucket's sums are computed while another's words are on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import horovod.torch as hvd
import torch

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.collectives import carried


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

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """As `Reducer.start`."""
        if group.size == 1 or bucket.numel() == 0:
            return Nothing()
        if bucket.dtype == torch.bfloat16 or (bucket.dtype == torch.float16 and not bucket.is_cuda):
            return Words(bucket, group, name, bucket.dtype)
        return Whole(bucket, bucket, group, name)


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
        return Words(bucket, group, f"{name}.fp16", torch.float16)


class BFloat16(Plain):
    """``bf16``: float32 gradients as bfloat16, 7 bits of fraction and float32's range."""

    def start(self, bucket: torch.Tensor, group: Group, name: str) -> Reduction:
        """As `Reducer.start`."""
        if group.size == 1 or bucket.dtype != torch.float32 or bucket.numel() == 0:
            return super().start(bucket, group, name)
        return Words(bucket, group, f"{name}.bf16", torch.bfloat16)


class Nothing:
    """The reduction of a group of one, or of no elements: there is nothing to wait for."""

    def proceed(self) -> None:
        """As `Reduction.proceed`."""

    def finish(self) -> None:
        """As `Reduction.finish`."""


class Whole:
    """Horovod's allreduce of a tensor with the bucket's values: the bucket itself, or a copy of another type."""

    def __init__(self, bucket: torch.Tensor, tensor: torch.Tensor, group: Group, name: str) -> None:
        self._bucket, self._tensor = bucket, tensor
        self._handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=name, process_set=group.process_set)

    def proceed(self) -> None:
        """As `Reduction.proceed`."""

    def finish(self) -> None:
        """As `Reduction.finish`."""
        hvd.synchronize(self._handle)
        if self._tensor is not self._bucket:
            self._bucket.copy_(self._tensor)


class Words:
    """The sum of 16-bit words: alltoall, sums in float32, allgather (this module's beginning says why).

    Args:
        bucket: shape (n,), any floating type.
        group: two ranks or more.
        name: of the collectives, which add their own ends to it.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    def __init__(self, bucket: torch.Tensor, group: Group, name: str, dtype: torch.dtype) -> None:
        self._bucket, self._group, self._name, self._dtype = bucket, group, name, dtype
        words = bucket.new_empty(math.ceil(bucket.numel() / group.size) * group.size, dtype=dtype)
        words[: bucket.numel()].copy_(bucket)
        words[bucket.numel() :].zero_()
        self._slices = hvd.alltoall_async(carried(words), name=f"{name}.slices", process_set=group.process_set)
        self._sums: Any = None

    def proceed(self) -> None:
        """As `Reduction.proceed`."""
        if self._sums is not None:
            return
        slices = _synchronized(self._slices).view(self._dtype).view(self._group.size, -1)
        # One slice after the other: several times as fast on a CPU as a sum over the first dimension.
        total = slices[0].float()
        for words in slices[1:]:
            total += words
        # The owner takes its rounded sums too, or it would have other bits than the rest.
        rounded = carried(total.to(self._dtype))
        self._sums = hvd.allgather_async(rounded, name=f"{self._name}.sums", process_set=self._group.process_set)

    def finish(self) -> None:
        """As `Reduction.finish`."""
        self.proceed()
        self._bucket.copy_(_synchronized(self._sums).view(self._dtype)[: self._bucket.numel()])


def _synchronized(handle: Any) -> torch.Tensor:
    output = hvd.synchronize(handle)
    return output[0] if isinstance(output, tuple) else output
