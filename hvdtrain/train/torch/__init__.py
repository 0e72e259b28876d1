"""PyTorch tasks: `Task` to subclass, `Options` for what its users may choose."""

from hvdtrain.train.torch.task import Options, Task

__all__ = ["Options", "Task"]
