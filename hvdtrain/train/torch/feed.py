"""From a task's dataset and the numbers of samples to batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hvdtrain.errors import UsageError
from hvdtrain.train.sharding import Indices
from hvdtrain.train.torch.task import Task

# A step's work on one rank: each part of its batch, and how many samples that has.
Parts = list[tuple[Any, int]]


class Feed:
    """Loads batches, each in so many parts.

    Args:
        task: whose `batches` loads them.
        device: where they go.
        passes: parts of a batch; fewer where it has fewer samples.
        keep_empty: whether parts without samples are loaded too, because all ranks must make the same passes.
    """

    def __init__(self, task: Task, device: torch.device, *, passes: int, keep_empty: bool) -> None:
        self._task = task
        self._device = device
        self._passes = passes
        self._keep_empty = keep_empty

    def batches(self, dataset: Any, indices: Iterable[Indices]) -> Iterator[Parts]:
        """The parts of each step's batch; none where it has no samples."""
        steps = [self._cut(array) for array in indices]
        arrays = [array for step in steps for array in step]
        # Made here and not with the first batch: PyTorch's DataLoader draws a random number for it.
        loaded = iter(self._load(dataset, [array for array in arrays if len(array)]))
        return ([(self._next(dataset, loaded, array), len(array)) for array in step] for step in steps)

    def _cut(self, array: Indices) -> list[Indices]:
        if self._passes == 1:
            return [array] if len(array) or self._keep_empty else []
        return [part for part in np.array_split(array, self._passes) if len(part) or self._keep_empty]

    def _load(self, dataset: Any, filled: list[Indices]) -> Iterable[Any]:
        if type(dataset) is TensorDataset and type(self._task).batches is Task.batches:
            # Tensors in memory can be indexed as a whole; sample by sample a batch of 64 takes a hundred times longer.
            return (dataset[torch.from_numpy(array)] for array in filled)
        return self._task.batches(dataset, [array.tolist() for array in filled])

    def _next(self, dataset: Any, loaded: Iterator[Any], array: Indices) -> Any:
        if len(array):
            batch = next(loaded)
        else:
            one = next(iter(self._task.batches(dataset, [[0]])))
            batch = _map(lambda tensor: tensor[:0], one)
        return batch if self._device.type == "cpu" else _map(self._move, batch)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)


def length(dataset: Any, source: str) -> int:
    """Number of samples.

    Raises:
        UsageError: the dataset can't tell.
    """
    try:
        return len(dataset)
    except TypeError as error:
        raise UsageError(
            f"{source} gave a {type(dataset).__name__}, which has no length",
            fix="return a map-style dataset: one with len() and [i], so that its samples can be shared out",
        ) from error


def per_sample_or_mean(value: Any, samples: int, source: str) -> torch.Tensor:
    """The value as it is, when it is a scalar or has one number per sample.

    Raises:
        UsageError: it has another shape.
    """
    tensor = torch.as_tensor(value)
    if tensor.ndim and tensor.shape != (samples,):
        raise UsageError(
            f"the task's {source} has shape {list(tensor.shape)}",
            fix=f"return the mean of the batch (a scalar) or one value per sample (here [{samples}])",
        )
    return tensor


def mean_loss(value: Any, samples: int) -> torch.Tensor:
    """The mean of what a task's ``loss()`` gave."""
    loss = per_sample_or_mean(value, samples, "loss()")
    return loss.mean() if loss.ndim else loss


def _map(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The batch with its tensors changed: in any nesting of tuples, lists and mappings."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _map(change, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(change, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(change, value) for value in batch)
    return batch
