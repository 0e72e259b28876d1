"""A small CNN on handwritten digits, in PyTorch."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvdtrain.tasks import digits_data
from hvdtrain.train.torch import Options, Task

Batch = tuple[torch.Tensor, torch.Tensor]


class DigitsOptions(Options):
    """Options of `Digits`."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of stochastic gradient descent."""

    dropout: Annotated[float, Field(ge=0, lt=0.5)] = 0.25
    """Share of the convolutions' outputs that is dropped in training; twice that of the dense layer's."""


class Digits(Task):
    """Ten classes, 1,437 training and 360 test images, stochastic gradient descent with momentum."""

    options: DigitsOptions

    def model(self) -> nn.Module:
        """Two convolutions and two dense layers, 153,000 parameters."""
        dropout = self.options.dropout
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(2 * dropout),
            nn.Linear(128, digits_data.CLASSES),
        )  # fmt: skip

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Nesterov's momentum."""
        return torch.optim.SGD(
            model.parameters(), lr, momentum=self.options.momentum, nesterov=self.options.momentum > 0
        )

    def train_data(self) -> TensorDataset:
        """Images ``[1437, 1, 8, 8]`` and labels."""
        images, labels, _, _ = digits_data.load()
        return _dataset(images, labels)

    def eval_data(self) -> TensorDataset:
        """Images ``[360, 1, 8, 8]`` and labels."""
        _, _, images, labels = digits_data.load()
        return _dataset(images, labels)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross-entropy."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Accuracy and cross-entropy."""
        images, labels = batch
        logits = model(images)
        return {"accuracy": logits.argmax(1) == labels, "loss": functional.cross_entropy(logits, labels)}


def _dataset(images: NDArray[np.float32], labels: NDArray[np.int64]) -> TensorDataset:
    """PyTorch wants the channels first."""
    return TensorDataset(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels))
