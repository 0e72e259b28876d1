"""The tasks of tests/test_parallel_layouts.py, which the layouts of the ranks train: 20 steps of 8 samples each."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvdtrain.tasks.gpt import ByteGPT
from hvdtrain.train.torch import Options, Task

# The last step has less than all others, and not as much on each rank.
SAMPLES = 157


class LayoutOptions(Options):
    """Options of `Layered`."""

    clip: float | None = None
    """Largest norm of the gradient."""


class Layered(Task):
    """A small classifier as a sequence of layers."""

    options: LayoutOptions

    def layers(self) -> list[Callable[[], nn.Module]]:
        sizes = [12, 16, 16, 16, 3]
        dense = [lambda i=i, o=o: nn.Linear(i, o) for i, o in pairwise(sizes)]
        return [part for layer in dense for part in (layer, nn.Tanh)][:-1]

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": lr / 2}], lr)

    def train_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(3, (SAMPLES,), generator=generator)
        return TensorDataset(torch.randn(SAMPLES, 12, generator=generator), labels)

    def eval_data(self) -> TensorDataset:
        return self.train_data()

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, labels = batch
        return functional.cross_entropy(model(values), labels)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, batch)}

    def max_gradient_norm(self) -> float | None:
        return self.options.clip


class Bytes(ByteGPT):
    """The built-in GPT on a little text."""

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Whose epsilon is above the rounding of gradients that are 0 but for it, as those of the keys' biases are."""
        optimizer = super().optimizer(model, lr)
        for group in optimizer.param_groups:
            group["eps"] = 1e-4
        return optimizer

    def train_data(self) -> TensorDataset:
        return TensorDataset(super().train_data().tensors[0][:SAMPLES])

    def eval_data(self) -> TensorDataset:
        return self.train_data()

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, batch)}


class Interrupted(Bytes):
    """In bfloat16 where autocast has it. The first attempt loses its last rank in its tenth step, of two parts."""

    passes = 0

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        self.passes += model.training
        if self.passes == 20 and os.environ["HVDTRAIN_ATTEMPT"] == "0" and self.groups.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(model, batch)


class Tables(Task):
    """Two embedding tables, which ranks share, and a dense layer."""

    options: Options

    def model(self) -> nn.Module:
        from hvdtrain.parallel.torch.embedding import ParallelEmbedding

        return nn.Sequential(ParallelEmbedding([23, 7], 4, self.groups.embedding), nn.Flatten(), nn.Linear(8, 1))

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr)

    def train_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(rows, (SAMPLES,), generator=generator) for rows in (23, 7)]
        return TensorDataset(torch.stack(ids, 1), torch.randn(SAMPLES, generator=generator))

    def eval_data(self) -> TensorDataset:
        return self.train_data()

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, wanted = batch
        return functional.mse_loss(model(ids).squeeze(1), wanted, reduction="none")

    def max_gradient_norm(self) -> float | None:
        return 0.5
