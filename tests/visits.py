"""A task that counts in its weights how often each sample was trained. Tests copy it beside their job."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hvdtrain.train.torch import Options, Task


class VisitOptions(Options):
    """``global_batch``: of every step. ``step_s``: seconds that one takes at least. ``fails``: once a file says so."""

    samples: int = 1200
    global_batch: int = 24
    step_s: float = 0.02
    fails: bool = False


class Numbers(Dataset[int]):
    """Each sample is its own number."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index


class Weights(nn.Module):
    """A weight for each sample: at each visit it moves by the learning rate over the global batch."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(samples, dtype=torch.float64))


class Visits(Task):
    """The loss of a sample is its weight, whose gradient is 1."""

    options: VisitOptions

    def train_data(self) -> Numbers:
        return Numbers(self.options.samples)

    def eval_data(self) -> Numbers:
        return Numbers(self.options.samples)

    def model(self) -> nn.Module:
        return Weights(self.options.samples)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        time.sleep(self.options.step_s)
        if self.options.fails and Path("fail").exists():
            raise ValueError("the data is bad")
        weights: torch.Tensor = model.w[batch]
        return weights

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        visits = -model.w[batch] * self.options.global_batch / self.options.lr
        return {"visits": visits, "wrong": (visits.round() != self.options.epochs).double()}
