"""Training tasks in PyTorch: ``from hvdtrain.train.torch import Options, Task``."""

from hvdtrain.train.options import Options
from hvdtrain.train.torch.task import Task

__all__ = ["Options", "Task"]
