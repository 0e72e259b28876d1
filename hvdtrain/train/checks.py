"""What all ranks have to agree on before the first step: a difference would be a hang, or half a checkpoint, later."""

from __future__ import annotations

import secrets
import socket
import sys
from pathlib import Path

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.train.backend import Backend


def check_data(backend: Backend, task: str) -> None:
    """No rank may think that it has other data: the ranks would take different numbers of steps and hang (all ranks).

    Raises:
        UsageError: a rank has another number of samples than rank 0, or there are none.
    """
    mine = (backend.train_samples, backend.eval_samples)
    rank_0 = backend.broadcast_object(mine)
    if mine != rank_0:
        raise UsageError(
            f"rank {backend.rank} has {mine[0]} training and {mine[1]} evaluation samples, rank 0 has {rank_0[0]} "
            f"and {rank_0[1]}",
            where=task,
            fix="let train_data() and eval_data() give every rank the same samples; the loop shares them out",
        )
    if not backend.train_samples:
        raise UsageError("train_data() has no samples", where=task)


def warn_of_whole_model(backend: Backend) -> None:
    """Ranks that the job lets share a model must have parts of it, or they do the same work (all ranks)."""
    grid = backend.groups.grid
    axes = [axis for axis in ("tensor", "embedding") if getattr(grid, axis) > 1]
    if not axes:
        return
    # A stage of a pipeline may have no layer that is cut, where another one does.
    cut = set().union(*backend.gather(backend.cut_axes()))
    for axis in axes:
        if axis not in cut and backend.rank == 0:
            sys.stderr.write(
                f"warning: parallelism.{axis} is {getattr(grid, axis)}, and no layer of the model is cut by it: "
                f"give these the group self.groups.{axis} (docs/parallelism.md), or leave parallelism.{axis} out\n"
            )
            sys.stderr.flush()


def check_folder(backend: Backend, folder: Path) -> None:
    """Ranks that write parts of one checkpoint must write into one folder (all ranks).

    Args:
        backend: says which ranks write.
        folder: a run's, for its checkpoints; it is made.

    Raises:
        HvdtrainError: rank 0 can't write to it.
        UsageError: a rank that writes doesn't see what rank 0 wrote.
    """
    if not backend.parts:
        return
    token, problem = folder / f".shared-{secrets.token_hex(8)}", None
    if backend.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            problem = error.strerror
    name, problem = backend.broadcast_object((token.name, problem))
    try:
        if problem:
            raise HvdtrainError(
                f"can't write to the folder for checkpoints: {problem}",
                where=str(folder),
                fix="choose another folder with --runs DIRECTORY",
            )
        # Listed, since a network file system may remember for a while that a name wasn't there.
        seen = folder.is_dir() and name in {path.name for path in folder.iterdir()}
        sights = backend.gather((socket.gethostname(), seen or backend.rank not in backend.parts))
    finally:
        if backend.rank == 0:
            token.unlink(missing_ok=True)
    blind = sorted({host for host, sees in sights if not sees})
    if blind:
        raise UsageError(
            f"the ranks write a part of each checkpoint, and {', '.join(blind)} can't see rank 0's folder for them",
            where=str(folder),
            fix="choose a folder that all hosts share with --runs DIRECTORY",
        )
