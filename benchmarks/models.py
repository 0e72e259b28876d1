"""Models of the step benchmark, and the data that they train on."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 64
STEPS = 100
WINDOW = 20


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    """8.4 million parameters: communication weighs as much as computation. And the shape of a sample."""
    return (
        nn.Sequential(
            nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(),
            nn.Linear(1024, 10),
        ),
        (1024,),
    )  # fmt: skip


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    """A small convolutional network on images of 28 x 28: short steps, in which a fixed cost weighs most."""
    return (
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10),
        ),
        (1, 28, 28),
    )  # fmt: skip


MODELS = {"mlp": mlp, "cnn": cnn}


def dataset(shape: tuple[int, ...], size: int) -> TensorDataset:
    """Noise for `STEPS` steps of ``size`` workers: only the time matters."""
    samples = BATCH_SIZE * size * STEPS
    images = torch.randn(1024, *shape, generator=torch.Generator().manual_seed(0))
    repeats = samples // 1024 + 1
    return TensorDataset(images.repeat(repeats, *[1] * len(shape))[:samples], torch.arange(samples) % 10)
