"""A model of which each rank of a grid has a part: who has the same, and the whole of it on rank 0, for checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.errors import UsageError
from hvdtrain.keras.variables import broadcast_variables
from hvdtrain.parallel.cut import Cut, cut_of
from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.groups import Group, Groups, ProcessSets
from hvdtrain.parallel.keras.cuts import part_of, whole_of
from hvdtrain.train import random_state
from hvdtrain.train.keras.task import Task

Arrays = list[NDArray[Any]]


def state_of(model: keras.Model) -> list[Any]:
    """The variables of model and optimizer that a checkpoint has and ranks have in common; generators aren't."""
    return [*model.weights, *model.optimizer.variables]


def broadcast(variables: Iterable[Any], groups: Groups) -> None:
    """Give each rank the values of the first rank that has the same part of each variable (all ranks)."""
    variables = list(variables)
    tables = [variable for variable in variables if _axis(variable) == "embedding"]
    others = [variable for variable in variables if _axis(variable) != "embedding"]
    uncut = [variable for variable in variables if _axis(variable) != "tensor"]
    for chosen, group in ((tables, groups.data), (others, groups.replicas), (uncut, groups.tensor)):
        if chosen and group.size > 1:
            broadcast_variables(chosen, group.ranks[0], group.process_set)


def collect(variables: Iterable[Any], groups: Groups) -> Arrays:
    """The whole of each variable, on rank 0 (all ranks whose coordinate on the data axis is 0)."""
    found = []
    for variable in variables:
        part, cut = variable.numpy(), cut_of(variable)
        group = _group(cut, groups) if cut else None
        if cut and group and group.size > 1 and group.ranks[0] == 0:
            part = whole_of(_parts_to_first(part, cut, group), cut)
        found.append(part)
    return found


def hand_out(variables: Sequence[Any], wholes: Arrays, groups: Groups) -> None:
    """Give each rank its part of what rank 0 has (all ranks).

    Args:
        variables: this rank's.
        wholes: the whole of each, on rank 0; no other rank's are looked at.
        groups: this rank's place.
    """
    uncut = [variable for variable in variables if cut_of(variable) is None]
    if groups.rank == 0:
        for variable, value in zip(variables, wholes, strict=True):
            if cut_of(variable) is None:
                variable.assign(value)
    broadcast_variables(uncut)
    shapes = hvd.broadcast_object([value.shape for value in wholes], 0, name="hvdtrain.shapes")
    for number, (variable, shape) in enumerate(zip(variables, shapes, strict=True)):
        if (cut := cut_of(variable)) is None:
            continue
        # One after the other: a rank never has more than one whole variable.
        with tf.device("CPU:0"):
            whole = tf.Variable(wholes[number] if groups.rank == 0 else np.zeros(shape, variable.dtype))
        broadcast_variables([whole])
        group = _group(cut, groups)
        variable.assign(part_of(whole.numpy(), cut, group.size, group.rank))


class Whole:
    """Rank 0's second of a shared model and its optimizer: the task makes it once more, as for one process.

    It lies in the host's memory, and so has to fit there. What it writes is an ordinary file of Keras's.

    Args:
        task: whose groups are one process's meanwhile.
        make: gives the task's model, built, and its optimizer.
        parts: the variables of this rank's own (`state_of`).

    Raises:
        UsageError: Keras can't save the model, or it has other variables than the ranks' own.
    """

    def __init__(self, task: Task, make: Callable[[], tuple[keras.Model, Any]], parts: Sequence[Any]) -> None:
        groups, streams = task.groups, random_state.capture()
        task.groups = ProcessSets(Grid()).groups(0)
        try:
            with tf.device("CPU:0"):
                self._model, optimizer = make()
                self._model.compile(optimizer)
                self._model.optimizer.build(self._model.trainable_variables)
        finally:
            task.groups = groups
        _require_pairs(parts, state_of(self._model))
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._model.save(Path(folder) / "model.keras")
            except (NotImplementedError, TypeError, ValueError) as error:
                raise UsageError(
                    f"Keras can't save the model: {error}", fix="give the class that is named a get_config()"
                ) from error
        random_state.restore(streams)

    def take(self, wholes: Arrays) -> Callable[[Path], None]:
        """Take these values; what is returned writes them to a file."""
        for variable, value in zip(state_of(self._model), wholes, strict=True):
            variable.assign(value)
        return self._model.save

    def read(self, path: Path) -> Arrays:
        """The values of a file, whichever grid has written it.

        Raises:
            ValueError: it is of another model.
        """
        self._model.load_weights(path)
        return [variable.numpy() for variable in state_of(self._model)]


def _axis(variable: Any) -> str | None:
    cut = cut_of(variable)
    return cut.axis if cut else None


def _group(cut: Cut, groups: Groups) -> Group:
    found: Group = getattr(groups, cut.axis)
    return found


def _parts_to_first(part: NDArray[Any], cut: Cut, group: Group) -> Arrays:
    """All ranks' parts on the first of a group, and nothing of them on the others: an alltoall of the cut dimension."""
    # Nothing is reckoned with, and Horovod doesn't know bfloat16.
    words = part.view(np.int16) if part.dtype.name == "bfloat16" else part
    rows = np.ascontiguousarray(np.moveaxis(words, cut.dim, 0))
    splits = [len(rows)] + [0] * (group.size - 1)
    received, sizes = hvd.alltoall(rows, splits, name="hvdtrain.parts", process_set=group.process_set)
    if group.rank:
        return [part]
    parts = np.split(received.numpy(), np.cumsum(sizes.numpy())[:-1])
    return [np.ascontiguousarray(np.moveaxis(one, 0, cut.dim)).view(part.dtype) for one in parts]


def _require_pairs(parts: Sequence[Any], wholes: Sequence[Any]) -> None:
    """Each variable must be there whole: with the same dimensions but for the one that is cut."""
    if len(parts) != len(wholes):
        raise UsageError(
            f"model and optimizer have {len(parts)} variables on the grid, and {len(wholes)} for one process",
            fix="let model() and optimizer() make the same layers whatever self.groups is; the layers of "
            "hvdtrain.parallel.keras cut themselves",
        )
    for part, whole in zip(parts, wholes, strict=True):
        cut = cut_of(part)
        same = [size for dim, size in enumerate(part.shape) if cut is None or dim != cut.dim]
        if same != [size for dim, size in enumerate(whole.shape) if cut is None or dim != cut.dim]:
            raise UsageError(
                f"{part.path} has shape {list(part.shape)} on the grid and {list(whole.shape)} for one process, and "
                "doesn't say how it is cut",
                fix="use the layers of hvdtrain.parallel.keras, or mark what you cut (hvdtrain.parallel.cut.mark)",
            )
