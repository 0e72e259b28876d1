"""Checkpoints of models that ranks share: each rank writes its part, and any grid of ranks can read them.

A part holds, for each parameter, the rank's piece and how it was cut; for the optimizer a range of the piece's values,
laid flat, which is all of them unless the optimizer's state is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import UsageError
from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.groups import Groups
from hvdtrain.parallel.torch.cuts import Cut, cut_of, part_of, whole_of

MODEL_FILE = "model.pt"
OPTIMIZER_FILE = "optimizer.pt"
PART_FILE = "part.pt"
# In a plain optimizer's file: names of the parameters that its state has numbers for.
NAMES = "names"

# For each parameter what the optimizer keeps: a flat range (start, values), or a number that all values share.
Pieces = Mapping[str, Mapping[str, Any]]


def part_of_rank(model: torch.nn.Module, pieces: Pieces, groups: Groups, *, sharded: bool) -> dict[str, Any]:
    """What one rank writes: everything that no rank before it has.

    Args:
        model: this rank's.
        pieces: its optimizer's state.
        groups: its place.
        sharded: whether each replica has other ranges of the optimizer's state.
    """
    cuts = {name: cut_of(parameter) for name, parameter in _parameters(model).items()}
    state = model.state_dict()
    own = [name for name in state if _is_first(groups, cuts.get(name), ("tensor", "embedding", "data"))]
    axes = ("tensor",) if sharded else ("tensor", "embedding", "data")
    return {
        "coordinates": groups.coordinates,
        "cuts": {name: (cut.axis, cut.dim, cut.blocks) for name, cut in cuts.items() if cut},
        "shapes": {name: tuple(state[name].shape) for name in cuts},
        "model": {name: state[name] for name in own},
        "optimizer": {name: dict(kept) for name, kept in pieces.items() if _is_first(groups, cuts[name], axes)},
    }


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By every name that ``state_dict`` has for them: one that two layers share has two."""
    return dict(model.named_parameters(remove_duplicate=False))


def _is_first(groups: Groups, cut: Cut | None, axes: tuple[str, ...]) -> bool:
    """Whether no rank before this one on these axes has the same piece."""
    return all(groups.coordinates[axis] == 0 for axis in axes if cut is None or axis != cut.axis)


class Saved:
    """What a checkpoint holds, put together parameter by parameter, whichever grid has written it.

    Args:
        folder: a checkpoint's.

    Raises:
        UsageError: a parameter's part is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = sorted(folder.glob(f"part-*/{PART_FILE}"))
        # Mapped: what isn't asked for isn't read.
        self._parts = [torch.load(file, map_location="cpu", mmap=True) for file in files]

    @cached_property
    def _plain_model(self) -> dict[str, Any]:
        return dict(torch.load(self._folder / MODEL_FILE, map_location="cpu", mmap=True))

    @cached_property
    def _plain_optimizer(self) -> dict[str, dict[str, Any]]:
        state = torch.load(self._folder / OPTIMIZER_FILE, map_location="cpu", mmap=True)
        return {name: state["state"].get(number, {}) for number, name in enumerate(state.get(NAMES, ()))}

    @property
    def names(self) -> list[str]:
        """Of all parameters and buffers, in the order of the pipeline's stages."""
        if not self._parts:
            return list(self._plain_model)
        by_stage = sorted(self._parts, key=lambda part: part["coordinates"]["pipeline"])
        return list(dict.fromkeys(name for part in by_stage for name in part["model"]))

    def model(self, name: str) -> torch.Tensor:
        """A whole parameter or buffer."""
        if not self._parts:
            return self._get(self._plain_model, name)
        return self._whole(name, lambda part: part["model"].get(name))

    def state_dict(self) -> dict[str, Any]:
        """The whole model as one process has it, each tensor in memory of its own, whatever it shared in its file."""
        return {name: _own(self.model(name)) for name in self.names}

    def optimizer_keys(self, name: str) -> list[str]:
        """What the optimizer keeps for a parameter; nothing where it hasn't taken a step."""
        if not self._parts:
            return list(self._plain_optimizer.get(name, {}))
        return list(dict.fromkeys(key for part in self._parts for key in part["optimizer"].get(name, {})))

    def optimizer(self, name: str, key: str) -> Any:
        """The whole of one thing that the optimizer keeps for a parameter: a tensor of its shape, or a number."""
        if not self._parts:
            return self._plain_optimizer[name][key]
        found = [part["optimizer"][name][key] for part in self._parts if key in part["optimizer"].get(name, {})]
        if not isinstance(found[0], tuple):
            return found[0]
        return self._whole(name, lambda part: self._values(name, key, part))

    def _values(self, name: str, key: str, like: dict[str, Any]) -> torch.Tensor | None:
        """All values of the piece that a part has, from every part that has a range of the same piece."""
        if name not in like["shapes"]:
            return None
        axis = like["cuts"][name][0] if name in like["cuts"] else None
        ranges = {}
        for part in self._parts:
            same = axis is None or part["coordinates"][axis] == like["coordinates"][axis]
            if same and key in part["optimizer"].get(name, {}):
                start, values = part["optimizer"][name][key]
                ranges[start] = values
        if not ranges:
            return None
        return torch.cat([ranges[start] for start in sorted(ranges)]).reshape(like["shapes"][name])

    def _whole(self, name: str, get: Callable[[dict[str, Any]], torch.Tensor | None]) -> torch.Tensor:
        pieces: dict[int, torch.Tensor] = {}
        cut = None
        for part in self._parts:
            if name in part["cuts"]:
                cut = Cut(*part["cuts"][name])
            number = part["coordinates"][cut.axis] if cut else 0
            if number not in pieces and (piece := get(part)) is not None:
                pieces[number] = piece
        if not pieces or sorted(pieces) != list(range(len(pieces))):
            raise self._missing(name)
        ordered = [pieces[number] for number in sorted(pieces)]
        return whole_of(ordered, cut) if cut else ordered[0]

    def _get(self, state: dict[str, Any], name: str) -> torch.Tensor:
        if name not in state:
            raise self._missing(name)
        found: torch.Tensor = state[name]
        return found

    def _missing(self, name: str) -> UsageError:
        return UsageError(
            f"the checkpoint has no parameter {name}, or not all of it",
            where=str(self._folder),
            fix="start a new run, or make the model as it was",
        )


def _own(value: Any) -> Any:
    # Otherwise a view is written with all of the storage that it looks into.
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


def piece(whole: Any, parameter: torch.Tensor | None, groups: Groups) -> Any:
    """This rank's piece of a whole tensor; what isn't a tensor stays as it is.

    Args:
        whole: a parameter, or what the optimizer keeps for one.
        parameter: this rank's, which knows how it is cut; None for a buffer.
        groups: this rank's place.
    """
    cut = cut_of(parameter) if parameter is not None else None
    if cut is None or not isinstance(whole, torch.Tensor) or whole.ndim == 0:
        return whole
    return part_of(whole, cut, degree(groups.grid, cut), groups.coordinates[cut.axis])


def degree(grid: Grid, cut: Cut) -> int:
    """Into how many pieces a cut goes on a grid."""
    return int(getattr(grid, cut.axis))


def load_model(model: torch.nn.Module, saved: Saved, groups: Groups) -> None:
    """Give a rank's model its piece of everything.

    Raises:
        UsageError: the checkpoint is of another model.
    """
    parameters = _parameters(model)
    with torch.no_grad():
        for name, mine in model.state_dict().items():
            value = piece(saved.model(name), parameters.get(name), groups)
            if value.shape != mine.shape:
                raise UsageError(
                    f"{name} has shape {list(value.shape)} in the checkpoint and {list(mine.shape)} in the model",
                    fix="start a new run, or make the model as it was",
                )
            mine.copy_(value)


def plain_optimizer_state(saved: Saved, names: list[str], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``load_state_dict`` of an ordinary optimizer takes.

    Args:
        saved: the checkpoint.
        names: of the parameters, in the order of the optimizer's numbers.
        groups: ``param_groups`` of the optimizer's own ``state_dict``.
    """
    state = {
        number: {key: saved.optimizer(name, key) for key in saved.optimizer_keys(name)}
        for number, name in enumerate(names)
    }
    return {"state": {number: kept for number, kept in state.items() if kept}, "param_groups": groups}
