"""What a PyTorch task says: model, optimizer, data, loss, metrics. The loop does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hvdtrain.train import options as task_options
from hvdtrain.train.options import Options

if TYPE_CHECKING:
    from hvdtrain.train.torch.backend import TorchBackend

__all__ = ["Options", "Task"]


class Task(ABC):
    """Subclass it, and name the subclass in the job spec as ``module:Class``.

    A batch is what the data gives for several samples, collated: usually a tuple of tensors whose first dimension is
    the sample. It is on the model's device.
    """

    Options: type[task_options.Options] = Options

    def __init__(self, options: task_options.Options) -> None:
        self.options: Any = options

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. All ranks start from rank 0's."""

    @abstractmethod
    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """A new optimizer for it. The loop sets the learning rate of every step."""

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """The whole training data, map-style, the same on all ranks; the loop shards it."""

    def eval_data(self) -> Dataset[Any] | None:
        """The whole evaluation data, map-style; None for no evaluation."""
        return None

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean loss over the batch's samples, a scalar."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Values of each metric, of any shape with the sample first; their mean over all values is reported."""
        return {"loss": self.loss(model, batch).reshape(1)}

    def backend(self, *, compression: str = "none") -> TorchBackend:
        """The part that knows PyTorch and Horovod."""
        from hvdtrain.train.torch.backend import TorchBackend

        return TorchBackend(self, compression=compression)
