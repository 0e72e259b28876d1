"""A small GPT that reads bytes, trained on the source text of Python's own standard library."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvdtrain.errors import UsageError
from hvdtrain.train.torch import Options, Task

VOCABULARY = 256
# One file in ten is for the evaluation: whole files, so that no text is on both sides.
_EVAL_EVERY = 10
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


class GPTOptions(Options):
    """Options of `ByteGPT`."""

    bytes: Annotated[int, Field(ge=100_000)] = 1_000_000
    """How much of the library's text to take, in bytes, evaluation included."""

    context: Annotated[int, Field(ge=2)] = 128
    """Bytes that the model sees at once. One sample is a piece of text of this length."""

    layers: Annotated[int, Field(ge=1)] = 4
    """Transformer blocks."""

    heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads of a block."""

    width: Annotated[int, Field(ge=8)] = 128
    """Size of a position's vector; a multiple of `heads`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each block's output that is dropped in training."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Of AdamW, on matrices alone."""

    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the averaged gradient; null: no limit."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> GPTOptions:
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads})")
        return self


class ByteGPT(Task):
    """Predicts the next byte. Reports bits per byte: 8 is knowing nothing."""

    options: GPTOptions

    def model(self) -> nn.Module:
        """See `GPT`."""
        return GPT(self.options)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """AdamW; vectors (norms, biases) don't decay."""
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95))

    def train_data(self) -> TensorDataset:
        """Pieces of nine files in ten."""
        return self._pieces(evaluation=False)

    def eval_data(self) -> TensorDataset:
        """Pieces of every tenth file."""
        return self._pieces(evaluation=True)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        """Cross-entropy of the next byte, in nats, one value per piece."""
        (text,) = batch
        text = text.long()
        logits = model(text[:, :-1])
        return functional.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").mean(1)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Bits per byte."""
        return {"bits_per_byte": self.loss(model, batch) / math.log(2)}

    def on_gradients(self, model: nn.Module) -> None:
        """Clip."""
        if self.options.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), self.options.clip_norm)

    def _pieces(self, *, evaluation: bool) -> TensorDataset:
        """Pieces of text, uint8, shape ``[pieces, context + 1]``; each starts with the last byte of the one before."""
        text = b"".join(_library(self.options.bytes, evaluation=evaluation))
        context = self.options.context
        if len(text) <= context:
            raise UsageError(
                f"options.context: {context} is more than the {len(text)} bytes of text",
                fix="lower it or raise options.bytes",
            )
        data = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
        return TensorDataset(data.unfold(0, context + 1, context))


class GPT(nn.Module):
    """A transformer decoder with learned positions and norms before each part (Radford et al. 2019).

    Takes bytes ``[samples, positions]`` as int64, gives logits ``[samples, positions, 256]``.
    """

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.Sequential(*(Block(options) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        for parameter in (self.bytes.weight, self.positions.weight, self.head.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The logits of each position's next byte."""
        positions = self.positions.weight[: text.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.bytes(text) + positions)))
        return logits


class Block(nn.Module):
    """Causal self-attention, then a layer of four times the width; each is added to what came in."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        width = options.width
        self.heads = options.heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From ``[samples, positions, width]`` to the same."""
        hidden = hidden + self.dropout(self.attention(self.norms[0](hidden)))
        return hidden + self.dropout(self.feed(self.norms[1](hidden)))

    def attention(self, hidden: torch.Tensor) -> torch.Tensor:
        """Each position looks at itself and those before it: ``[samples, positions, width]`` to the same."""
        # Heads become a dimension of their own: [samples, heads, positions, width / heads].
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.attend(hidden).chunk(3, dim=2)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: torch.Tensor = self.project(seen.transpose(1, 2).flatten(2))
        return projected


def _library(limit: int, *, evaluation: bool) -> Iterator[bytes]:
    """Source files of the running Python's standard library in the order of their paths, ``limit`` bytes in all."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.rglob("*.py") if not _NOT_THE_LIBRARY & set(path.relative_to(folder).parts))
    for number, path in enumerate(paths):
        text = path.read_bytes()[:limit]
        limit -= len(text)
        if (number % _EVAL_EVERY == _EVAL_EVERY - 1) == evaluation:
            yield text
        if not limit:
            return
