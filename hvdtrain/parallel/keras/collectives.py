"""Horovod's collectives as steps of TensorFlow's autograd: each has the backward pass that the maths asks for.

Horovod's own differentiable functions average or sum in their backward pass as data parallelism wants it. Here all
ranks of a group compute one loss together, as Megatron-LM's layers do (Shoeybi et al., 2019, section 3).

TensorFlow runs whatever is ready, in any order and at the same time, and Horovod pairs the ranks' calls by name: so
every call has a ``name``, of its user's own and the same on all ranks of the group. In a graph, TensorFlow numbers
the calls that have the same name, in the order in which the graph is made.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.parallel.groups import Group


def all_reduce(tensor: Any, group: Group, name: str, op: Any = hvd.Sum) -> tf.Tensor:
    """The sum (or ``op=hvd.Max``) over the group, not differentiable. In a group of one it is the tensor itself."""
    tensor = tf.convert_to_tensor(tensor)
    if group.size == 1:
        return tensor
    return _exchange(tensor, functools.partial(hvd.allreduce, op=op), group, name)


def all_gather(tensor: Any, group: Group, name: str, dim: int = -1) -> tf.Tensor:
    """The group's tensors one after the other along a dimension, in the order of its ranks, not differentiable."""
    tensor = tf.convert_to_tensor(tensor)
    if group.size == 1:
        return tensor
    to_front = _swap(tensor.shape.rank, dim)
    gathered = _exchange(tf.transpose(tensor, to_front), hvd.allgather, group, name)
    result = tf.transpose(gathered, to_front)
    static = tensor.shape.as_list()
    static[dim] = None  # The ranks' parts may differ in size.
    return tf.ensure_shape(result, static)


def own_part(tensor: tf.Tensor, group: Group, dim: int = -1) -> tf.Tensor:
    """This rank's part of a dimension that is cut evenly over the group."""
    return tf.split(tensor, group.size, dim)[group.rank]


def enter(tensor: Any, group: Group, name: str) -> tf.Tensor:
    """The tensor as it is, before layers that the group shares; backward, the gradients of all its ranks are summed."""
    return _step(tensor, group, tf.identity, lambda gradient: all_reduce(gradient, group, f"{name}_enter"))


def leave(tensor: Any, group: Group, name: str) -> tf.Tensor:
    """The sum over the group, behind layers that it shares; backward, the gradient goes on as it is."""
    return _step(tensor, group, lambda part: all_reduce(part, group, f"{name}_leave"), tf.identity)


def gather(tensor: Any, group: Group, name: str, dim: int = -1) -> tf.Tensor:
    """The group's parts, of equal size, put together; backward, each rank keeps its own part of the gradient."""

    def put_together(part: tf.Tensor) -> tf.Tensor:
        static = part.shape.as_list()
        if static[dim] is not None:
            static[dim] *= group.size
        return tf.ensure_shape(all_gather(part, group, f"{name}_gather", dim), static)

    return _step(tensor, group, put_together, lambda gradient: own_part(gradient, group, dim))


def scatter(tensor: Any, group: Group, name: str, dim: int = -1) -> tf.Tensor:
    """This rank's part of a tensor that all have; backward, the parts of the gradient are put together."""
    return _step(
        tensor,
        group,
        lambda whole: own_part(whole, group, dim),
        lambda gradient: all_gather(gradient, group, f"{name}_scatter", dim),
    )


def never_constant(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, which TensorFlow can't know before it runs.

    Horovod 0.28.1 doesn't tell TensorFlow that its operations have an effect on others. If all inputs are constants, as
    the zeros of a rank without samples are, TensorFlow runs the collective once, when it optimises the graph, and keeps
    the result; the other ranks then wait for ever. The time is never negative, but that is for the run to find out.
    """
    return tensor + tf.cast(tf.minimum(tf.timestamp(), 0.0), tensor.dtype)


def _step(
    tensor: Any, group: Group, forward: Callable[[tf.Tensor], tf.Tensor], backward: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    if group.size == 1:
        return tf.convert_to_tensor(tensor)

    def run(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return forward(value), lambda gradient: backward(tf.convert_to_tensor(gradient))

    return tf.custom_gradient(run)(tf.convert_to_tensor(tensor))


def _exchange(tensor: tf.Tensor, collective: Callable[..., tf.Tensor], group: Group, name: str) -> tf.Tensor:
    # Horovod 0.28.1 has no bfloat16.
    wire = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
    if not tf.executing_eagerly():
        wire = never_constant(wire)
    # A scope that is the same from wherever it is entered: TensorFlow then tells all calls of one name apart, and
    # Horovod, which is told to leave scopes out, sees what it made of them.
    with tf.name_scope("hvdtrain/"):
        result = collective(wire, name=_name(group, name), ignore_name_scope=True, process_set=group.process_set)
    return tf.cast(result, tensor.dtype)


def _name(group: Group, name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", f"hvdtrain_{group.name}_{name}")


def _swap(rank: int, dim: int) -> list[int]:
    """The permutation that swaps a dimension with the first; it undoes itself."""
    order = list(range(rank))
    order[0], order[dim] = order[dim], order[0]
    return order
