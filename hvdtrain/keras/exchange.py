"""How gradients travel between the ranks of one distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class GradientExchange:
    """Reduces gradients over the ranks of a process set, in eager code and in `tf.function`.

    Every rank must call it equally often, with gradients of the same shapes and with the same ones missing.
    """

    # Horovod pairs tensors by name. Layer names won't do: they count up on a rank that builds one model more.
    name: str
    compression: Any
    op: Any
    groups: int
    process_set: Any

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Reduces each gradient over the ranks; None stays None.

        Dense gradients go as `groups` grouped allreduces per dtype. Sparse ones (`tf.IndexedSlices`, from Embedding)
        are gathered: the result holds the slices of all ranks, as the gradient of one batch with all samples would.
        """
        _refuse_xla()
        reduced = list(gradients)
        with tf.name_scope(f"{self.name}/"):
            for number, positions in enumerate(self._dense_groups(gradients)):
                group = [_without_bfloat16(gradients[position]) for position in positions]
                smallest = min(range(len(group)), key=lambda number: group[number].shape.num_elements() or 0)
                group[smallest] = _never_constant(group[smallest])
                results = hvd.grouped_allreduce(
                    group,
                    op=self.op,
                    compression=self.compression,
                    process_set=self.process_set,
                    name=f"{self.name}_group_{number}",
                    ignore_name_scope=True,
                )
                for position, result in zip(positions, results, strict=True):
                    reduced[position] = tf.cast(result, gradients[position].dtype)
            for position, gradient in enumerate(gradients):
                if isinstance(gradient, tf.IndexedSlices):
                    reduced[position] = self._gather(gradient, f"{self.name}_sparse_{position}")
        return reduced

    def agree(self, finite: Any) -> Any:
        """True on every rank if `finite`, a boolean scalar, is true on every rank."""
        _refuse_xla()
        with tf.name_scope(f"{self.name}/"):
            overflows = hvd.allreduce(
                _never_constant(tf.cast(tf.logical_not(finite), tf.int32)),
                op=hvd.Sum,
                process_set=self.process_set,
                name=f"{self.name}_overflows",
                ignore_name_scope=True,
            )
        return tf.equal(overflows, 0)

    def _dense_groups(self, gradients: Sequence[Any]) -> Iterator[list[int]]:
        """Positions of the dense gradients: one dtype a group, which Horovod's op demands, neighbours together."""
        of_dtype: dict[tf.DType, list[int]] = {}
        for position, gradient in enumerate(gradients):
            if gradient is not None and not isinstance(gradient, tf.IndexedSlices):
                of_dtype.setdefault(tf.as_dtype(gradient.dtype), []).append(position)
        for positions in of_dtype.values():
            length = -(-len(positions) // self.groups)
            yield from (positions[start : start + length] for start in range(0, len(positions), length))

    def _gather(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        values, context = self.compression.compress(_without_bfloat16(slices.values))
        options = {"process_set": self.process_set, "ignore_name_scope": True}
        values = hvd.allgather(_never_constant(values), name=f"{name}_values", **options)
        indices = hvd.allgather(_never_constant(slices.indices), name=f"{name}_indices", **options)
        values = tf.cast(self.compression.decompress(values, context), slices.values.dtype)
        if self.op == hvd.Average:
            values /= tf.cast(hvd.size_op(process_set_id=self.process_set.process_set_id), values.dtype)
        return tf.IndexedSlices(values, indices, slices.dense_shape)


def _without_bfloat16(gradient: Any) -> tf.Tensor:
    """Horovod 0.28.1 has no bfloat16: such gradients are reduced as float32."""
    tensor = tf.convert_to_tensor(gradient)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def _never_constant(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, which TensorFlow can't know before it runs.

    Horovod 0.28.1 doesn't tell TensorFlow that its operations have an effect on others. If all inputs are constants, as
    the zeros of a rank without samples are, TensorFlow runs the collective once, when it optimises the graph, and keeps
    the result; the other ranks then wait for ever. The time is never negative, but that is for the run to find out.
    """
    return tensor + tf.cast(tf.minimum(tf.timestamp(), 0.0), tensor.dtype)


def _refuse_xla() -> None:
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            "a training step that XLA compiles can't hold Horovod's operations",
            fix="compile the model with jit_compile=False (or 'auto', after the optimizer was made distributed), "
            "and use tf.function without jit_compile around the step",
        )
