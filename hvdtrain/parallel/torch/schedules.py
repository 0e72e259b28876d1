"""In which order a stage of a pipeline works on its micro-batches, and what that costs. Pure.

Both orders keep the weights as they are until all micro-batches are through, so the gradients are those of the whole
batch. They idle alike; 1F1B keeps fewer activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

# What the shapes of a micro-batch depend on: its number of samples, or that and more, as (samples, length).
Size: TypeAlias = int | tuple[int, ...]


class Action(NamedTuple):
    """One piece of a stage's work: the forward or the backward pass of a micro-batch, which count from 0."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def gpipe(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
    section 2.3. The backward passes go in the order of the forward ones, so that gradients add up in one process's
    order.
    """
    numbers = range(micro_batches)
    return [*(Action("forward", number) for number in numbers), *(Action("backward", number) for number in numbers)]


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """Forward passes until the first gradient can be back, then one backward and one forward pass in turns.

    Source: PipeDream-Flush in Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section 3.2.
    """
    ahead = min(stages - stage - 1, micro_batches)
    actions = [Action("forward", number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        actions += Action("forward", ahead + number), Action("backward", number)
    return actions + [Action("backward", number) for number in range(micro_batches - ahead, micro_batches)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def bubble(stages: int, micro_batches: int) -> float:
    """The part of a step in which a stage idles, if all stages take equally long and nothing else costs time.

    A step takes as long as ``micro_batches + stages - 1`` micro-batches, and a stage works on ``micro_batches`` of
    them: ``(stages - 1) / (micro_batches + stages - 1)``, whichever the schedule.

    Sources: Huang et al., 2019, section 2.3; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", 2021, section 2.2, which gives it in proportion to the time of the work alone,
    ``(stages - 1) / micro_batches``.

    Args:
        stages: of the pipeline, at least 1.
        micro_batches: of a step, at least 1.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def most_kept(actions: Sequence[Action]) -> int:
    """Of how many micro-batches a stage keeps the activations at once, at most.

    With GPipe all, with 1F1B no more than there are stages from this one to the last.
    """
    kept = most = 0
    for kind, _ in actions:
        kept += 1 if kind == "forward" else -1
        most = max(most, kept)
    return most


@dataclass(frozen=True)
class Measured:
    """How a stage has spent its last step; seconds on the clock.

    On a GPU computing goes on behind the call that starts it, so waiting there includes computing.

    Attributes:
        busy_s: computing its micro-batches, `inputs` and `loss` included.
        waiting_s: waiting for neighbours.
        total_s: from the step's beginning to its end.
    """

    busy_s: float
    waiting_s: float
    total_s: float

    @property
    def bubble(self) -> float:
        """The part of the step in which the stage didn't compute; the mean over stages is the pipeline's."""
        return 1 - self.busy_s / self.total_s


def filled(micro_batches: Sequence[Size]) -> list[int]:
    """The numbers of those that have samples."""
    return [number for number, size in enumerate(micro_batches) if (size[0] if isinstance(size, tuple) else size) > 0]
