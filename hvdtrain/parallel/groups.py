"""The grid's groups as Horovod's process sets: registered once, found by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import UsageError
from hvdtrain.parallel.grid import AXES, Grid

# What a group is called -> the axes on which its ranks differ.
GROUPS = {
    **{axis: (axis,) for axis in AXES},
    "replicas": ("embedding", "data"),
    "model": ("tensor", "pipeline"),
    "shards": ("tensor", "embedding", "pipeline"),
}


@dataclass(frozen=True)
class Group:
    """Ranks that meet in collectives of their own.

    Attributes:
        name: as in `GROUPS`, or ``stages 0 and 1`` for two neighbours in a pipeline. The same on all its ranks.
        ranks: Horovod's numbers of them, ascending.
        rank: this process's place among them, from 0.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    _process_set: Any = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def process_set(self) -> Any:
        """For Horovod's functions.

        Raises:
            UsageError: nobody is there to meet. Horovod has no process set of one rank, and would take all of them.
        """
        if self.size == 1:
            raise UsageError(
                f"rank {self.ranks[0]} is alone in its group '{self.name}', which has no process set",
                fix="look at the group's size first, as in 'if group.size > 1'",
            )
        return self._process_set


ALONE = Group("alone", (0,), 0)
"""For layers of `hvdtrain.parallel` outside a job: a model that one process has whole."""


@dataclass(frozen=True)
class Groups:
    """One process's place on the grid, and the groups that it belongs to.

    Attributes:
        grid: the degrees.
        rank: Horovod's number of this process.
        coordinates: its number on each axis, from 0.
        tensor, embedding, data, pipeline: those on the same line of an axis.
        replicas: those with the same part of the dense model, and samples of their own (data and embedding).
        model: those with other parts of the same model and the same samples (tensor and pipeline).
        shards: those with other parts of the same copy of everything (all axes but data).
        before, after: the pair with the stage before and with the one after; None at the pipeline's ends.
    """

    grid: Grid
    rank: int
    coordinates: dict[str, int]
    tensor: Group
    embedding: Group
    data: Group
    pipeline: Group
    replicas: Group
    model: Group
    shards: Group
    before: Group | None
    after: Group | None


class ProcessSets:
    """Horovod's process sets of a grid, one for each distinct group of ranks (Horovod refuses the same one twice).

    Give `sets` to ``hvd.init``; then `groups` says what this process belongs to.
    """

    def __init__(self, grid: Grid) -> None:
        # Here, so that tasks and checkpoints can be looked at where Horovod isn't built.
        from horovod.common.process_sets import ProcessSet, global_process_set

        self._grid = grid
        self._all = global_process_set
        self._by_ranks: dict[tuple[int, ...], Any] = {}
        for ranks in _all_groups(grid):
            if 1 < len(ranks) < grid.size:
                self._by_ranks.setdefault(ranks, ProcessSet(ranks))

    @property
    def sets(self) -> list[Any]:
        """All of them, in the same order on every rank."""
        return list(self._by_ranks.values())

    def groups(self, rank: int) -> Groups:
        """What the process with this rank belongs to."""
        grid, at = self._grid, self._grid.coordinates(rank)
        found = {
            name: self._group(name, next(ranks for ranks in grid.groups(*axes) if rank in ranks), rank)
            for name, axes in GROUPS.items()
        }
        pairs = [
            self._group(f"stages {stage} and {stage + 1}", pair, rank) if rank in pair else None
            for stage, pair in enumerate(pairwise(found["pipeline"].ranks))
        ]
        before, after = ([None, *pairs, None])[at["pipeline"] : at["pipeline"] + 2]
        return Groups(grid, rank, at, **found, before=before, after=after)

    def _group(self, name: str, ranks: tuple[int, ...], rank: int) -> Group:
        return Group(name, ranks, ranks.index(rank), self._by_ranks.get(ranks, self._all))


def init(horovod: Any, grid: Grid | None = None) -> Groups:
    """``hvd.init`` for a script of one's own, with the process sets of a grid (all ranks).

    Args:
        horovod: ``horovod.torch`` or ``horovod.tensorflow``.
        grid: the degrees; None: those of the job spec's ``parallelism``, or data parallel alone.

    Raises:
        UsageError: the grid's size isn't the number of ranks.
    """
    wanted = grid or grid_of_job()
    sets = ProcessSets(wanted) if wanted else None
    horovod.init(process_sets=sets.sets if sets else [])
    size = horovod.size()
    if wanted is not None and wanted.size != size:
        raise UsageError(
            f"the grid is of {wanted.size} ranks ({wanted.in_words()}), and there are {size}",
            fix="let the product of the degrees be the number of processes",
        )
    return (sets or ProcessSets(Grid(data=size))).groups(horovod.rank())


def grid_of_job() -> Grid | None:
    """What the launcher says (`contract.GRID`); None where it says nothing: data parallel with all ranks."""
    text = os.environ.get(contract.GRID)
    return Grid.from_text(text) if text else None


def _all_groups(grid: Grid) -> Iterator[tuple[int, ...]]:
    for axes in GROUPS.values():
        yield from grid.groups(*axes)
    for line in grid.groups("pipeline"):
        yield from pairwise(line)
