"""A task's samples: nested arrays, or an object that gives batches by sample numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.train.sharding import Indices


class Samples:
    """Training or evaluation data as the task gave it.

    Args:
        data: see `hvdtrain.train.keras.task.Task`; None has no samples.
        source: the task's method that gave it, for messages.

    Raises:
        UsageError: it has no length, or arrays of different lengths.
    """

    def __init__(self, data: Any, source: str) -> None:
        self._data = data
        self._is_arrays = isinstance(data, (tuple, list, dict, np.ndarray, tf.Tensor))
        self._count = 0 if data is None else self._measure(source)

    def __len__(self) -> int:
        return self._count

    def batch(self, numbers: Indices) -> Any:
        """The samples as tensors, the sample first."""
        if not self._is_arrays and not len(numbers):
            # The task's own object needn't know what no samples are.
            return tf.nest.map_structure(lambda tensor: tensor[:0], self.batch(np.zeros(1, np.int64)))
        if self._is_arrays:
            return tf.nest.map_structure(lambda array: tf.convert_to_tensor(np.asarray(array)[numbers]), self._data)
        return tf.nest.map_structure(tf.convert_to_tensor, self._data[numbers])

    def batches(self, indices: Iterable[Indices], *, keep_empty: bool = False) -> Iterator[Any]:
        """A batch for each of the index arrays; None for an empty one, unless it is kept."""
        return (self.batch(numbers) if len(numbers) or keep_empty else None for numbers in indices)

    def signature(self) -> Any:
        """A batch's types and shapes, for any number of samples."""
        return tf.nest.map_structure(
            lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), self.batch(np.zeros(1, np.int64))
        )

    def _measure(self, source: str) -> int:
        if not self._is_arrays:
            if not hasattr(self._data, "__len__") or not hasattr(self._data, "__getitem__"):
                raise UsageError(
                    f"{source} gave a {type(self._data).__name__}, whose samples can't be counted and numbered",
                    fix="return arrays with the sample first, or an object with len() and [numbers]",
                )
            return len(self._data)
        lengths = [len(array) for array in tf.nest.flatten(self._data)]
        if len(set(lengths)) != 1:
            raise UsageError(
                f"{source} gave arrays with {', '.join(map(str, lengths)) or 'no'} samples",
                fix="return arrays that all have the same number of samples, as their first dimension",
            )
        return lengths[0]
