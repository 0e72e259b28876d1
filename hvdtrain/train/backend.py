"""What the training loop asks of a framework: one object per rank, which holds data, model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, TypeVar

from hvdtrain.heartbeat import Heartbeat
from hvdtrain.parallel.groups import Groups
from hvdtrain.train.sharding import Indices

T = TypeVar("T")


class Backend(Protocol):
    """A framework on Horovod. Making one starts Horovod (``hvd.init``).

    Every rank calls the methods marked "all ranks" in the same order, or the job hangs.
    """

    rank: int
    size: int
    hosts: int
    heartbeat: Heartbeat
    elastic: bool
    """Whether ranks may come and go."""
    groups: Groups
    """This rank's place on the grid of ranks, and the groups that it meets."""
    train_samples: int
    eval_samples: int
    """Samples for the evaluation; 0 where the task has none. Both numbers are known after `build`."""

    @property
    def replicas(self) -> int:
        """Into how many parts the samples of a step are shared out."""

    @property
    def replica(self) -> int:
        """Which of those parts is this rank's."""

    @property
    def stream(self) -> int:
        """Number of this rank's random stream: ranks with the same number draw the same."""

    @property
    def parts(self) -> Sequence[int]:
        """Ranks that write a part of each checkpoint, rank 0 among them; empty: rank 0 writes the whole."""

    def describe(self) -> str:
        """Framework, version, device and threads, for a line of the log."""

    @property
    def resize_wanted(self) -> bool:
        """Whether this rank knows that ranks want to come, or have to go."""

    def is_lost_rank(self, error: Exception) -> bool:
        """Whether an error says that another rank of an elastic job has left."""

    def rejoin(self) -> None:
        """Come together with the ranks that are there now (all ranks): rank and size may have changed."""

    def remember(self) -> None:
        """Copy model and optimizer into the host's memory, in place of the former copy."""

    def recall(self) -> None:
        """Make model and optimizer what they were at `remember`."""

    def seed(self, seed: int) -> None:
        """Seed the framework's random numbers, and those of Python and numpy; ``seed`` is in 0 to 2**32 - 1."""

    def build(self, lr: float) -> None:
        """Make data, model and optimizer from the task; ``lr`` is the rate that the optimizer is made with.

        Raises:
            UsageError: the task's data can't be used.
        """

    def broadcast_state(self) -> None:
        """Give all ranks the model and the optimizer of rank 0, or of the first that has the same part (all ranks)."""

    def train_batches(self, indices: Iterable[Indices]) -> Iterator[Any]:
        """A batch for each of the index arrays, on this rank's device; None for an empty one.

        Each is loaded when it is asked for. What draws random numbers once for all of them does so in the call.
        """

    def train_step(self, batch: Any, samples: int, weight: float, lr: float) -> SupportsFloat:
        """One optimizer step on gradients averaged over the replicas (all ranks, also one whose batch is None).

        Under `Settings.adasum` they are combined by Adasum in place of the average.

        Args:
            batch: from `train_batches`.
            samples: its number of samples.
            weight: factor of this rank's mean loss before gradients are put together (see `sharding.Share`).
            lr: rate of this step. Where the optimizer has several rates they keep their ratio.

        Returns:
            The mean loss of this rank's samples, unweighted; 0 without samples, and where another rank of the same
            replica tells it. It is read when a line is logged and not before, so that an accelerator needn't wait at
            every step.
        """

    def cut_axes(self) -> set[str]:
        """Axes of the grid over which parameters of this rank's model are cut; known after `build`."""

    def findings(self) -> list[str]:
        """What has been found out about this training since the last call: a line each for people."""

    def evaluate(self, indices: Iterable[Indices]) -> dict[str, float]:
        """The sum over this rank's evaluation samples of each of the task's metrics; empty where `train_step` tells 0.

        It measures what `save` saves: state that ranks keep for themselves (the running statistics of batch
        normalisation) is rank 0's by then (all ranks).
        """

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in float64 (all ranks)."""

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value (all ranks)."""

    def gather(self, value: T) -> list[T]:
        """Each rank's value, by rank (all ranks)."""

    def snapshot(self) -> Callable[[Path], None]:
        """Copy model and optimizer, or this rank's part, into the host's memory, when the copy before is written.

        Rank 0 calls it, and those in `parts`.

        Returns:
            What writes the copy into a folder that exists; another thread may call it while training goes on.
        """

    def restore(self, folder: Path) -> None:
        """Read what `snapshot` wrote, on this grid or another, and give it to all ranks (all ranks).

        Raises:
            UsageError: it doesn't fit the task's model and optimizer.
        """

    def digest(self) -> str:
        """Of this rank's model and optimizer: the same on two ranks where these are, bit for bit.

        Ranks that differ on the grid's data axis alone must have the same.
        """

    def random_state(self) -> dict[str, Any]:
        """Where this rank's random streams stand, as JSON."""

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Go on with the streams of a `random_state`."""

    def finish(self) -> None:
        """Wait until every rank is here, then leave Horovod: a rank that leaves early fails the others (all ranks)."""
