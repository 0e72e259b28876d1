"""Plain PyTorch models, and one that can be shared by ranks, for the tests of tensor parallelism."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv(x).split(width, -1)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, dropout_p=self.dropout
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def mlp(width: int, hidden: int, dropout: float = 0.0) -> nn.Module:
    layers = [("up", nn.Linear(width, hidden)), ("activation", nn.GELU())]
    layers += [("dropout", nn.Dropout(dropout))] if dropout else []
    return nn.Sequential(OrderedDict([*layers, ("down", nn.Linear(hidden, width))]))


class Model(nn.Module):
    """A language model of one block, whole or shared."""

    def __init__(self, group: Group | None, words: int = 11, width: int = 8) -> None:
        super().__init__()
        self.group = group
        if group is None:
            self.words, self.attention, self.mlp = nn.Embedding(words, width), Attention(width, 4), mlp(width, 10)
            self.head = nn.Linear(width, words, bias=False)
        else:
            self.words = VocabularyParallelEmbedding(words, width, group)
            self.attention, self.mlp = ParallelAttention(width, 4, group), ParallelMLP(width, 10, group)
            self.head = ColumnParallelLinear(width, words, group, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head.weight = self.words.weight

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens[:, :-1])
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(self.norm(x))
        logits, targets = self.head(x), tokens[:, 1:]
        if self.group is None:
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return vocabulary_parallel_cross_entropy(logits, targets, self.group)
