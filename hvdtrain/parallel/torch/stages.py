"""Where a sequence of layers is cut into the stages of a pipeline, and how a rank makes its own stage.

Layers come as functions that make them. Each rank calls all of them in the same order, so that the random draws, and
with them the initial weights, are those of one process that makes the whole model; it keeps its own layers only.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Groups

Makers = Sequence[Callable[[], nn.Module]]

# Cost, and first layer of the last stage, where there are fewer layers than stages.
_NONE = (float("inf"), 0)


def balanced_cut(costs: Sequence[float], stages: int) -> list[range]:
    """The layers of each stage, such that the most expensive stage is as cheap as can be.

    Exact, by dynamic programming over the first layer of the last stage: O(stages * layers^2).

    Args:
        costs: of each layer, not negative, in any unit.
        stages: how many, each of which gets a layer at least.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    layers = len(costs)
    if layers < stages:
        raise UsageError(
            f"the model has {layers} layers, and the pipeline {stages} stages",
            fix=f"let the pipeline have {layers} stages at most, or give the model as more and smaller layers",
        )
    until = [0.0, *accumulate(costs)]
    # After each round: the cost of the most expensive stage if the first `end` layers are cut into that many stages.
    best = list(until)
    firsts = []
    for stage in range(1, stages):
        choices = [
            min(((max(best[first], until[end] - until[first]), first) for first in range(stage, end)), default=_NONE)
            for end in range(layers + 1)
        ]
        best = [cost for cost, _ in choices]
        firsts.append([first for _, first in choices])
    ends = [layers]
    for first in reversed(firsts):
        ends.append(first[ends[-1]])
    ends = [0, *reversed(ends)]
    return [range(ends[stage], ends[stage + 1]) for stage in range(stages)]


def build_stage(makers: Makers, own: range) -> nn.Sequential:
    """The layers of one stage; names in its ``state_dict`` are those of the whole ``nn.Sequential``, as ``3.weight``.

    No more than one foreign layer is in memory at a time. A module that several makers return is not shared between
    stages.
    """
    kept: OrderedDict[str, nn.Module] = OrderedDict()
    for number, make in enumerate(makers):
        layer = make()
        if number in own:
            kept[str(number)] = layer
        del layer
    return nn.Sequential(kept)


def costs_by_parameters(makers: Makers) -> list[float]:
    """Each layer's number of parameters. Makes the layers one after the other, and leaves the random draws as found."""
    with _same_random_draws():
        return [float(sum(parameter.numel() for parameter in make().parameters())) for make in makers]


def costs_by_time(makers: Makers, sample: Any, *, device: torch.device | None = None, repeats: int = 5) -> list[float]:
    """Seconds that each layer takes forward and backward, the least of several tries after one that isn't counted.

    What else a machine does adds to a try's time, and never takes from it.

    What one rank measures differs from what another does: all must cut by the same numbers (see `agreed_costs`).

    Args:
        makers: of the layers; made one after the other, and the random draws are left as found.
        sample: the first layer's input, a micro-batch of the real size; each layer's output is the next one's input.
        device: where to measure; None: on the CPU.
        repeats: how many tries.
    """
    costs = []
    with _same_random_draws():
        value = _map(sample, lambda tensor: tensor.to(device or "cpu"))
        for make in makers:
            layer = make().to(device or "cpu")
            tries = [_try(layer, value) for _ in range(1 + repeats)]
            costs.append(min(seconds for seconds, _ in tries[1:]))
            value = tries[-1][1]
            del layer, tries
    return costs


def agreed_costs(measure: Callable[[], Sequence[float]], groups: Groups) -> list[float]:
    """The costs that the job's first rank measures, the same on all ranks.

    Args:
        measure: such as `costs_by_time` of all layers. All ranks call it, since some may share a layer and meet in it.
        groups: this rank's place.
    """
    costs = torch.tensor(measure(), dtype=torch.float64)
    if groups.grid.size > 1:
        costs = hvd.broadcast_(costs, root_rank=0, name="hvdtrain.costs of layers")
    return list(costs.tolist())


def _try(layer: nn.Module, value: Any) -> tuple[float, Any]:
    """Seconds of one forward and backward pass, the gradient of the input included; and the layer's output."""
    # A copy, because a layer that works in place may not change what is to have a gradient.
    value = _map(value, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()).clone())
    tensors: list[torch.Tensor] = []
    _synchronize(value)
    started = time.perf_counter()
    output = layer(value)
    _map(output, tensors.append)
    outputs = [tensor for tensor in tensors if tensor.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
    _synchronize(value)
    return time.perf_counter() - started, _map(output, torch.Tensor.detach)


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    return tuple(map(change, value)) if isinstance(value, (tuple, list)) else change(value)


def _synchronize(value: Any) -> None:
    """A GPU computes on after the call returns."""
    if (value[0] if isinstance(value, tuple) else value).is_cuda:
        torch.cuda.synchronize()


@contextlib.contextmanager
def _same_random_draws() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
