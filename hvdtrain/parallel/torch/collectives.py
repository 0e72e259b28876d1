"""Horovod's collectives as steps of PyTorch's autograd: each has the backward pass that the maths asks for.

Horovod's own differentiable functions average or sum in their backward pass as data parallelism wants it. Here all
ranks of a group compute one loss together, as Megatron-LM's layers do (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.parallel.cut import bounds
from hvdtrain.parallel.groups import Group


def all_reduce(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group, not differentiable. In a group of one it is the tensor itself.

    bfloat16, which Horovod doesn't take, is summed in float32.
    """
    if group.size == 1:
        return tensor
    return start_all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format), group)()


def start_all_reduce(tensor: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Begin to sum a contiguous tensor over the group, in place; not differentiable.

    What it returns waits for the sum and returns the tensor. Until then the tensor is Horovod's, and the group must
    begin no other sum of this type and shape.
    """
    if group.size == 1:
        return lambda: tensor
    summed = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    name = name_of("sum", tensor, group)
    handle = hvd.allreduce_async_(summed.detach(), op=hvd.Sum, name=name, process_set=group.process_set)

    def wait() -> torch.Tensor:
        hvd.synchronize(handle)
        return tensor if summed is tensor else tensor.copy_(summed)

    return wait


def all_gather(tensor: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """The group's tensors one after the other along a dimension, in the order of its ranks, not differentiable.

    In that dimension their sizes may differ.
    """
    if group.size == 1:
        return tensor
    moved = tensor.detach().movedim(dim, 0).contiguous()
    # Without the size that may differ, for all ranks need the same name.
    name = name_of("gather", moved[:0], group)
    gathered = hvd.synchronize(hvd.allgather_async(carried(moved), name=name, process_set=group.process_set))
    result: torch.Tensor = gathered.view(moved.dtype).movedim(0, dim)
    return result


def own_part(tensor: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """This rank's part of a dimension that is cut over the group (see `hvdtrain.parallel.cut.bounds`)."""
    first, last = bounds(tensor.shape[dim], group.size, group.rank)
    return tensor.narrow(dim, first, last - first)


def enter(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensor as it is, before layers that the group shares; backward, the gradients of all its ranks are summed."""
    result: torch.Tensor = _Enter.apply(tensor, group) if group.size > 1 else tensor
    return result


def leave(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group, behind layers that it shares; backward, the gradient goes on as it is."""
    result: torch.Tensor = _Leave.apply(tensor, group) if group.size > 1 else tensor
    return result


def leave_(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """`leave`, in place: for a tensor that nothing else reads, as the result of a matrix product."""
    result: torch.Tensor = _LeaveInPlace.apply(tensor.contiguous(), group) if group.size > 1 else tensor
    return result


def gather(tensor: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """The group's parts (as `own_part` cuts) put together; backward, each rank keeps its part of the gradient."""
    result: torch.Tensor = _Gather.apply(tensor, group, dim) if group.size > 1 else tensor
    return result


def scatter(tensor: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """This rank's part of a tensor that all have; backward, the parts of the gradient are put together."""
    result: torch.Tensor = _Scatter.apply(tensor, group, dim) if group.size > 1 else tensor
    return result


class _Enter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _LeaveInPlace(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return start_all_reduce(tensor, group)()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_part(gradients[0], ctx.group, ctx.dim).contiguous(), None, None


class _Scatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return own_part(tensor, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(gradients[0], ctx.group, ctx.dim), None, None


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor for a collective that moves it and doesn't reckon: the same memory, seen as a type that Horovod takes.

    It refuses bfloat16. float16 is the one type of that width which NCCL, MPI and Gloo all move.
    """
    return tensor.view(torch.float16) if tensor.dtype == torch.bfloat16 else tensor


def name_of(kind: str, tensor: torch.Tensor, group: Group) -> str:
    """A collective's name, by which Horovod pairs the ranks' calls.

    The calls of a group wait for each other, in the same order on all its ranks, so that one name serves again and
    again; Horovod then agrees on it by its cache, in a fraction of the time that a new name takes.
    """
    return f"hvdtrain.{group.name}.{kind}.{tensor.dtype}.{'x'.join(map(str, tensor.shape))}"
