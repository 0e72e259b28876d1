"""A small GPT that reads bytes, trained on the source text of Python's own standard library."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn
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
    """Predicts the next byte. Reports bits per byte: 8 is knowing nothing.

    The model takes bytes ``[samples, positions]`` as int64 and gives logits ``[samples, positions, 256]``. Processes
    of ``parallelism.tensor`` share its matrices and the vocabulary, so that each has the logits of a part of the bytes.
    Embedding and output layer have weights of their own, since a pipeline has them in different processes.
    """

    options: GPTOptions

    def layers(self) -> list[Callable[[], nn.Module]]:
        """Embedding, blocks and output layer (`hvdtrain.tasks.gpt_layers`)."""
        # Horovod is loaded when training starts, so that options can be checked where it isn't built.
        from hvdtrain.tasks.gpt_layers import Block, Embedding, Head

        options, group = self.options, self.groups.tensor
        return [
            lambda: Embedding(VOCABULARY, options.context, options.width, group),
            *[lambda: Block(options.width, options.heads, options.dropout, group)] * options.layers,
            lambda: Head(VOCABULARY, options.width, group),
        ]

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
        from hvdtrain.parallel.torch.tensor import vocabulary_parallel_cross_entropy

        (text,) = batch
        text = text.long()
        logits = model(text[:, :-1])
        return vocabulary_parallel_cross_entropy(logits, text[:, 1:], self.groups.tensor, "none").mean(1)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Bits per byte."""
        return {"bits_per_byte": self.loss(model, batch) / math.log(2)}

    def max_gradient_norm(self) -> float | None:
        """`GPTOptions.clip_norm`."""
        return self.options.clip_norm

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
