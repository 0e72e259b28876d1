"""The layers of a small GPT: a transformer decoder with norms before each part (Radford et al. 2019).

Apart from the task, because they need Horovod, and a task's options can be checked where it isn't built.
"""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.cuts import cut_of, part_of
from hvdtrain.parallel.torch.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    VocabularyParallelEmbedding,
)

# Standard deviation of the initial weights at both ends of the model.
_STD = 0.02


class Embedding(nn.Module):
    """From bytes ``[samples, positions]``, int64, to ``[samples, positions, width]``: vectors of byte and place.

    Args:
        vocabulary: number of different bytes.
        context: largest number of positions.
        width: of the model.
        group: ranks that share the bytes' vectors.
    """

    def __init__(self, vocabulary: int, context: int, width: int, group: Group) -> None:
        super().__init__()
        self.bytes = VocabularyParallelEmbedding(vocabulary, width, group)
        self.positions = nn.Parameter(torch.empty(context, width))
        _draw(self.bytes.weight, (vocabulary, width), group)
        _draw(self.positions, (context, width), group)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The sum of both vectors of each position."""
        vectors: torch.Tensor = self.bytes(text) + self.positions[: text.shape[1]]
        return vectors


class Block(nn.Module):
    """Causal self-attention, then a layer of four times the width; each is added to what came in.

    Args:
        width: of the model.
        heads: of the attention.
        dropout: share of both parts' output that is dropped in training.
        group: ranks that share heads and hidden units.
    """

    def __init__(self, width: int, heads: int, dropout: float, group: Group) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = ParallelAttention(width, heads, group)
        self.feed = ParallelMLP(width, 4 * width, group)
        # What it drops all ranks of the group have, and so they drop alike, by the random numbers that they share.
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From ``[samples, positions, width]`` to the same."""
        hidden = hidden + self.dropout(self.attention(self.norms[0](hidden)))
        result: torch.Tensor = hidden + self.dropout(self.feed(self.norms[1](hidden)))
        return result


class Head(nn.Module):
    """From ``[samples, positions, width]`` to the logits of each position's next byte, ``[..., own vocabulary]``.

    Args:
        vocabulary: number of different bytes; each rank gives the logits of its part of them.
        width: of the model.
        group: ranks that share the vocabulary.
    """

    def __init__(self, vocabulary: int, width: int, group: Group) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = ColumnParallelLinear(width, vocabulary, group, bias=False)
        _draw(self.logits.weight, (vocabulary, width), group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's logits."""
        logits: torch.Tensor = self.logits(self.norm(hidden))
        return logits


def _draw(parameter: nn.Parameter, shape: tuple[int, ...], group: Group) -> None:
    """Initial weights, as one process draws them: the whole of a parameter, of which a rank keeps its part."""
    whole = torch.empty(shape).normal_(std=_STD)
    cut = cut_of(parameter)
    with torch.no_grad():
        parameter.copy_(whole if cut is None else part_of(whole, cut, group.size, group.rank))
