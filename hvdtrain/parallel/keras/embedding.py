"""Embedding tables that are cut over ranks, each of which has samples of its own: recommenders in Keras 3.

The tables of a recommender are larger than the rest of it by far, and each sample reads a few rows of them. So each
rank keeps a part of the rows and answers the others' questions, while the dense layers are data parallel (Naumov et
al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019, section 3.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.parallel.cut import Cut, bounds, mark
from hvdtrain.parallel.groups import ALONE, Group
from hvdtrain.parallel.keras.collectives import never_constant

PADDING = -1  # In a bag: no item here.

ROWS_PER_SEED = 2**16

# Not Keras's names: those count up on a rank that makes one layer more, of whatever kind.
_numbers = itertools.count()


@keras.saving.register_keras_serializable("hvdtrain")
class ParallelEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """One embedding table for each field, all of them cut by rows over a group.

    The tables' rows are one long list, which is cut as evenly as can be, however uneven the tables are. In the forward
    pass each rank asks the owners for the rows of its samples, each row once (an alltoall of row numbers), and gets
    their vectors (another one); in the backward pass the vectors' gradients go back (a third one). An owner's gradient
    (`tf.IndexedSlices`, as that of `keras.layers.Embedding`) is the plain sum over the group's ranks of the gradients
    of their own losses: to train on the mean of these losses it is still to be divided by their number.

    All ranks of the group make the same layers in the same order, and each forward and each backward pass together;
    one that has no samples calls the layer with ids of shape ``[0, fields]``, and takes the gradient of the sum of
    what it makes of the result. Ids out of their table's range raise `UsageError`, or, inside `tf.function`,
    `tf.errors.InvalidArgumentError` with the same words.

    Shapes: ids ``[samples, fields]``, or with a `mode` ``[samples, fields, items]``; in column i those of table i, from
    0. To ``[samples, fields, width]``.

    Args:
        tables: number of rows of each table.
        width: size of a vector.
        group: ranks that share the rows. With one rank alone Horovod isn't called. None: this rank alone, as in a
            model that was saved and is loaded, for a configuration doesn't say who the ranks are.
        mode: None: each field of a sample has one id. ``sum`` or ``mean``: it has a bag of ids, whose vectors are
            pooled; `PADDING` in a bag is no item, and a bag without any gives zeros.
        embeddings_initializer: as of `keras.layers.Embedding`. It makes `ROWS_PER_SEED` rows at a time, each time with
            another seed that follows from its own, so that no rank ever holds all rows. Set the same seed on all ranks
            (``keras.utils.set_random_seed``), and they begin where one process with that seed would.
        options: of `keras.layers.Layer`.

    Attributes:
        embeddings: this rank's rows ``[rows, width]``, in the order of the tables.

    Raises:
        UsageError: a table without rows, a mode that there isn't, or ids of another shape.
    """

    def __init__(
        self,
        tables: Sequence[int],
        width: int,
        group: Group | None = None,
        *,
        mode: Literal["sum", "mean"] | None = None,
        embeddings_initializer: Any = "uniform",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        _check_arguments(tables, mode)
        self.tables, self.width, self.mode = tuple(tables), width, mode
        self.group = group or ALONE
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.autocast = False  # Ids are numbers, not features.
        self.supports_jit = False  # XLA has no Horovod operations.
        parts = [bounds(sum(tables), self.group.size, rank) for rank in range(self.group.size)]
        self._first, self._last = parts[self.group.rank]
        self._ends = [end for _, end in parts]
        # A layer that doesn't meet others takes no number: rank 0 alone may make a model's second, to save it.
        self._collective = f"tables_{next(_numbers)}" if self.group.size > 1 else ""

    def build(self, input_shape: Any) -> None:
        """Makes this rank's rows."""
        names = self._dimensions()
        if len(input_shape) != len(names) or input_shape[1] != len(self.tables):
            raise UsageError(
                f"ids have shape {tuple(input_shape)}, for {len(self.tables)} tables and mode={self.mode}",
                fix=f"give them as [{', '.join(names)}], with a field for each table",
            )

        def rows(_: Any, dtype: Any = None) -> tf.Tensor:
            return _rows(self.embeddings_initializer, sum(self.tables), self.width, self._first, self._last, dtype)

        shape = (self._last - self._first, self.width)
        # Without autocast, which would cast the whole table in each call; what is read is cast.
        variable = self.add_weight(name="embeddings", shape=shape, initializer=rows, autocast=False)
        self.embeddings = mark(variable, Cut("embedding", 0))
        self.built = True

    def call(self, ids: Any) -> Any:
        """The vectors of each sample's ids."""
        ids = self._in_range(tf.cast(ids, tf.int64))
        starts = np.cumsum([0, *self.tables[:-1]])
        if self.mode is None:
            return self._look_up(ids + starts)
        # What stands for no item has to be some row: the table's first, with a weight of 0.
        vectors = self._look_up(tf.maximum(ids, 0) + starts[:, None])
        weights = tf.cast(ids != PADDING, vectors.dtype)
        if self.mode == "mean":
            weights /= tf.maximum(tf.reduce_sum(weights, -1, keepdims=True), 1)
        return tf.reduce_sum(vectors * weights[..., None], -2)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """``(samples, fields, width)``."""
        return (*input_shape[:2], self.width)

    def get_config(self) -> dict[str, Any]:
        """All arguments but the group."""
        own = {"tables": list(self.tables), "width": self.width, "mode": self.mode}
        initializer = keras.initializers.serialize(self.embeddings_initializer)
        return {**super().get_config(), **own, "embeddings_initializer": initializer}

    def _look_up(self, rows: tf.Tensor) -> tf.Tensor:
        """The vectors ``[*rows.shape, width]`` of rows of the long list, whoever has them."""
        if self.group.size == 1:
            return tf.cast(tf.gather(self.embeddings.value, rows), self.compute_dtype)
        asked, position = tf.unique(tf.reshape(rows, [-1]))
        order = tf.argsort(asked)
        asked = tf.gather(asked, order)
        # Sorted, as the owners are: up to each owner's end there are so many.
        up_to = tf.searchsorted(asked, tf.constant(self._ends, tf.int64))
        splits = up_to - tf.concat([[0], up_to[:-1]], 0)
        if not tf.executing_eagerly():
            splits = never_constant(splits)
        wanted, wanted_splits = self._all_to_all(asked, splits, "rows")
        vectors = tf.cast(tf.gather(self.embeddings.value, wanted - self._first), self.compute_dtype)
        answers = self._answer(vectors, wanted_splits, splits)
        position = tf.gather(tf.math.invert_permutation(order), position)
        return tf.gather(answers, tf.reshape(position, tf.shape(rows)))

    def _answer(self, vectors: tf.Tensor, splits: tf.Tensor, answer_splits: tf.Tensor) -> tf.Tensor:
        """Vectors to those who asked for them; backward, their gradients to those who gave the vectors."""

        def run(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
            def gradient_of(gradient: Any) -> tf.Tensor:
                return self._all_to_all(tf.convert_to_tensor(gradient), answer_splits, "gradients")[0]

            return self._all_to_all(values, splits, "vectors")[0], gradient_of

        return tf.custom_gradient(run)(vectors)

    def _all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, kind: str) -> tuple[tf.Tensor, tf.Tensor]:
        """What the ranks have for this one, in their order, and how much is from each; ``splits``: for each."""
        # Horovod has no bfloat16, but nothing is reckoned with here: its bytes travel as another type of two bytes.
        is_bfloat16 = tensor.dtype == tf.bfloat16
        # A scope that is the same from wherever it is entered: TensorFlow then tells all calls of one name apart, and
        # Horovod, which is told to leave scopes out, sees what it made of them.
        with tf.name_scope("hvdtrain/"):
            received, counts = hvd.alltoall(
                tf.bitcast(tensor, tf.float16) if is_bfloat16 else tensor,
                splits,
                name=f"hvdtrain_{self._collective}_{kind}",
                ignore_name_scope=True,
                process_set=self.group.process_set,
            )
        received = tf.bitcast(received, tf.bfloat16) if is_bfloat16 else received
        return tf.ensure_shape(received, [None, *tensor.shape[1:]]), counts

    def _in_range(self, ids: tf.Tensor) -> tf.Tensor:
        """The same ids, if there are such rows."""
        lowest = 0 if self.mode is None else PADDING
        sizes = np.reshape(self.tables, (-1,) if self.mode is None else (-1, 1))
        wrong = (ids < lowest) | (ids >= sizes)
        # The first of them, or none: a sum is what makes a number of one.
        place = tf.where(wrong)[:1]
        number, table = tf.reduce_sum(tf.gather_nd(ids, place)), tf.reduce_sum(place[:, 1])
        details = [number, table, tf.gather(tf.constant(self.tables, tf.int64), table)]
        message = "id {} for table {}, which has {} rows"
        if not tf.executing_eagerly():
            check = tf.debugging.Assert(~tf.reduce_any(wrong), [tf.strings.format(message, details)])
            with tf.control_dependencies([check]):
                return tf.identity(ids)
        if tf.reduce_any(wrong):
            rows = int(details[2])
            raise UsageError(
                message.format(*map(int, details)), fix=f"give ids from {lowest} to {rows - 1}, or the table more rows"
            )
        return ids

    def _dimensions(self) -> list[str]:
        return ["samples", "fields"] if self.mode is None else ["samples", "fields", "items"]


def _rows(initializer: Any, total: int, width: int, first: int, last: int, dtype: Any) -> tf.Tensor:
    """Some rows of the long list, made in blocks that are the same whatever the group's size."""
    blocks = [tf.zeros((0, width), dtype)]
    for number in range(first // ROWS_PER_SEED, -(-last // ROWS_PER_SEED)):
        start = number * ROWS_PER_SEED
        block = _for_block(initializer, number)((min(total - start, ROWS_PER_SEED), width), dtype=dtype)
        blocks.append(tf.convert_to_tensor(block)[max(first - start, 0) : last - start])
    return tf.concat(blocks, 0)


def _for_block(initializer: Any, number: int) -> Any:
    """The initializer with a seed for this block. The first block has the initializer's own."""
    seed = getattr(initializer, "seed", None)
    if number == 0 or not isinstance(seed, int):
        return initializer
    seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return type(initializer).from_config({**initializer.get_config(), "seed": seed})


def _check_arguments(tables: Sequence[int], mode: str | None) -> None:
    if not tables or min(tables) < 1:
        raise UsageError(f"tables of {list(tables)} rows", fix="give each table one row at least")
    if mode not in (None, "sum", "mean"):
        raise UsageError(f"an embedding's mode is {mode!r}", fix="give None, 'sum' or 'mean'")
