"""Gradients in buckets: which travel together, when all of a bucket have come, and which nobody has."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import horovod.torch as hvd
import torch

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Group

GroupOf: TypeAlias = Callable[[torch.nn.Parameter], tuple[Group, int]]
"""Over which ranks a parameter's gradients are summed, and what the sum is divided by."""


# What Horovod still puts together by itself, in bytes: small tensors beside the buckets.
_FUSION_THRESHOLD = 1 << 20


def keep_whole() -> None:
    """Have Horovod send buckets as they are, unless the user or its autotuning decides (before ``hvd.init``).

    By its default it copies what is ready at the same time into a buffer, up to 128 MiB, and back: four buckets of
    8 MiB on four ranks took 125 ms so, and 99 ms as they are (benchmarks/data_parallel.py has whole steps).
    """
    if "HOROVOD_AUTOTUNE" not in os.environ:
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(_FUSION_THRESHOLD))


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket: elements ``start`` to ``stop`` of its flat memory."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part of the bucket's memory, in its shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one type on one device whose gradients are summed together.

    Attributes:
        number: place in the order in which buckets are expected to be full, from 0.
        name: of its collectives, the same on all ranks of the group.
        group: ranks to sum over.
        divisor: of the sum.
        slots: the parameters, in the order in which their gradients are expected.
    """

    number: int
    name: str
    group: Group
    divisor: int
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.slots[-1].stop

    @property
    def wire_dtype(self) -> torch.dtype:
        """What gradients are summed in: halves are summed slowly and roughly, and Horovod refuses bfloat16."""
        dtype = self.slots[0].parameter.dtype
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    @property
    def travels(self) -> bool:
        """Whether there is anything to sum: a group of one must not call Horovod."""
        return self.group.size > 1 and self.size > 0

    def empty(self, size: int | None = None) -> torch.Tensor:
        """Memory for its gradients, or for some of them, shape (size,)."""
        device = self.slots[0].parameter.device
        return torch.empty(self.size if size is None else size, dtype=self.wire_dtype, device=device)

    def gather(self, memory: Callable[[], torch.Tensor]) -> torch.Tensor:
        """This rank's gradients, divided already, flat; zeros where there is none. Takes them from the parameters.

        Args:
            memory: gives memory of shape (size,), if it's needed: a large gradient that is alone stays where it is.
        """
        if len(self.slots) == 1 and (alone := self._alone(self.slots[0].parameter)) is not None:
            return alone
        flat = memory()
        for slot in self.slots:
            gradient, slot.parameter.grad = slot.parameter.grad, None
            if gradient is None:
                slot.view(flat).zero_()
            else:
                # One pass copies and divides. Sums of what was divided can't overflow where the average doesn't.
                torch.mul(_dense(gradient), 1 / self.divisor, out=slot.view(flat))
        return flat

    def _alone(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None or gradient.dtype != self.wire_dtype or gradient.is_sparse or not gradient.is_contiguous():
            return None
        parameter.grad = None
        flat: torch.Tensor = gradient.detach().view(-1)
        return flat if self.divisor == 1 else flat.mul_(1 / self.divisor)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def plan(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], group_of: GroupOf, bucket_mb: float, kind: str
) -> list[Bucket]:
    """Share parameters out over buckets, the same way on all ranks of each group.

    Args:
        parameters: names and parameters as the model has them; backward passes reach the last ones first.
        group_of: where each one's gradient goes.
        bucket_mb: size at which a bucket is closed, in MiB. A parameter of that size has a bucket to itself.
        kind: the beginning of the buckets' names.

    Returns:
        Buckets ordered by the parameter that they wait for. Ranks that have several groups in common so have their
        buckets in the same order.
    """
    limit = bucket_mb * 2**20
    drafts: list[_Draft] = []
    unfinished: dict[Any, _Draft] = {}
    for position, (name, parameter) in enumerate(reversed(list(parameters))):
        group, divisor = group_of(parameter)
        key = (group.ranks, divisor, parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        draft = unfinished.get(key)
        if draft is None or size >= limit or draft.size + size > limit:
            draft = _Draft(group, divisor)
            drafts.append(draft)
            if size < limit:
                unfinished[key] = draft
        draft.add(name, parameter, position, size)
    drafts.sort(key=lambda draft: draft.position)
    counts: Counter[tuple[int, ...]] = Counter()
    buckets = []
    for number, draft in enumerate(drafts):
        bucket_name = f"hvdtrain.{kind}.{draft.group.name}.{counts[draft.group.ranks]}"
        counts[draft.group.ranks] += 1
        buckets.append(Bucket(number, bucket_name, draft.group, draft.divisor, tuple(draft.slots)))
    return buckets


@dataclass
class _Draft:
    group: Group
    divisor: int
    slots: list[Slot] = field(default_factory=list)
    size: int = 0
    position: int = 0

    def add(self, name: str, parameter: torch.nn.Parameter, position: int, size: int) -> None:
        start = self.slots[-1].stop if self.slots else 0
        self.slots.append(Slot(name, parameter, start, start + parameter.numel()))
        self.size += size
        self.position = position


class Arrivals:
    """Says when all gradients of a bucket have come, while the last backward pass of a step still runs.

    Args:
        buckets: the parameters that are watched.
        on_full: called with each bucket at most once in a step.
    """

    def __init__(self, buckets: Sequence[Bucket], on_full: Callable[[Bucket], None]) -> None:
        self._buckets, self._on_full = buckets, on_full
        self._passes = 0
        self._missing: list[list[int]] = []  # for each bucket and slot: gradients that haven't come
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, number))
            for bucket in buckets
            for number, slot in enumerate(bucket.slots)
        ]
        self._left = [0] * len(buckets)

    def begin(self, passes: int) -> None:
        """Begin a step of this many backward passes. Gradients that come at other times are let be."""
        self._passes = passes
        self._missing = [[passes] * len(bucket.slots) for bucket in self._buckets]
        self._left = [passes * len(bucket.slots) for bucket in self._buckets]

    def end(self) -> list[Bucket]:
        """End the step. Returns the buckets that didn't get full: of parameters that weren't used."""
        late = [bucket for bucket, left in zip(self._buckets, self._left, strict=True) if left or not self._passes]
        self._passes = 0
        return late

    def remove(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, bucket: Bucket, number: int, parameter: torch.nn.Parameter) -> None:
        if not self._passes:
            return
        if not self._missing[bucket.number][number]:
            raise UsageError(
                f"the gradient of {bucket.slots[number].name} came more than {self._passes} times in a step, after "
                f"it had been sent",
                fix="say how many backward passes the step has in begin(); torch.utils.checkpoint wants "
                "use_reentrant=False where checkpointed parts share a parameter",
            )
        self._missing[bucket.number][number] -= 1
        self._left[bucket.number] -= 1
        if not self._left[bucket.number]:
            self._on_full(bucket)


class Usage:
    """Which parameters had a gradient on any rank of their group, in one step.

    A parameter that nobody has used gets no gradient, as with one process: optimizers then leave it and its state
    alone, where a gradient of zeros would decay weights and momenta.
    """

    def __init__(self, buckets: Sequence[Bucket], kind: str) -> None:
        self._groups: dict[tuple[int, ...], list[Bucket]] = {}
        for bucket in buckets:
            self._groups.setdefault(bucket.group.ranks, []).append(bucket)
        self._kind = kind
        self._used: set[torch.nn.Parameter] = set()
        self._asked: list[_Question] = []

    def note(self, bucket: Bucket) -> None:
        """See which parameters have a gradient, before the bucket takes it."""
        self._used.update(slot.parameter for slot in bucket.slots if slot.parameter.grad is not None)

    def start(self) -> None:
        """Begin to ask the other ranks, when all buckets were noted."""
        for question in self._asked:
            question.wait()
        self._asked = [_Question(buckets, self._used, self._kind) for buckets in self._groups.values()]
        self._used = set()

    def finish(self) -> set[torch.nn.Parameter]:
        """The parameters that some rank has used."""
        return {parameter for question in self._asked for parameter in question.answer()}


class _Question:
    """Which parameters of one group's buckets some rank has used.

    A rank that has used all of them knows, and doesn't wait for the others' answer before it goes on.
    """

    def __init__(self, buckets: Sequence[Bucket], used: set[torch.nn.Parameter], kind: str) -> None:
        self._parameters = [slot.parameter for bucket in buckets for slot in bucket.slots]
        own = [parameter in used for parameter in self._parameters]
        self._uses_all = all(own)
        self._counts = torch.tensor(own, dtype=torch.int32)
        self._handle = None
        group = buckets[0].group
        if group.size > 1:
            name = f"hvdtrain.{kind}.{group.name}.used"
            self._handle = hvd.allreduce_async_(self._counts, op=hvd.Sum, name=name, process_set=group.process_set)

    def answer(self) -> Iterable[torch.nn.Parameter]:
        if self._uses_all:
            return self._parameters
        self.wait()
        return (one for one, count in zip(self._parameters, self._counts.tolist(), strict=True) if count)

    def wait(self) -> None:
        if self._handle is not None:
            hvd.synchronize(self._handle)
            self._handle = None


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements, in float64, of shape ()."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
