"""How the ranks of a job are laid out: a grid with an axis for each way of dividing the training. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import product

# From the axis whose neighbours are next to each other, and so on one host, to the one that crosses hosts first. Tensor
# groups meet in the middle of every layer and embedding groups at every batch's beginning and end. Data groups reduce
# whole gradients, stages of a pipeline hand over activations alone: so pipelines cross hosts before data groups do
# (the order of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
# 2021, section 3).
AXES = ("tensor", "embedding", "data", "pipeline")


@dataclass(frozen=True)
class Grid:
    """The degrees of each axis; their product is the number of ranks.

    Attributes:
        tensor: ranks that share each layer's matrices.
        embedding: ranks that share the embedding tables; each has samples of its own, as with data.
        data: copies of the model that have samples of their own.
        pipeline: stages that the layers are cut into.
    """

    tensor: int = 1
    embedding: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.embedding * self.data * self.pipeline

    @property
    def replicas(self) -> int:
        """Into how many parts the samples of a step are shared out."""
        return self.data * self.embedding

    @property
    def is_data_parallel(self) -> bool:
        """Whether each rank has the whole model."""
        return self.data == self.size

    def in_words(self) -> str:
        """The degrees above 1, as ``pipeline 2 x data 2``."""
        degrees = [(axis, getattr(self, axis)) for axis in reversed(AXES)]
        return " x ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "1 process"

    def to_text(self) -> str:
        """Degrees in the order of `AXES`, as ``2,1,2,1``, for `hvdtrain.contract.GRID`."""
        return ",".join(map(str, astuple(self)))

    @classmethod
    def from_text(cls, text: str) -> Grid:
        """What `to_text` gave."""
        return cls(*map(int, text.split(",")))

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's number on each axis, from 0."""
        found = {}
        for axis, degree in zip(AXES, astuple(self), strict=True):
            rank, found[axis] = divmod(rank, degree)
        return found

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates."""
        rank = 0
        for axis in reversed(AXES):
            rank = rank * getattr(self, axis) + coordinates[axis]
        return int(rank)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """All groups of ranks that differ on these axes alone, each in the order of its ranks."""
        fixed = [axis for axis in AXES if axis not in axes]
        for place in product(*(range(getattr(self, axis)) for axis in reversed(fixed))):
            at = dict(zip(reversed(fixed), place, strict=True))
            inner = product(*(range(getattr(self, axis)) for axis in AXES if axis in axes))
            names = [axis for axis in AXES if axis in axes]
            yield tuple(sorted(self.rank(at | dict(zip(names, numbers, strict=True))) for numbers in inner))
