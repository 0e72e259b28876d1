"""Gradients in fewer bytes on the wire: what ``compression=`` of `DistributedOptimizer` may be.

`Compression.none` and `Compression.fp16` are Horovod's own, which go into its allreduce. The others need collectives
of their own, which take float32 (and bfloat16) gradients as one flat float32 tensor; other dtypes travel as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.parallel.keras.collectives import never_constant

# Above this many values the time grows with their number, for all alike.
_MEASURED_VALUES = 16 * 2**20
_MEASURED_CALLS = 5
# Rounding has to be worth it, and times of equal ways differ by some percent.
_CLEARLY = 0.9


@dataclass(frozen=True)
class Wire:
    """Where a flat tensor travels.

    Attributes:
        name: of its collectives, the same on all ranks and of no other tensor in flight.
        process_set: the ranks that take part.
        op: `hvd.Average` or `hvd.Sum`.
    """

    name: str
    process_set: Any
    op: Any

    def options(self, part: str) -> dict[str, Any]:
        """Of one of Horovod's functions."""
        return {"name": f"{self.name}_{part}", "ignore_name_scope": True, "process_set": self.process_set}

    def size(self, dtype: Any) -> tf.Tensor:
        """Number of the ranks; known only when the graph runs, since elastic jobs change it."""
        return tf.cast(hvd.size_op(process_set_id=self.process_set.process_set_id), dtype)

    def averaged(self, total: tf.Tensor) -> tf.Tensor:
        """What `op` makes of the ranks' sum."""
        return total / self.size(total.dtype) if self.op == hvd.Average else total


class FlatCompression:
    """Compression that reduces a flat tensor by collectives of its own."""

    def reduce(self, flat: tf.Tensor, wire: Wire) -> tf.Tensor:
        """The average or sum of the ranks' float32 tensors, with the same bits on all of them."""
        raise NotImplementedError

    def for_rows(self, dtype: Any) -> Any:
        """A compressor in Horovod's manner for the rows of sparse gradients, which are gathered and not summed."""
        return Compression.none

    @staticmethod
    def compress(tensor: Any) -> Any:
        """What Horovod's own functions would call."""
        raise UsageError(
            "this compression is no step before Horovod's allreduce",
            fix="give it to DistributedOptimizer, or hvd.Compression.fp16 to hvd.allreduce",
        )


class BFloat16(FlatCompression):
    """Half the bytes, with float32's range: the ranks' values are rounded to 8 bits, their sum is not until it is done.

    Horovod 0.28.1 can't add bfloat16. So each rank gets its share of all ranks' values (an alltoall of 16-bit words),
    adds them in float32, and all gather the rounded results: as many bytes as a ring allreduce of 16-bit numbers.
    """

    def reduce(self, flat: tf.Tensor, wire: Wire) -> tf.Tensor:
        """The same result on all ranks, rounded to bfloat16."""
        values, size = tf.size(flat), wire.size(tf.int32)
        padded = tf.pad(flat, [[0, -values % size]])
        of_ranks = hvd.alltoall(never_constant(_Words.compress(padded)[0]), **wire.options("shares"))
        share = tf.reduce_sum(tf.reshape(_Words.decompress(of_ranks), tf.stack([size, -1])), axis=0)
        whole = hvd.allgather(never_constant(_Words.compress(wire.averaged(share))[0]), **wire.options("sums"))
        return tf.ensure_shape(_Words.decompress(whole)[:values], flat.shape)

    def for_rows(self, dtype: Any) -> Any:
        """float32 rows as words of 16 bits."""
        return _Words if dtype == tf.float32 else Compression.none


class _Words:
    """float32 numbers as bfloat16, seen as float16: Horovod refuses the one, and NCCL whole numbers of that width."""

    @staticmethod
    def compress(values: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.bitcast(tf.cast(values, tf.bfloat16), tf.float16), None

    @staticmethod
    def decompress(words: tf.Tensor, context: None = None) -> tf.Tensor:
        return tf.cast(tf.bitcast(words, tf.bfloat16), tf.float32)


class TopK(FlatCompression):
    """Each rank sends the values furthest from zero alone, and keeps the rest for its next steps.

    Error feedback as in Stich et al., "Sparsified SGD with Memory", 2018: what isn't sent is added to the next step's
    gradient. The traffic is ``8 * ratio`` bytes a value from each rank to each other, so it grows with the ranks. What
    is kept isn't saved with the model: it begins at zero again.

    Args:
        ratio: share of the values that is sent, above 0 and at most 1.

    Raises:
        UsageError: another ratio.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise UsageError(f"top-k's ratio is {ratio!r}", fix="give the part to be sent, above 0 and at most 1")
        self.ratio = ratio
        self._kept: dict[str, tf.Variable] = {}

    def reduce(self, flat: tf.Tensor, wire: Wire) -> tf.Tensor:
        """The same result on all ranks: they add the received values in the same order."""
        kept = self._kept_of(flat, wire.name)
        due = flat + kept
        places = tf.math.top_k(tf.abs(due), max(1, math.ceil(self.ratio * flat.shape[0])), sorted=False).indices
        values = tf.gather(due, places)
        kept.assign(tf.tensor_scatter_nd_update(due, places[:, None], tf.zeros_like(values)))
        # As whole numbers, for places as float32 would be so small that TensorFlow's arithmetic takes them for zero.
        packed = never_constant(tf.stack([places, tf.bitcast(values, tf.int32)])[None])
        of_ranks = hvd.allgather(packed, **wire.options("top"))
        total = tf.foldl(
            lambda sum_, one: tf.tensor_scatter_nd_add(sum_, one[0][:, None], tf.bitcast(one[1], tf.float32)),
            of_ranks,
            tf.zeros_like(flat),
        )
        return wire.averaged(total)

    def _kept_of(self, flat: tf.Tensor, name: str) -> tf.Variable:
        if name not in self._kept:
            with tf.init_scope():  # It outlives the graph that is being made.
                self._kept[name] = tf.Variable(tf.zeros(flat.shape), trainable=False, name=f"{name}_kept")
        return self._kept[name]


class Auto(FlatCompression):
    """bf16 where it's clearly faster than none on this network, tried once before the first step.

    fp16 is no candidate: it moves the bytes that bf16 does, and gradients beyond its range would become infinite. topk
    isn't, for with it training takes another course.

    Attributes:
        why: one line for a log on each choice.
    """

    def __init__(self) -> None:
        self.why: list[str] = []
        self._chosen: dict[int, Any] = {}

    def forget(self) -> None:
        """Try again, as when other ranks have come: all must."""
        self._chosen.clear()
        self.why.clear()

    def choose(self, values: int, wire: Wire) -> Any:
        """What to use for gradients of so many float32 values; all ranks choose the same.

        Tried with a buffer of that size, eagerly, also while a graph is being made: all ranks are at the same point.
        """
        process_set = wire.process_set.process_set_id
        if process_set not in self._chosen:
            with tf.init_scope():
                none_s, bf16_s = _seconds_of_both(min(values, _MEASURED_VALUES), wire)
            is_faster = bf16_s < _CLEARLY * none_s
            self._chosen[process_set] = BFloat16() if is_faster else Compression.none
            self.why.append(
                f"compression: {'bf16' if is_faster else 'none'}; gradients take {none_s:.3g} s per step as they are, "
                f"{bf16_s:.3g} s as bf16"
            )
        return self._chosen[process_set]


def _seconds_of_both(values: int, wire: Wire) -> tuple[float, float]:
    """What a reduction takes as it is and as bf16: the same numbers on all ranks, by which they judge alike."""
    buffer, bf16 = tf.zeros([max(1, values)]), BFloat16()
    own = [
        _seconds(lambda: hvd.allreduce(buffer, op=hvd.Sum, **wire.options("none"))),
        _seconds(lambda: bf16.reduce(buffer, wire)),
    ]
    none_s, bf16_s = hvd.allreduce(tf.constant(own, tf.float64), op=hvd.Average, **wire.options("times")).numpy()
    return float(none_s), float(bf16_s)


def _seconds(reduction: Callable[[], tf.Tensor]) -> float:
    """The median of several calls, after one that agrees on names and waits for the slowest rank."""
    reduction().numpy()
    times = []
    for _ in range(_MEASURED_CALLS):
        start = time.perf_counter()
        reduction().numpy()
        times.append(time.perf_counter() - start)
    return median(times)


class Compression:
    """What ``compression=`` may be.

    Attributes:
        none: float32 as it is.
        fp16: half the bytes, summed in half precision by Horovod; overflows at 65,504.
        bf16: half the bytes, with float32's range, summed in float32.
        topk: the largest values alone, with error feedback: ``Compression.topk`` or ``Compression.topk(ratio=0.05)``.
        auto: bf16 where it's clearly faster than none, measured before the first step.
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
    bf16 = BFloat16
    topk = TopK
    auto = Auto


def compression_of(given: Any) -> Any:
    """The object for one optimizer of what the user gave, which may be a class, as Horovod's own are."""
    return given() if isinstance(given, type) and issubclass(given, FlatCompression) else given
