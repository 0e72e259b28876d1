"""Layers whose matrices a group of ranks shares, cut as in Megatron-LM (Shoeybi et al., 2019, section 3).

Attention and the MLP begin with a matrix that is cut by columns and end with one that is cut by rows, so that each
needs one all-reduce forward and one backward. All ranks of the group must see the same samples.

Set the same seed on all ranks (``torch.manual_seed``) before the model is made: each layer draws the whole of what
`torch.nn.Linear` or `torch.nn.Embedding` would, and keeps its own part, so that the ranks together begin where one
process with that seed would. In a group of one the layers do what PyTorch's own do, and Horovod isn't called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.collectives import all_gather, all_reduce, gather, leave_, start_all_reduce
from hvdtrain.parallel.torch.cuts import Cut, bounds, mark, part_of
from hvdtrain.parallel.torch.streams import own_stream

_AXIS = "tensor"


class ColumnParallelLinear(nn.Module):  # type: ignore[misc]
    """`torch.nn.Linear` whose output features are cut: each rank computes its own from the whole input.

    Backward, the ranks' gradients of the input are summed while each computes those of its weight.

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer; where they don't divide by the ranks, the first ranks have one more.
        group: the ranks that share it.
        bias: whether there is one; it is cut too.
        blocks: parts of the output features that are cut each by itself, as query, key and value of one projection.
        gather_output: give the whole output, by one more collective.

    Attributes:
        weight: this rank's rows, ``[own out_features, in_features]``.
        bias: this rank's part, ``[own out_features]``, or None.

    Raises:
        UsageError: ``out_features`` that don't divide by the blocks, or are too few for the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        blocks: int = 1,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        if out_features % blocks:
            raise UsageError(
                f"{out_features} output features don't divide by {blocks} blocks",
                fix=f"make out_features a multiple of {blocks}",
            )
        _check_enough(out_features // blocks, "output features", group)
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.blocks, self.gather_output = blocks, gather_output
        whole = nn.Linear(in_features, out_features, bias=bias)
        self.weight = _own(whole.weight, Cut(_AXIS, 0, blocks), group)
        self.bias = _own(whole.bias, Cut(_AXIS, 0, blocks), group) if bias else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """This rank's output features, ``[..., own out_features]``; or all, with ``gather_output``.

        Args:
            inputs: ``[..., in_features]``, the same on all ranks.
        """
        output = _column_linear(inputs, self.weight, self.bias, self.group)
        if not self.gather_output or self.group.size == 1:
            return output
        return gather(output.unflatten(-1, (self.blocks, -1)), self.group).flatten(-2)

    def extra_repr(self) -> str:
        """What it is cut from."""
        return f"{self.in_features}, {self.out_features}, blocks={self.blocks}, parts={self.group.size}"


class RowParallelLinear(nn.Module):  # type: ignore[misc]
    """`torch.nn.Linear` whose input features are cut: the ranks' products are summed.

    Args:
        in_features: of the whole layer; where they don't divide by the ranks, the first ranks have one more.
        out_features: of the whole layer.
        group: the ranks that share it.
        bias: whether there is one. It is whole on each rank, and added once, to the sum.

    Attributes:
        weight: this rank's columns, ``[out_features, own in_features]``.
        bias: ``[out_features]``, the same on all ranks, or None.

    Raises:
        UsageError: fewer ``in_features`` than ranks.
    """

    def __init__(self, in_features: int, out_features: int, group: Group, *, bias: bool = True) -> None:
        super().__init__()
        _check_enough(in_features, "input features", group)
        self.in_features, self.out_features, self.group = in_features, out_features, group
        whole = nn.Linear(in_features, out_features, bias=bias)
        self.weight = _own(whole.weight, Cut(_AXIS, 1), group)
        self.bias = whole.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The whole output, ``[..., out_features]``, the same on all ranks.

        Args:
            inputs: this rank's part of the input features, ``[..., own in_features]``, as a `ColumnParallelLinear`
                gives it.
        """
        if self.group.size == 1:
            return functional.linear(inputs, self.weight, self.bias)
        output = leave_(functional.linear(inputs, self.weight), self.group)
        return output if self.bias is None else output.add_(self.bias.to(output.dtype))

    def extra_repr(self) -> str:
        """What it is cut from."""
        return f"{self.in_features}, {self.out_features}, parts={self.group.size}"


class VocabularyParallelEmbedding(nn.Module):  # type: ignore[misc]
    """`torch.nn.Embedding` whose rows are cut over ranks that see the same samples; one all-reduce forward, none back.

    Its weight may be that of a `ColumnParallelLinear` without bias, too, as in models whose output layer is tied.

    Args:
        num: number of rows of the whole table; where it doesn't divide by the ranks, the first ranks have one more.
        dim: size of a vector.
        group: the ranks that share it.

    Attributes:
        weight: this rank's rows, ``[own rows, dim]``.

    Raises:
        UsageError: fewer rows than ranks.
    """

    def __init__(self, num: int, dim: int, group: Group) -> None:
        super().__init__()
        _check_enough(num, "rows of the vocabulary", group)
        self.num, self.dim, self.group = num, dim, group
        self.weight = _own(nn.Embedding(num, dim).weight, Cut(_AXIS, 0), group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens' vectors, ``[..., dim]``, the same on all ranks.

        Args:
            tokens: numbers from 0 to ``num - 1``, ``[...]``, the same on all ranks.
        """
        if self.group.size == 1:
            return functional.embedding(tokens, self.weight)
        first, last = bounds(self.num, self.group.size, self.group.rank)
        outside = torch.zeros_like(tokens, dtype=torch.bool)
        # The first and the last rank look up what is in no part, so that PyTorch's own error says so.
        if first > 0:
            outside |= tokens < first
        if last < self.num:
            outside |= tokens >= last
        vectors = functional.embedding((tokens - first).masked_fill(outside, 0), self.weight)
        return leave_(vectors.masked_fill(outside.unsqueeze(-1), 0), self.group)

    def extra_repr(self) -> str:
        """What it is cut from."""
        return f"{self.num}, {self.dim}, parts={self.group.size}"


class ParallelAttention(nn.Module):  # type: ignore[misc]
    """Multi-head self-attention whose heads are shared out.

    Its plain twin is ``nn.Linear(width, 3 * width)`` for query, key and value, then
    `torch.nn.functional.scaled_dot_product_attention`, then ``nn.Linear(width, width)``.

    Args:
        width: of the model.
        heads: of the whole layer; must divide by the number of ranks.
        group: the ranks that share it.
        dropout: probability with which attention weights are dropped in training, by a stream of this rank's own.
            To drop some of the output, put an `torch.nn.Dropout` behind: all ranks drop alike there.
        causal: whether a position sees the ones before it and itself only.

    Attributes:
        qkv: the first projection, `ColumnParallelLinear`.
        out: the second, `RowParallelLinear`.

    Raises:
        UsageError: a width that doesn't divide by the heads, or heads that don't divide by the ranks.
    """

    def __init__(self, width: int, heads: int, group: Group, *, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(
                f"a width of {width} doesn't divide by {heads} heads", fix=f"make the width a multiple of {heads}"
            )
        if heads % group.size:
            raise UsageError(
                f"{heads} heads can't be shared out over {group.size} ranks",
                fix=f"make the heads a multiple of {group.size}, or the tensor degree a divisor of {heads}",
            )
        self.group, self.dropout, self.causal = group, dropout, causal
        self.head_width = width // heads
        self.qkv = ColumnParallelLinear(width, 3 * width, group, blocks=3)
        self.out = RowParallelLinear(width, width, group)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The attention's output, ``[batch, length, width]``, the same on all ranks.

        Args:
            inputs: ``[batch, length, width]``, the same on all ranks.
        """
        # [batch, length, 3 x own heads x head's width] -> three of [batch, own heads, length, head's width]
        query, key, value = self.qkv(inputs).unflatten(-1, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        with own_stream(self.group) if dropout else nullcontext():
            mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class ParallelMLP(nn.Module):  # type: ignore[misc]
    """Two linear layers with an activation between, whose hidden units are shared out.

    Args:
        width: of the model.
        hidden: number of hidden units.
        group: the ranks that share it.
        activation: makes the activation, which must act on each element by itself.
        dropout: probability with which hidden units are dropped in training, by a stream of this rank's own. To drop
            some of the output, put an `torch.nn.Dropout` behind: all ranks drop alike there.

    Attributes:
        up: the first layer, `ColumnParallelLinear`.
        activation: the activation.
        down: the second layer, `RowParallelLinear`.

    Raises:
        UsageError: fewer hidden units than ranks.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        group: Group,
        *,
        activation: Callable[[], nn.Module] = nn.GELU,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.group, self.dropout = group, dropout
        self.up = ColumnParallelLinear(width, hidden, group)
        self.activation = activation()
        self.down = RowParallelLinear(hidden, width, group)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The output, ``[..., width]``, the same on all ranks.

        Args:
            inputs: ``[..., width]``, the same on all ranks.
        """
        hidden = self.activation(self.up(inputs))
        if self.dropout and self.training:
            with own_stream(self.group):
                hidden = functional.dropout(hidden, self.dropout)
        result: torch.Tensor = self.down(hidden)
        return result


def vocabulary_parallel_cross_entropy(
    logits_part: torch.Tensor,
    targets: torch.Tensor,
    group: Group,
    reduction: Literal["none", "mean"] = "mean",
    *,
    ignore_index: int = -100,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits whose vocabulary is cut, as `ColumnParallelLinear` gives them.

    The logits stay where they are. Three numbers of each row are exchanged, in one collective: the largest logit, the
    sum of exponentials relative to it, and the target's logit. A vocabulary that is cut unevenly takes one more.

    Args:
        logits_part: this rank's logits, ``[..., own vocabulary]``. 16-bit ones are computed with in float32.
        targets: the right classes' numbers in the whole vocabulary, ``[...]``, the same on all ranks.
        group: the ranks that share the vocabulary.
        reduction: ``none`` for a loss of each row, ``[...]``; ``mean`` for the mean of the rows that count.
        ignore_index: a target whose row doesn't count.

    Returns:
        The loss, the same on all ranks.

    Raises:
        UsageError: another reduction, or a target that isn't in the vocabulary.
    """
    if reduction not in ("none", "mean"):
        raise UsageError(f"there is no reduction {reduction!r} here", fix="use 'none' or 'mean'")
    rows, classes = logits_part.reshape(-1, logits_part.shape[-1]), targets.reshape(-1)
    if group.size == 1:
        losses = functional.cross_entropy(rows, classes, ignore_index=ignore_index, reduction=reduction)
        return losses.view_as(targets) if reduction == "none" else losses
    losses = _CrossEntropy.apply(rows, classes, group, ignore_index)
    return losses.view_as(targets) if reduction == "none" else losses.sum() / (classes != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: Group, ignore_index: int) -> torch.Tensor:
        scores = _at_least_float32(logits)
        # Finite even where all logits of this part are minus infinity, as those of masked classes are.
        largest = scores.amax(-1).clamp(min=torch.finfo(scores.dtype).min)
        exponentials = (scores - largest.unsqueeze(-1)).exp_().sum(-1)
        width = scores.shape[-1]
        # Until the other ranks' widths are known, as if all were alike.
        here, target_scores = _targets_here(scores, targets - group.rank * width)
        own = torch.cat([torch.stack([largest, exponentials, target_scores]).flatten(), scores.new_tensor([width])])
        gathered = all_gather(own, group, 0).view(group.size, -1)
        widths = gathered[:, -1].long().tolist()
        maxima, sums, found = gathered[:, :-1].view(group.size, 3, -1).unbind(1)
        first = sum(widths[: group.rank])
        if len(set(widths)) > 1:
            here, target_scores = _targets_here(scores, targets - first)
            found = all_reduce(target_scores, group).unsqueeze(0)
        counts = targets != ignore_index
        _check_targets(targets[counts], sum(widths))

        top = maxima.amax(0)
        log_sum = top + (sums * (maxima - top).exp()).sum(0).log()
        ctx.save_for_backward(logits, log_sum, (targets - first).where(here, 0), here, counts)
        return (log_sum - found.sum(0)).where(counts, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, log_sum, column, here, counts = ctx.saved_tensors
        # softmax - 1 at the target
        result = (_at_least_float32(logits) - log_sum.unsqueeze(-1)).exp_()
        result.scatter_add_(1, column.unsqueeze(-1), -here.to(result.dtype).unsqueeze(-1))
        result *= gradients[0].where(counts, 0).unsqueeze(-1)
        return result.to(logits.dtype), None, None, None


def _targets_here(scores: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows have their target in this part, and its score; 0 for others."""
    here = (columns >= 0) & (columns < scores.shape[-1])
    found = scores.gather(1, columns.where(here, 0).unsqueeze(-1)).squeeze(-1)
    return here, found.where(here, 0)


def _check_targets(targets: torch.Tensor, classes: int) -> None:
    wrong = targets[(targets < 0) | (targets >= classes)]
    if len(wrong):
        raise UsageError(
            f"target {int(wrong[0])} isn't in a vocabulary of {classes}", fix=f"give targets from 0 to {classes - 1}"
        )


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _column_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group) -> torch.Tensor:
    if group.size == 1:
        return functional.linear(inputs, weight, bias)
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        # Here and not within: autocast is off in a backward pass, which needs all of one type.
        dtype = torch.get_autocast_dtype(kind)
        inputs, weight, bias = inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result: torch.Tensor = _ColumnLinear.apply(inputs, weight, bias, group)
    return result


class _ColumnLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.group = group
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, len(weight))
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            wait = start_all_reduce(gradient @ weight, ctx.group)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.t() @ inputs.reshape(-1, inputs.shape[-1])
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        if ctx.needs_input_grad[0]:
            of_inputs = wait().view_as(inputs)
        return of_inputs, of_weight, of_bias, None


def _own(whole: torch.Tensor, cut: Cut, group: Group) -> nn.Parameter:
    """This rank's part of a whole parameter."""
    return mark(nn.Parameter(part_of(whole.detach(), cut, group.size, group.rank)), cut)


def _check_enough(total: int, what: str, group: Group) -> None:
    if total < group.size:
        raise UsageError(
            f"{total} {what} can't be shared out over {group.size} ranks",
            fix=f"make them {group.size} at least, or the tensor degree smaller",
        )
