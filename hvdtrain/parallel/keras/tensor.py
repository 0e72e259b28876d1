"""Keras layers whose matrices a group of ranks shares, cut as in Megatron-LM (Shoeybi et al., 2019, section 3).

Attention and the MLP begin with a matrix that is cut by columns and end with one that is cut by rows, so that each
needs one all-reduce forward and one backward. All ranks of the group must see the same samples, and make the same
layers in the same order: the layers' numbers name their collectives.

Set the same seed on all ranks (``keras.utils.set_random_seed``) before the model is made: each layer makes its whole
initial value and keeps its own part, so that the ranks together begin where one process with that seed would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.parallel.cut import Cut, bounds
from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.keras.collectives import all_reduce, enter, gather, leave, scatter
from hvdtrain.parallel.keras.shared import ParallelDropout, SharedLayer, build_inner, require_even

_AXIS = "tensor"


@keras.saving.register_keras_serializable("hvdtrain")
class ColumnParallelDense(SharedLayer):
    """`keras.layers.Dense` whose output units are cut: each rank computes its own from the whole input.

    Args:
        units: of the whole layer.
        group: the ranks that share it.
        blocks: parts of the units that are cut each by itself, as query, key and value of a fused projection.
        activation: as of `Dense`. Of cut units it sees the rank's own, so softmax needs ``gather_output``.
        use_bias: as of `Dense`.
        gather_output: whether each rank gets all units; else its own, ``units / group.size``.
        kernel_initializer, bias_initializer: as of `Dense`, for the whole variable.
        options: of `keras.layers.Layer`.

    Shapes: (…, features) to (…, units / group.size), or (…, units).

    Raises:
        UsageError: the units can't be cut evenly.
    """

    def __init__(
        self,
        units: int,
        group: Group | None = None,
        *,
        blocks: int = 1,
        activation: Any = None,
        use_bias: bool = True,
        gather_output: bool = False,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        require_even("units", units, blocks, self.group, type(self).__name__)
        self.units = units
        self.blocks = blocks
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.gather_output = gather_output
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)

    def build(self, input_shape: Any) -> None:
        """Makes kernel (features, own units) and bias (own units)."""
        kernel = (input_shape[-1], self.units)
        self.kernel = self.add_part("kernel", kernel, self.kernel_initializer, Cut(_AXIS, 1, self.blocks))
        if self.use_bias:
            self.bias = self.add_part("bias", (self.units,), self.bias_initializer, Cut(_AXIS, 0, self.blocks))
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The units of this rank, or of all."""
        outputs = keras.ops.matmul(enter(inputs, self.group, self.collective), self.kernel)
        if self.use_bias:
            outputs = keras.ops.add(outputs, self.bias)
        if self.gather_output:
            outputs = self._gather(outputs)
        return self.activation(outputs)

    def get_config(self) -> dict[str, Any]:
        """All arguments but the group."""
        own = {"units": self.units, "blocks": self.blocks, "gather_output": self.gather_output}
        return {**super().get_config(), **own, **_dense_config(self)}

    def _gather(self, outputs: Any) -> Any:
        gathered = gather(outputs, self.group, self.collective)
        if self.blocks == 1:
            return gathered
        # They come rank by rank, each with its part of every block; the whole layer has block after block.
        order = np.arange(self.units).reshape(self.group.size, self.blocks, -1).swapaxes(0, 1).reshape(-1)
        return tf.gather(gathered, order, axis=-1)


@keras.saving.register_keras_serializable("hvdtrain")
class RowParallelDense(SharedLayer):
    """`keras.layers.Dense` whose input features are cut: each rank has its own, and the group sums what they give.

    Args:
        units: all of them come out on each rank.
        group: the ranks that share it.
        scatter_input: whether each rank gets all features, of which it takes its own; else it gets its own, as
            `ColumnParallelDense` leaves them.
        activation, use_bias: as of `Dense`. The bias isn't cut.
        kernel_initializer, bias_initializer: as of `Dense`, for the whole variable.
        options: of `keras.layers.Layer`.

    Shapes: (…, features / group.size), or (…, features) with ``scatter_input``, to (…, units).

    Raises:
        UsageError: at the first call, the features can't be cut evenly.
    """

    def __init__(
        self,
        units: int,
        group: Group | None = None,
        *,
        scatter_input: bool = False,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        self.units = units
        self.scatter_input = scatter_input
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)

    def build(self, input_shape: Any) -> None:
        """Makes kernel (own features, units) and bias (units)."""
        features = input_shape[-1] * (1 if self.scatter_input else self.group.size)
        require_even("input features", features, 1, self.group, type(self).__name__)
        self.kernel = self.add_part("kernel", (features, self.units), self.kernel_initializer, Cut(_AXIS, 0))
        if self.use_bias:
            self.bias = self.add_weight(name="bias", shape=(self.units,), initializer=self.bias_initializer)
        self.built = True

    def call(self, inputs: Any) -> Any:
        """All units, the same on all ranks of the group."""
        if self.scatter_input:
            inputs = scatter(inputs, self.group, self.collective)
        outputs = leave(keras.ops.matmul(inputs, self.kernel), self.group, self.collective)
        if self.use_bias:
            outputs = keras.ops.add(outputs, self.bias)
        return self.activation(outputs)

    def get_config(self) -> dict[str, Any]:
        """All arguments but the group."""
        own = {"units": self.units, "scatter_input": self.scatter_input}
        return {**super().get_config(), **own, **_dense_config(self)}


@keras.saving.register_keras_serializable("hvdtrain")
class VocabularyParallelEmbedding(SharedLayer):
    """`keras.layers.Embedding` whose rows are cut: each rank looks up the words it has, and the group sums.

    Args:
        input_dim: words of the whole vocabulary. Where it can't be cut evenly, the first ranks get one more.
        output_dim: features of a word.
        group: the ranks that share it. They must see the same words.
        embeddings_initializer: as of `Embedding`, for the whole table.
        options: of `keras.layers.Layer`.

    Shapes: words (…), from 0 to ``input_dim - 1``, to (…, output_dim). A word beyond gives zeros.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        group: Group | None = None,
        *,
        embeddings_initializer: Any = "uniform",
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.first, self.end = bounds(input_dim, self.group.size, self.group.rank)
        self.autocast = False  # Words are numbers, not features.

    def build(self, input_shape: Any) -> None:
        """Makes the table (own words, output_dim)."""
        whole = (self.input_dim, self.output_dim)
        self.embeddings = self.add_part("embeddings", whole, self.embeddings_initializer, Cut(_AXIS, 0))
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The words' features, the same on all ranks of the group."""
        words = tf.cast(inputs, tf.int64)
        is_own = (words >= self.first) & (words < self.end)
        table = tf.convert_to_tensor(self.embeddings)
        rows = tf.gather(table, tf.where(is_own, words - self.first, 0))
        rows = tf.cast(tf.where(is_own[..., None], rows, 0), self.compute_dtype)
        return leave(rows, self.group, self.collective)

    def get_config(self) -> dict[str, Any]:
        """All arguments but the group."""
        initializer = keras.initializers.serialize(self.embeddings_initializer)
        own = {"input_dim": self.input_dim, "output_dim": self.output_dim, "embeddings_initializer": initializer}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable("hvdtrain")
class ParallelMLP(SharedLayer):
    """Two dense layers, the first with an activation: ``hidden`` features that are cut, then ``width`` again.

    Args:
        width: features that come in and go out.
        hidden: features between the two layers.
        group: the ranks that share them.
        activation: of the first layer.
        use_bias, kernel_initializer, bias_initializer: as of `keras.layers.Dense`, of both.
        options: of `keras.layers.Layer`.

    Shapes: (…, width) to (…, width), the same on all ranks of the group.

    Raises:
        UsageError: ``hidden`` can't be cut evenly.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        group: Group | None = None,
        *,
        activation: Any = "gelu",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        dense = {
            "use_bias": use_bias,
            "kernel_initializer": kernel_initializer,
            "bias_initializer": bias_initializer,
            "dtype": self.dtype_policy,
        }
        self.into = ColumnParallelDense(hidden, self.group, activation=activation, name="into", **dense)
        self.out = RowParallelDense(width, self.group, name="out", **dense)

    def build(self, input_shape: Any) -> None:
        """Makes both layers' variables."""
        build_inner(self.into, input_shape)
        build_inner(self.out, (*input_shape[:-1], self.into.units // self.group.size))
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The same on all ranks of the group."""
        return self.out(self.into(inputs))

    def get_config(self) -> dict[str, Any]:
        """All arguments but the group."""
        own = {"width": self.out.units, "hidden": self.into.units}
        return {**super().get_config(), **own, **_dense_config(self.into)}


@keras.saving.register_keras_serializable("hvdtrain")
class ParallelAttention(SharedLayer):
    """Self-attention whose heads are cut: each rank has some of them whole.

    Query, key and value come from one dense layer, in this order, each with its heads one after the other.

    Args:
        width: features that come in and go out; each head has ``width / heads`` of them.
        heads: of the whole layer.
        group: the ranks that share it.
        causal: whether a position sees those before it and itself alone.
        dropout: share of the attention weights that is dropped in training, on each rank others.
        use_bias, kernel_initializer, bias_initializer: as of `keras.layers.Dense`, of both projections.
        seed: of the dropout, as of `ParallelDropout`.
        options: of `keras.layers.Layer`.

    Shapes: (batch, length, width) to the same, equal on all ranks of the group. A mask (batch, length) says with False
    which positions nobody sees.

    Raises:
        UsageError: the heads can't be cut evenly, or the width into heads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        group: Group | None = None,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        if width % heads:
            raise UsageError(
                f"{type(self).__name__} can't share out {width} features among {heads} heads",
                fix="let the width be a multiple of the heads",
            )
        require_even("heads", heads, 1, self.group, type(self).__name__)
        self.width = width
        self.heads = heads
        self.causal = causal
        self.seed = seed
        dense = {
            "use_bias": use_bias,
            "kernel_initializer": kernel_initializer,
            "bias_initializer": bias_initializer,
            "dtype": self.dtype_policy,
        }
        self.into = ColumnParallelDense(3 * width, self.group, blocks=3, name="into", **dense)
        self.dropout = ParallelDropout(dropout, self.group, cut=True, seed=seed, dtype=self.dtype_policy)
        self.out = RowParallelDense(width, self.group, name="out", **dense)

    def build(self, input_shape: Any) -> None:
        """Makes both projections' variables."""
        build_inner(self.into, input_shape)
        build_inner(self.out, (*input_shape[:-1], self.width // self.group.size))
        self.built = True

    def call(self, inputs: Any, mask: Any = None, training: bool = False) -> Any:
        """The same on all ranks of the group."""
        batch, length = tf.shape(inputs)[0], tf.shape(inputs)[1]
        own_heads = self.heads // self.group.size
        joint = tf.reshape(self.into(inputs), [batch, length, 3, own_heads, self.width // self.heads])
        query, key, value = tf.unstack(joint, axis=2)
        scores = tf.einsum("bqhd,bkhd->bhqk", query, key) * (self.width // self.heads) ** -0.5
        weights = tf.nn.softmax(scores + self._hidden(length, mask, scores.dtype))
        seen = tf.einsum("bhqk,bkhd->bqhd", self.dropout(weights, training=training), value)
        return self.out(tf.reshape(seen, [batch, length, self.width // self.group.size]))

    def get_config(self) -> dict[str, Any]:
        """All arguments but the group."""
        own = {"width": self.width, "heads": self.heads, "causal": self.causal, "dropout": self.dropout.rate}
        dense = _dense_config(self.into)
        del dense["activation"]
        return {**super().get_config(), **own, **dense, "seed": self.seed}

    def _hidden(self, length: Any, mask: Any, dtype: Any) -> Any:
        """What keeps positions from being seen: 0, or a number so low that softmax makes nothing of it."""
        visible = tf.ones((1, 1, length, length), tf.bool)
        if self.causal:
            visible = tf.linalg.band_part(visible, -1, 0)
        if mask is not None:
            visible &= tf.cast(mask, tf.bool)[:, None, None, :]
        # Half the lowest, so that a sum with a score stays finite.
        return tf.where(visible, tf.zeros((), dtype), tf.cast(dtype.min / 2, dtype))


def vocabulary_parallel_cross_entropy(
    logits: Any, targets: Any, group: Group, name: str = "cross_entropy"
) -> tf.Tensor:
    """Each sample's cross-entropy of logits that are cut over the group; whole rows of them exist nowhere.

    Two small all-reduces forward (the greatest logit; the sum of exponentials and the target's logit) and none
    backward. Half precision is computed in float32. To use it as a loss of `Model.compile`, swap its first arguments.

    Args:
        logits: this rank's part (…, vocabulary / group.size), as `ColumnParallelDense` leaves it.
        targets: words (…), the same on all ranks of the group.
        group: the ranks that share the logits.
        name: of its collectives, where a model has several.

    Returns:
        Losses (…), the same on all ranks of the group. Backward, their gradient must be the same on all, too.
    """
    words = tf.cast(targets, tf.int64)
    logits = tf.convert_to_tensor(logits)
    precise = logits if logits.dtype == tf.float64 else tf.cast(logits, tf.float32)
    size = tf.shape(precise, tf.int64)[-1]
    # One-hot rows of the targets; those of other ranks' words are zeros.
    chosen = tf.one_hot(words - group.rank * size, tf.cast(size, tf.int32), dtype=precise.dtype)

    def losses(scores: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        greatest = all_reduce(tf.reduce_max(scores, -1), group, f"{name}_max", hvd.Max)
        scores -= greatest[..., None]
        exponentials = tf.exp(scores)
        own = tf.stack([tf.reduce_sum(exponentials, -1), tf.reduce_sum(scores * chosen, -1)])
        total, target = tf.unstack(all_reduce(own, group, f"{name}_sum"))
        return tf.math.log(
            total
        ) - target, lambda upstream: (exponentials / total[..., None] - chosen) * upstream[..., None]

    return tf.custom_gradient(losses)(precise)


def _dense_config(layer: Any) -> dict[str, Any]:
    """What `keras.layers.Dense` has, too."""
    return {
        "activation": keras.activations.serialize(layer.activation),
        "use_bias": layer.use_bias,
        "kernel_initializer": keras.initializers.serialize(layer.kernel_initializer),
        "bias_initializer": keras.initializers.serialize(layer.bias_initializer),
    }
