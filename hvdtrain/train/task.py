"""What every training task has, whatever its framework: options, and the methods that the backends call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hvdtrain.parallel.groups import Groups
from hvdtrain.train.backend import Backend
from hvdtrain.train.options import Options
from hvdtrain.train.settings import Settings


class Task(ABC):
    """One training job. Subclass `hvdtrain.train.torch.Task` or `hvdtrain.train.keras.Task`, not this.

    The annotation ``options: MyOptions`` in a subclass's body says which options the task takes.
    """

    options: Options
    groups: Groups
    """This rank's place on the grid of ranks; it's there when `model` is called."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def model(self) -> Any:
        """The model. Its initial weights may differ by rank: rank 0's are taken."""

    @abstractmethod
    def optimizer(self, model: Any, lr: float) -> Any:
        """An optimizer of the framework's own. The loop distributes it and sets its rate at each step."""

    @abstractmethod
    def train_data(self) -> Any:
        """All training samples, on every rank the same; the loop shares them out."""

    def eval_data(self) -> Any:
        """All samples of the evaluation; None: no evaluation."""
        return None

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Any:
        """The batch's mean loss, or one loss per sample, shape ``[samples]``."""

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        """What the evaluation reports as ``eval_<name>``: each a mean of the batch or one value per sample."""
        return {"loss": self.loss(model, batch)}

    @abstractmethod
    def backend(self, settings: Settings) -> Backend:
        """Start the framework and Horovod for this task. The base class of each framework has it."""
