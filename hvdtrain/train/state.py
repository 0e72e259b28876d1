"""Where a training stands, as it is saved, and going on from there."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.train.backend import Backend
from hvdtrain.train.checkpoints import STATE_FILE, Checkpoints
from hvdtrain.train.options import Options

RANDOM_FILE = "random.json"
# What a training can go on with when it has changed: everything else, a task's own options and the seed, makes the
# model or the order of the samples.
_FREE = set(Options.model_fields) - {"seed"}


class State(BaseModel):
    """A training's counters (``state.json``).

    Attributes:
        step: steps done since the first start.
        epoch: the epoch that is being trained, from 0; the number of epochs at the end.
        epoch_samples: samples of it that were trained, by all ranks: the first ones of its order.
        train_samples: samples of an epoch.
        seed: of the order of the samples.
        size: number of ranks.
        grid: how they were laid out, axis by axis.
        task: ``module:Class``.
        options: the task's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    step: int
    epoch: int
    epoch_samples: int
    train_samples: int
    seed: int
    size: int
    grid: dict[str, int] = {}
    task: str
    options: dict[str, Any]


class Resumed(BaseModel):
    """What a run goes on from.

    Attributes:
        name: of the checkpoint's folder.
        state: its counters.
        streams: this rank's random streams, for `Backend.set_random_state`; None where the grid has changed, and at
            the beginning of an epoch, where the streams begin anew.
    """

    name: str
    state: State
    streams: dict[str, Any] | None


def resume(checkpoints: Checkpoints, backend: Backend, task: str, options: Options) -> Resumed | None:
    """Give all ranks the model and optimizer of the newest whole checkpoint (all ranks); None: there is none.

    Raises:
        UsageError: the run can't go on from it.
        HvdtrainError: the ranks don't have the same model and optimizer afterwards.
    """
    folder = checkpoints.newest_whole(_warn) if backend.rank == 0 else None
    if backend.rank == 0 and folder is None and checkpoints.all():
        _warn("no checkpoint is whole: the training starts from the beginning")
    found = backend.broadcast_object(_read(folder) if folder else None)
    if found is None:
        return None
    name, text, streams = found
    try:
        state = State.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(
            f"checkpoint {name} was written by another version of hvdtrain", fix="start a new run"
        ) from error
    if fault := _why_not(state, task, options, backend.train_samples):
        raise UsageError(
            f"can't go on from checkpoint {name}: {fault}",
            fix="start a new run, or give the job what it had when the checkpoint was written",
        )
    backend.restore(checkpoints.folder / name)
    _require_equal(backend)
    goes_on = state.grid == asdict(backend.groups.grid) and state.epoch_samples
    return Resumed(name=name, state=state, streams=streams[backend.rank] if goes_on else None)


def _read(folder: Path) -> tuple[str, str, list[dict[str, Any]]]:
    return folder.name, (folder / STATE_FILE).read_text(), json.loads((folder / RANDOM_FILE).read_text())


def _why_not(state: State, task: str, options: Options, train_samples: int) -> str | None:
    """Why a run of this task with these options can't go on from there."""
    if state.task != task:
        return f"it is of the task {state.task}, and this is {task}"
    now = options.model_dump(mode="json")
    changed = [name for name in sorted({*state.options, *now} - _FREE) if state.options.get(name) != now.get(name)]
    if changed:
        return "options have changed: " + ", ".join(
            f"{name} was {state.options.get(name)!r} and is {now.get(name)!r}" for name in changed
        )
    if state.train_samples != train_samples:
        return f"there were {state.train_samples} training samples, and now there are {train_samples}"
    if (state.epoch, state.epoch_samples) > (options.epochs, 0):
        return f"it is in epoch {state.epoch + 1}, and options.epochs is {options.epochs}"
    return None


def _require_equal(backend: Backend) -> None:
    told = backend.gather((backend.groups.data.ranks[0], backend.digest()))
    differing = [(rank, twin) for rank, (twin, digest) in enumerate(told) if digest != told[twin][1]]
    if differing:
        rank, twin = differing[0]
        raise HvdtrainError(
            f"rank {rank} has another model or optimizer than rank {twin} after the checkpoint was restored",
            fix="let model() and optimizer() make the same on every rank",
        )


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")
    sys.stderr.flush()
