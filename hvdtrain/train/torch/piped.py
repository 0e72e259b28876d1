"""A task's model as a pipeline: the task keeps its ``loss(model, batch)``, and each stage computes its layers of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.errors import UsageError
from hvdtrain.heartbeat import Heartbeat
from hvdtrain.parallel.groups import Groups
from hvdtrain.parallel.torch.pipeline import Pipeline
from hvdtrain.parallel.torch.stages import (
    Makers,
    agreed_costs,
    balanced_cut,
    build_stage,
    costs_by_parameters,
    costs_by_time,
)
from hvdtrain.train.settings import ParallelismSettings
from hvdtrain.train.torch.feed import Parts, mean_loss
from hvdtrain.train.torch.task import Task

# Layers are timed on a batch of so many samples at most.
_TIMED_SAMPLES = 8


class _InputTakenError(Exception):
    """Ends a task's function at the place where it calls the model, which the first stage needs the input of alone."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs


class Piped:
    """One stage of a task's model.

    The first stage runs the task's ``loss`` (or ``metrics``) until it calls the model, for the input; the last runs it
    with a model that gives the pipeline's output, whatever it is called with.

    Args:
        task: which has `layers`.
        groups: this rank's place.
        settings: how the layers are cut, and the schedule.
        device: of the stage.
        heartbeat: is told what the stage waits for.
        sample: gives a batch of so many samples, by which the layers are timed.

    Attributes:
        stage: the layers of this rank.

    Raises:
        UsageError: the task has no `layers`, or fewer than there are stages.
    """

    def __init__(
        self,
        task: Task,
        groups: Groups,
        settings: ParallelismSettings,
        device: torch.device,
        heartbeat: Heartbeat,
        sample: Callable[[int], Any],
    ) -> None:
        self._task = task
        layers = task.layers()
        if layers is None:
            raise UsageError(
                f"parallelism.pipeline is {groups.grid.pipeline}, and the task isn't a sequence of layers",
                where=type(task).__name__,
                fix="give it a method layers() (docs/parallelism.md), or leave the pipeline out",
            )

        def timed() -> list[float]:
            return costs_by_time(layers, self._input(task.loss, sample(_TIMED_SAMPLES)), device=device)

        if settings.cut_by == "time":
            with heartbeat.collective("times of the layers"):
                costs = agreed_costs(timed, groups)
        else:
            costs = costs_by_parameters(layers)
        self.stage = _built(layers, costs, groups).to(device)
        self._pipeline = Pipeline(
            self.stage,
            groups,
            schedule=settings.schedule,
            recompute=settings.recompute,
            waiting=heartbeat.collective,
            device=device,
        )

    def step(self, batch: Parts, shares: Sequence[float], weight: float) -> Any:
        """Forward and backward of all parts of a batch.

        Args:
            batch: its parts.
            shares: each part's share of the samples.
            weight: of the whole batch's mean loss.

        Returns:
            The mean loss on the last stage; 0 elsewhere.
        """

        def loss(output: Any, number: int) -> torch.Tensor:
            part, samples = batch[number]
            mean = mean_loss(self._task.loss(_giving(output), part), samples)
            factor = weight * shares[number]
            return mean if factor == 1 else mean * factor

        weighted = self._pipeline.step(
            [samples for _, samples in batch], lambda number: self._input(self._task.loss, batch[number][0]), loss
        )
        return sum(weighted.values()) / weight if weighted else 0.0

    def evaluate(self, batch: Any, samples: int, use: Callable[[Any, Any, int], None]) -> None:
        """Forward alone; the last stage calls ``use(model, batch, samples)``."""
        self._pipeline.forward_only(
            [samples],
            lambda _: self._input(self._task.metrics, batch),
            lambda output, _: use(_giving(output), batch, samples),
        )

    def _input(self, function: Callable[[Any, Any], Any], batch: Any) -> Any:
        try:
            function(_take_input, batch)
        except _InputTakenError as taken:
            return taken.inputs[0] if len(taken.inputs) == 1 else taken.inputs
        raise UsageError(
            f"{function.__name__}() doesn't call the model",
            where=type(self._task).__name__,
            fix="in a pipeline loss() and metrics() call the model once, with the input of its first layer",
        )


def _built(layers: Makers, costs: Sequence[float], groups: Groups) -> torch.nn.Module:
    """This rank's layers, and all others' random draws."""
    return build_stage(layers, balanced_cut(costs, groups.grid.pipeline)[groups.coordinates["pipeline"]])


def _take_input(*inputs: Any) -> Any:
    raise _InputTakenError(inputs)


def _giving(output: Any) -> Callable[..., Any]:
    return lambda *_: output
