"""How gradients travel between the ranks of one distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdtrain.errors import UsageError
from hvdtrain.keras.compression import Auto, Compression, FlatCompression, Wire
from hvdtrain.parallel.adasum import require_size
from hvdtrain.parallel.cut import cut_of
from hvdtrain.parallel.groups import Group, Groups
from hvdtrain.parallel.keras.collectives import never_constant


class Exchange(Protocol):
    """What a distributed optimizer asks for. Every rank must make the same calls."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Each gradient as the step needs it; None stays None. Those of all ranks have the same ones missing."""

    def agree(self, finite: Any) -> Any:
        """True on every rank if `finite`, a boolean scalar, is true on every rank."""

    def clip(self, gradients: Sequence[Any], variables: Sequence[Any], limit: float) -> list[Any] | None:
        """Reduced gradients, scaled down so that their global norm is at most the limit; None: Keras's own does it."""


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

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Reduces each gradient over the ranks; None stays None.

        Dense gradients go as `groups` grouped allreduces per dtype. Sparse ones (`tf.IndexedSlices`, from Embedding)
        are gathered: the result holds the slices of all ranks, as the gradient of one batch with all samples would.
        """
        _refuse_xla()
        reduced = list(gradients)
        compression = self._compression(gradients)
        with tf.name_scope(f"{self.name}/"):
            for number, positions in enumerate(self._dense_groups(gradients)):
                group = [_without_bfloat16(gradients[position]) for position in positions]
                results = self._reduce_dense(group, compression, f"{self.name}_group_{number}")
                for position, result in zip(positions, results, strict=True):
                    reduced[position] = tf.cast(result, gradients[position].dtype)
            for position, gradient in enumerate(gradients):
                if isinstance(gradient, tf.IndexedSlices):
                    reduced[position] = self._gather(gradient, compression, f"{self.name}_sparse_{position}")
        return reduced

    def agree(self, finite: Any) -> Any:
        """As `Exchange.agree`."""
        return _agree(finite, self.name, self.process_set)

    def clip(self, gradients: Sequence[Any], variables: Sequence[Any], limit: float) -> list[Any] | None:
        """None: each rank has all variables whole."""
        return None

    def _compression(self, gradients: Sequence[Any]) -> Any:
        if not isinstance(self.compression, Auto):
            return self.compression
        values = sum(
            gradient.shape.num_elements()
            for gradient in gradients
            if gradient is not None and not isinstance(gradient, tf.IndexedSlices)
        )
        return self.compression.choose(values, Wire(f"{self.name}_trial", self.process_set, hvd.Sum))

    def _dense_groups(self, gradients: Sequence[Any]) -> Iterator[list[int]]:
        """Positions of the dense gradients: one dtype a group, which Horovod's op demands, neighbours together."""
        of_dtype: dict[tf.DType, list[int]] = {}
        for position, gradient in enumerate(gradients):
            if gradient is not None and not isinstance(gradient, tf.IndexedSlices):
                of_dtype.setdefault(tf.as_dtype(gradient.dtype), []).append(position)
        for positions in of_dtype.values():
            length = -(-len(positions) // self.groups)
            yield from (positions[start : start + length] for start in range(0, len(positions), length))

    def _reduce_dense(self, group: list[tf.Tensor], compression: Any, name: str) -> list[tf.Tensor]:
        if isinstance(compression, FlatCompression):
            if group[0].dtype == tf.float32:
                flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in group], 0)
                whole = compression.reduce(flat, Wire(name, self.process_set, self.op))
                pieces = tf.split(whole, [gradient.shape.num_elements() for gradient in group])
                return [tf.reshape(piece, gradient.shape) for piece, gradient in zip(pieces, group, strict=True)]
            compression = Compression.none
        smallest = min(range(len(group)), key=lambda number: group[number].shape.num_elements() or 0)
        group[smallest] = never_constant(group[smallest])
        results: list[tf.Tensor] = hvd.grouped_allreduce(
            group,
            op=self.op,
            compression=compression,
            process_set=self.process_set,
            name=name,
            ignore_name_scope=True,
        )
        return results

    def _gather(self, slices: tf.IndexedSlices, compression: Any, name: str) -> tf.IndexedSlices:
        values = _without_bfloat16(slices.values)
        if isinstance(compression, FlatCompression):
            compression = compression.for_rows(values.dtype)
        values, context = compression.compress(values)
        options = {"process_set": self.process_set, "ignore_name_scope": True}
        values = hvd.allgather(never_constant(values), name=f"{name}_values", **options)
        indices = hvd.allgather(never_constant(slices.indices), name=f"{name}_indices", **options)
        values = tf.cast(compression.decompress(values, context), slices.values.dtype)
        if self.op == hvd.Average:
            values /= tf.cast(hvd.size_op(process_set_id=self.process_set.process_set_id), values.dtype)
        return tf.IndexedSlices(values, indices, slices.dense_shape)


class AdasumExchange:
    """Combines the gradients of all ranks by Adasum, each variable's for itself (see `hvdtrain.parallel.adasum`).

    Every rank must call it equally often, with gradients of the same shapes and with the same ones missing.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """As `Exchange.reduce`. Sparse gradients become dense, as Horovod's Adasum takes no others."""
        _refuse_xla()
        with tf.name_scope(f"{self._name}/"):
            return [
                None if gradient is None else self._combine(tf.convert_to_tensor(gradient), f"{self._name}_{number}")
                for number, gradient in enumerate(gradients)
            ]

    def agree(self, finite: Any) -> Any:
        """As `Exchange.agree`."""
        return _agree(finite, self._name, hvd.global_process_set)

    def clip(self, gradients: Sequence[Any], variables: Sequence[Any], limit: float) -> list[Any] | None:
        """None: each rank has all variables whole."""
        return None

    def _combine(self, gradient: tf.Tensor, name: str) -> tf.Tensor:
        # Horovod ends the process where it can't reckon with halves: on a CPU it needs a build for AVX and F16C.
        wire = gradient if gradient.dtype == tf.float64 else tf.cast(gradient, tf.float32)
        require_size((gradient.shape.num_elements() or 0) * wire.dtype.size)
        # Not hvd.allreduce, which forks the process to ask whether it has a GPU.
        combined = hvd._allreduce(never_constant(wire), op=hvd.Adasum, name=name, ignore_name_scope=True)
        return tf.cast(combined, gradient.dtype)


class GridExchange:
    """Reduces gradients on a grid of ranks, of which some share layers or embedding tables.

    Each rank's loss is the mean over its own samples, so that all gradients are to be averaged over `Groups.replicas`.
    Those of embedding tables are summed over the embedding group by their own layer, where the other ranks of it come
    in: here they are summed over `Groups.data` alone, and divided by the number of replicas all the same.
    """

    def __init__(self, name: str, compression: Any, op: Any, split: int, groups: Groups) -> None:
        self._name = name
        self._groups = groups

        def over(group: Group, name: str, op: Any) -> GradientExchange | None:
            return GradientExchange(name, compression, op, split, group.process_set) if group.size > 1 else None

        self._dense = over(groups.replicas, name, op)
        # Of another name: where both groups are of the same ranks, they have the same process set.
        self._tables = over(groups.data, f"{name}_tables", hvd.Sum)
        self._share = 1 / groups.replicas.size if op == hvd.Average else 1.0

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """As `Exchange.reduce`. In a group of one, Horovod isn't called."""
        of_table = [_axis(variable) == "embedding" for variable in variables]
        reduced = list(gradients)
        if self._dense:
            dense = [None if is_table else one for one, is_table in zip(reduced, of_table, strict=True)]
            reduced = [
                ours if one is None else one for one, ours in zip(self._dense.reduce(dense), reduced, strict=True)
            ]
        tables = [one if is_table else None for one, is_table in zip(reduced, of_table, strict=True)]
        if self._tables:
            tables = self._tables.reduce(tables)
        return [
            one if table is None else _scaled(table, self._share) for one, table in zip(reduced, tables, strict=True)
        ]

    def agree(self, finite: Any) -> Any:
        """As `Exchange.agree`: over all ranks of the grid, for parts of a variable can overflow alone."""
        return _agree(finite, self._name, hvd.global_process_set)

    def clip(self, gradients: Sequence[Any], variables: Sequence[Any], limit: float) -> list[Any] | None:
        """As `Exchange.clip`, by the norm over all parts; what all ranks of a group have counts once."""
        groups = self._groups
        if groups.model.size == groups.embedding.size == 1:
            return None
        squares: dict[str | None, Any] = {"tensor": 0.0, "embedding": 0.0, None: 0.0}
        for gradient, variable in zip(gradients, variables, strict=True):
            # As in Keras's norm, a row that comes twice in a sparse gradient counts as two.
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            squares[_axis(variable)] += tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))
        with tf.name_scope(f"{self._name}/"):
            for axis in ("tensor", "embedding"):
                squares[axis] = self._sum(squares[axis], getattr(groups, axis), axis)
            norm = tf.sqrt(self._sum(sum(squares.values()), groups.pipeline, "pipeline"))
        # NaN where the norm isn't finite, as with Keras's own.
        scale = tf.minimum(limit / norm, 1.0) + (norm - norm)
        return [_scaled(gradient, scale) for gradient in gradients]

    def _sum(self, square: Any, group: Group, axis: str) -> Any:
        if group.size == 1:
            return square
        return hvd.allreduce(
            never_constant(tf.convert_to_tensor(square, tf.float32)),
            op=hvd.Sum,
            process_set=group.process_set,
            name=f"{self._name}_norm_{axis}",
            ignore_name_scope=True,
        )


def _axis(variable: Any) -> str | None:
    cut = cut_of(variable)
    return cut.axis if cut else None


def _scaled(gradient: Any, factor: Any) -> Any:
    """The gradient times a number; a sparse one stays sparse."""
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _agree(finite: Any, name: str, process_set: Any) -> Any:
    _refuse_xla()
    with tf.name_scope(f"{name}/"):
        overflows = hvd.allreduce(
            never_constant(tf.cast(tf.logical_not(finite), tf.int32)),
            op=hvd.Sum,
            process_set=process_set,
            name=f"{name}_overflows",
            ignore_name_scope=True,
        )
    return tf.equal(overflows, 0)


def _without_bfloat16(gradient: Any) -> tf.Tensor:
    """Horovod 0.28.1 has no bfloat16: such gradients are reduced as float32."""
    tensor = tf.convert_to_tensor(gradient)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def _refuse_xla() -> None:
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            "a training step that XLA compiles can't hold Horovod's operations",
            fix="compile the model with jit_compile=False (or 'auto', after the optimizer was made distributed), "
            "and use tf.function without jit_compile around the step",
        )
