"""A training task in PyTorch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hvdtrain.errors import UsageError
from hvdtrain.train import task
from hvdtrain.train.backend import Backend
from hvdtrain.train.settings import Settings


class Task(task.Task):
    """Subclass it and give its place, ``module:Class``, as a job's ``task`` (docs/tasks.md has a whole one)."""

    def layers(self) -> Sequence[Callable[[], torch.nn.Module]] | None:
        """What makes each layer of the model, one after the other; None: the model isn't a sequence.

        A pipeline needs it: each stage keeps some of the layers. A layer takes what the one before gives, a tensor or
        several.
        """
        return None

    def model(self) -> torch.nn.Module:
        """The model, on the CPU; without a method of your own, a sequence of the `layers`.

        Initial weights may differ by rank: rank 0's are taken. Layers that ranks share get ``self.groups.tensor`` or
        ``self.groups.embedding``.
        """
        layers = self.layers()
        if layers is None:
            raise UsageError(f"task '{type(self).__name__}' has no model()", fix="add it to the class, or layers()")
        return torch.nn.Sequential(*(make() for make in layers))

    @abstractmethod
    def optimizer(self, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
        """A plain optimizer. The loop distributes it and sets its rate at each step; groups keep their ratio."""

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """All training samples, a map-style dataset (``len()`` and ``[i]``), on every rank the same."""

    def eval_data(self) -> Dataset[Any] | None:
        """All samples of the evaluation, likewise; None: no evaluation."""
        return None

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The batch's mean loss, or one loss per sample, shape ``[samples]``. The batch is on the model's device."""

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """What the evaluation reports as ``eval_<name>``: each a mean of the batch or one value per sample.

        Called without gradients and with the model in evaluation mode.
        """
        return {"loss": self.loss(model, batch)}

    def on_gradients(self, model: torch.nn.Module) -> None:
        """Called when the gradients are averaged over the ranks, before the optimizer's step.

        For clipping see `max_gradient_norm`, which also works where each rank has a part of the model.
        """

    def max_gradient_norm(self) -> float | None:
        """Largest 2-norm of all averaged gradients together; beyond it they're scaled down. None: no limit."""
        return None

    def batches(self, dataset: Dataset[Any], indices: Iterable[list[int]]) -> Iterable[Any]:
        """A batch for each list of sample numbers. Override it for workers, pinned memory or padding."""
        return DataLoader(dataset, batch_sampler=indices)

    def backend(self, settings: Settings) -> Backend:
        """Start PyTorch and Horovod in this process."""
        # Horovod is loaded when training starts, so that a task's options can be checked where it isn't built.
        from hvdtrain.train.torch.backend import TorchBackend

        return TorchBackend(self, settings)
