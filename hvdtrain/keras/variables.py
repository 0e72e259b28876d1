"""Broadcast of variables: every rank starts from the same model and optimizer state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError

# Variables travel packed, at most so many bytes at a time: few collectives, and never a second copy of a large model.
PACKET_BYTES = 64 * 2**20

Layout = list[tuple[str, tuple[int, ...], str]]


def broadcast_model(
    model: keras.Model, root_rank: int = 0, process_set: hvd.ProcessSet = hvd.global_process_set
) -> None:
    """Gives every rank the root rank's weights and optimizer state.

    Weights include BatchNormalization's moving statistics; the optimizer's state includes moments, its iteration and
    learning rate. Not sent: metrics, and the state of seed generators, because dropout masks are to differ by rank.

    Args:
        model: built; its optimizer is built if it isn't yet. The same on every rank.
        root_rank: rank to copy from.
        process_set: ranks that take part.

    Raises:
        UsageError: the model isn't built, or differs between ranks.
    """
    if not model.built:
        raise UsageError(
            f"the model {model.name!r} has no variables yet to broadcast",
            fix="give it an Input, call build() or call it on a batch first",
        )
    variables = list(model.weights)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables += optimizer.variables
    broadcast_variables(variables, root_rank, process_set)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: hvd.ProcessSet = hvd.global_process_set
) -> None:
    """Gives every rank the root rank's values, bit for bit.

    Args:
        variables: `keras.Variable` or `tf.Variable`, of any dtype but string; the same ones in the same order on every
            rank of the set. An optimizer's are `optimizer.variables`.
        root_rank: rank to copy from.
        process_set: ranks that take part.

    Raises:
        UsageError: inside `tf.function`, variables of strings, or variables that differ between ranks.
    """
    if not tf.executing_eagerly():
        raise UsageError("variables can't be broadcast inside tf.function", fix="broadcast them before the first step")
    targets = list(variables)
    arrays = [np.array(variable.numpy()) for variable in targets]
    layout = [
        (str(getattr(variable, "path", variable.name)), array.shape, array.dtype.name)
        for variable, array in zip(targets, arrays, strict=True)
    ]
    _require_same_layout(layout, root_rank, process_set)
    for packet in _packets(arrays):
        packed = np.concatenate(packet)
        received = hvd.broadcast(packed, root_rank, name="hvdtrain.broadcast", process_set=process_set).numpy()
        ends = np.cumsum([len(piece) for piece in packet])
        for piece, values in zip(packet, np.split(received, ends[:-1]), strict=True):
            piece[:] = values
    if hvd.rank() != root_rank:
        for variable, array in zip(targets, arrays, strict=True):
            variable.assign(array)


def _packets(arrays: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Views of the arrays' bytes, in lists of at most `PACKET_BYTES`."""
    packet: list[np.ndarray] = []
    free = PACKET_BYTES
    for array in arrays:
        rest = array.reshape(-1).view(np.uint8)
        while len(rest):
            packet.append(rest[:free])
            rest, free = rest[free:], free - len(packet[-1])
            if not free:
                yield packet
                packet, free = [], PACKET_BYTES
    if packet:
        yield packet


def _require_same_layout(layout: Layout, root_rank: int, process_set: hvd.ProcessSet) -> None:
    """Every rank raises if one has other shapes or dtypes: none is left waiting for the others.

    Names don't count. They are numbered in the order in which a process makes its layers.
    """
    digest = hashlib.sha256(repr([entry[1:] for entry in layout]).encode()).digest()
    digests = hvd.allgather(
        np.frombuffer(digest, np.uint8)[None], name="hvdtrain.broadcast.layout", process_set=process_set
    ).numpy()
    if not (digests == digests[0]).all():
        ranks = process_set.ranks or range(hvd.size())
        layouts = dict(zip(ranks, hvd.allgather_object(layout, process_set=process_set), strict=True))
        raise UsageError(_difference(layouts, root_rank), fix="build the same model and optimizer on every rank")
    strings = [name for name, _, dtype in layout if dtype.startswith(("object", "bytes", "str"))]
    if strings:
        raise UsageError(
            f"variables of strings can't be broadcast: {', '.join(strings)}",
            fix="make them equal on every rank, for example by building them from the same file",
        )


def _difference(layouts: dict[int, Layout], root_rank: int) -> str:
    root = layouts[root_rank]
    for rank, layout in layouts.items():
        for mine, theirs in zip(root, layout, strict=False):
            if mine[1:] != theirs[1:]:
                return (
                    f"variables differ between ranks: {mine[0]} is {mine[2]}{list(mine[1])} on rank {root_rank}, "
                    f"and {theirs[0]} is {theirs[2]}{list(theirs[1])} on rank {rank}"
                )
        if len(layout) != len(root):
            return f"rank {root_rank} has {len(root)} variables to broadcast, and rank {rank} has {len(layout)}"
    return "variables differ between ranks"
