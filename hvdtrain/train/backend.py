"""What the loop asks of a framework. `train/torch/backend.py` and `train/keras/backend.py` answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol


class Backend(Protocol):
    """One rank's model, optimizer and data, and its collectives.

    Attributes:
        rank: number of this worker in the job.
        size: number of workers.
        train_samples: size of the training data, the same on all ranks.
        eval_samples: size of the evaluation data, the same on all ranks; 0 if there is none.
    """

    rank: int
    size: int
    train_samples: int
    eval_samples: int

    def build(self, seed: int, lr: float) -> None:
        """Load the data, build model and optimizer, and give all ranks rank 0's initial state."""

    def batches(self, indices: Sequence[Sequence[int]]) -> Iterator[Any]:
        """One batch of the training data per list of sample numbers; None for an empty list."""

    def step(self, batch: Any, weight: float) -> Any:
        """One optimizer step on the average over ranks of ``weight`` times the gradient of the batch's mean loss.

        Every rank calls it for every step: with None, and weight 0, when it has no samples.

        Returns:
            The batch's mean loss: a float or the framework's scalar.
        """

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next steps."""

    def evaluate(self, indices: Sequence[Sequence[int]]) -> dict[str, tuple[float, int]]:
        """Sum and count of each metric over these batches of the evaluation data, this rank's only."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in the order of ranks, on every rank. Picklable and small."""

    def save(self, folder: Path) -> None:
        """Write model and optimizer into an existing folder."""

    def describe(self) -> str:
        """Framework, parameters and threads, for the line at the start."""

    def finish(self) -> None:
        """Wait for all ranks, then leave Horovod: a rank that leaves early fails the others."""
