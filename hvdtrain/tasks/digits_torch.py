"""A small CNN on handwritten digits, in PyTorch."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvdtrain.tasks import digits_data
from hvdtrain.train import torch as tasks


class DigitsOptions(tasks.Options):
    """Options of `Digits`."""

    momentum: float = 0.9
    """Of SGD."""


class Digits(tasks.Task):
    """Ten classes, 1,437 training and 360 test images; SGD with momentum."""

    Options = DigitsOptions

    @cached_property
    def _data(self) -> digits_data.Digits:
        return digits_data.load()

    def model(self) -> nn.Module:
        """Two convolutions, one hidden layer."""
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
            nn.Linear(128, 10),
        )  # fmt: skip

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr, momentum=self.options.momentum)

    def train_data(self) -> TensorDataset:
        """Training images and labels."""
        return _dataset(self._data.train_images, self._data.train_labels)

    def eval_data(self) -> TensorDataset:
        """Test images and labels."""
        return _dataset(self._data.test_images, self._data.test_labels)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Accuracy and loss of each image."""
        images, labels = batch
        logits = model(images)
        return {
            "accuracy": (logits.argmax(1) == labels).float(),
            "loss": functional.cross_entropy(logits, labels, reduction="none"),
        }


def _dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels))
