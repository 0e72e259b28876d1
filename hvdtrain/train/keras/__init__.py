"""Training tasks in Keras 3: ``from hvdtrain.train.keras import Options, Task``."""

from hvdtrain.train.keras.task import Task
from hvdtrain.train.options import Options

__all__ = ["Options", "Task"]
