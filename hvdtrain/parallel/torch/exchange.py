"""Gradients averaged over ranks while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hvdtrain.parallel.torch.buckets import Arrivals, Bucket, GroupOf, Usage, plan, sum_of_squares
from hvdtrain.parallel.torch.compression import Plain, Reducer, Reduction

# As DDP's default.
BUCKET_MB = 25.0


class GradientExchange:
    """Averages the gradients of each parameter over the ranks of its group.

    A bucket of gradients is sent when the last of them has come, so that the wire is busy while the backward pass goes
    on (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020, section 3.2).

    Each step is ``begin(passes)``, that many backward passes, or none on a rank without samples, and `finish`; the
    gradients are then in the parameters' ``grad``, as views of memory that the next step uses again. They are dense.

    Args:
        parameters: names and parameters; those that are frozen now are left out.
        group_of: each one's group, and the number by which the sum over the group is divided.
        reducer: how buckets are summed.
        bucket_mb: size of a bucket in MiB. More and smaller ones start earlier, and each costs a message of its own.
        kind: the beginning of the collectives' names; two exchanges that work at the same time need different ones.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        group_of: GroupOf,
        reducer: Reducer | None = None,
        *,
        bucket_mb: float = BUCKET_MB,
        kind: str = "gradients",
    ) -> None:
        trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._buckets = plan(trainable, group_of, bucket_mb, kind)
        self._reducer = reducer or Plain()
        self._arrivals = Arrivals(self._buckets, self._send)
        self._usage = Usage(self._buckets, kind)
        self._memory: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._reductions: dict[int, Reduction] = {}

    def begin(self, passes: int = 1) -> None:
        """Begin a step: gradients of the one before are gone, and those of this one are sent after so many passes."""
        for parameter in self._parameters():
            parameter.grad = None
        self._sums, self._reductions = {}, {}
        self._arrivals.begin(passes)

    def finish(self) -> None:
        """Send what hasn't been sent, wait for the sums and leave the averages in the parameters' ``grad``.

        Every rank of a group has to come here in every step. A parameter that no rank of its group has used has no
        gradient.
        """
        for bucket in self._arrivals.end():
            self._send(bucket)
        self._usage.start()
        in_order = [self._reductions[number] for number in sorted(self._reductions)]
        for reduction in in_order:
            reduction.proceed()
        for reduction in in_order:
            reduction.finish()
        used = self._usage.finish()
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.parameter in used:
                    # .to gives the view itself where the type is the same.
                    slot.parameter.grad = slot.view(self._sums[bucket.number]).to(slot.parameter.dtype)
        self._sums, self._reductions = {}, {}

    def squared_norm(self, counts: Callable[[torch.nn.Parameter], bool] = lambda _: True) -> torch.Tensor:
        """Sum of the squares of this rank's averaged gradients, of the parameters that count; float64, shape ()."""
        return sum_of_squares(p.grad for p in self._parameters() if p.grad is not None and counts(p))

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply all averaged gradients."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        self._arrivals.remove()

    def _parameters(self) -> Iterable[torch.nn.Parameter]:
        return (slot.parameter for bucket in self._buckets for slot in bucket.slots)

    def _send(self, bucket: Bucket) -> None:
        self._usage.note(bucket)
        flat = self._sums[bucket.number] = bucket.gather(lambda: self._memory_of(bucket))
        if bucket.travels:
            self._reductions[bucket.number] = self._reducer.start(flat, bucket.group, bucket.name)

    def _memory_of(self, bucket: Bucket) -> torch.Tensor:
        if bucket.number not in self._memory:
            self._memory[bucket.number] = bucket.empty()
        return self._memory[bucket.number]
