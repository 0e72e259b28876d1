"""Optimizers whose state and gradients are shared out over ranks that have the same parameters.

ZeRO stages 1 and 2 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019,
section 5): each rank keeps the sums of its own part of the gradients alone, and the optimizer's state for this part;
with these it updates its part of the parameters, and all parts are gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import horovod.torch as hvd
import torch

# The public functions always make a new tensor; these fill one that is there.
from horovod.torch.mpi_ops import _allgather_async, _alltoall_async
from torch import optim

from hvdtrain.errors import UsageError
from hvdtrain.parallel.cut import bounds
from hvdtrain.parallel.torch.buckets import Arrivals, Bucket, GroupOf, Slot, Usage, plan, sum_of_squares
from hvdtrain.parallel.torch.collectives import carried
from hvdtrain.parallel.torch.memory import Memory

# As DDP's. Each bucket is two messages, and each message costs Horovod some milliseconds of agreement.
BUCKET_MB = 25.0

# They treat each element by itself, so that any range of a parameter can be updated without the rest.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
# What these optimizers keep once for all elements, where a parameter of shape () leaves that open.
_SHARED = {"step", "eta", "mu", "mu_product"}
# Buckets of full gradients that a rank holds beside those that still come.
_UNDER_WAY = 2


@dataclass(frozen=True)
class Range:
    """Which elements of a parameter, laid flat, a tensor of an optimizer is: ``start`` to ``stop``."""

    name: str
    start: int
    stop: int
    whole: int


class ShardedOptimizer:
    """Lets an optimizer work on this rank's part of the parameters (all ranks of each group together).

    Each step is ``begin(passes)``, that many backward passes, or none on a rank without samples, `finish` and `step`.
    The model's parameters then have no ``grad``: ``squared_norm`` and ``scale_gradients`` are for clipping.

    Args:
        optimizer: made over the whole parameters. It is changed: from now on its ``param_groups`` have parts of them.
            The groups' options stay, and act when they are set later.
        parameters: names and parameters of the model.
        group_of: the ranks that share each one's state out, and the number by which the sum of gradients is divided.
        bucket_mb: size of a bucket in MiB.
        kind: the beginning of the collectives' names; two optimizers that work at the same time need different ones.

    Raises:
        UsageError: the optimizer needs whole parameters, has others than these, or two of them share memory.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        group_of: GroupOf,
        *,
        bucket_mb: float = BUCKET_MB,
        kind: str = "shards",
    ) -> None:
        named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        _check_elementwise(optimizer)
        _check_separate(named)
        self.optimizer = optimizer
        self._shards = [_Shard(bucket) for bucket in plan(_optimized(optimizer, named), group_of, bucket_mb, kind)]
        buckets = [shard.bucket for shard in self._shards]
        self._arrivals = Arrivals(buckets, self._full)
        self._usage = Usage(buckets, kind)
        self._parameters = [parameter for _, parameter in named]
        self._ready: set[int] = set()
        self._sent = 0
        self._under_way: deque[_Shard] = deque()
        self._memories = [Memory() for _ in range(_UNDER_WAY)]
        self._replace()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, of this rank's part alone; `state_pieces` fits other ranks."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave on this rank."""
        self.optimizer.load_state_dict(state)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        for shard in self._shards:
            shard.forget()

    def begin(self, passes: int = 1) -> None:
        """Begin a step: gradients of the one before are gone, and those of this one are sent after so many passes."""
        self.zero_grad()
        self._ready, self._sent = set(), 0
        self._under_way.clear()
        self._arrivals.begin(passes)

    def finish(self) -> None:
        """Send what hasn't been sent, and wait for the averages of this rank's part.

        Every rank of a group has to come here in every step. A parameter that no rank of its group has used has no
        gradient.
        """
        self._arrivals.end()
        while self._sent < len(self._shards):
            self._send_next()
        self._usage.start()
        while self._under_way:
            self._under_way.popleft().receive()
        used = self._usage.finish()
        for shard in self._shards:
            shard.give_gradients(used)
        self._ready, self._sent = set(), 0

    def step(self) -> None:
        """Update this rank's part of the parameters and gather all parts."""
        self.optimizer.step()
        for handle in [shard.start_gather() for shard in self._shards if shard.bucket.travels]:
            hvd.synchronize(handle)

    def squared_norm(self, counts: Callable[[torch.nn.Parameter], bool] = lambda _: True) -> torch.Tensor:
        """Sum of the squares of the averaged gradients of this rank's part, of the parameters that count.

        Returns:
            float64 of shape (). Summed over a group it is that of the group's whole gradients.
        """
        return sum_of_squares(
            part.grad
            for shard in self._shards
            for slot, _, part in shard.parts
            if part.grad is not None and counts(slot.parameter)
        )

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply all averaged gradients."""
        for part in self.ranges:
            if part.grad is not None:
                part.grad.mul_(factor)

    @property
    def ranges(self) -> dict[torch.Tensor, Range]:
        """The optimizer's parameters, and which elements of the model's each one is."""
        return {part: where for shard in self._shards for _, where, part in shard.parts}

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        self._arrivals.remove()

    def _full(self, bucket: Bucket) -> None:
        self._ready.add(bucket.number)
        while self._sent in self._ready:
            self._send_next()

    def _send_next(self) -> None:
        """In the same order on all ranks, so that they can wait for old buckets before they send new ones."""
        if len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft().receive()
        shard = self._shards[self._sent]
        self._usage.note(shard.bucket)
        shard.send(self._memories[self._sent % _UNDER_WAY])
        self._under_way.append(shard)
        self._sent += 1

    def _replace(self) -> None:
        """Put parts in the place of the optimizer's parameters, with the state that these have."""
        parts: dict[torch.Tensor, tuple[Range, torch.nn.Parameter]] = {
            slot.parameter: (where, part) for shard in self._shards for slot, where, part in shard.parts
        }
        mine = {parameter for shard in self._shards for parameter in shard.parameters}
        for group in self.optimizer.param_groups:
            whole = group["params"]
            group["params"] = [parts[p][1] if p in parts else p for p in whole if p in parts or p not in mine]
            for parameter in (p for p in whole if p in mine):
                state = self.optimizer.state.pop(parameter, None)
                if state and parameter in parts:
                    where, part = parts[parameter]
                    self.optimizer.state[part] = {
                        key: _range_of(value, key, where, part) for key, value in state.items()
                    }


class _Shard:
    """One bucket: all its parameters in one piece of memory, and this rank's range of them."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.parameters = [slot.parameter for slot in bucket.slots]
        first = self.parameters[0]
        self._flat = torch.empty(bucket.size, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for slot in bucket.slots:
                slot.view(self._flat).copy_(slot.parameter)
                slot.parameter.data = slot.view(self._flat)
        group = bucket.group
        self._sizes = [stop - start for start, stop in self._bounds()]
        self._start, self._stop = self._bounds()[group.rank]
        self._sum = bucket.empty(self._stop - self._start)
        self._sent: tuple[torch.Tensor, Any] | None = None
        self.parts = [self._part(slot) for slot in bucket.slots if self._overlap(slot)]

    def send(self, memory: Memory) -> None:
        """Begin to sum this rank's range of the gradients; the memory is the shard's until it has received the sum.

        Horovod's reducescatter takes 3 times as long as an alltoall and the sum here with Gloo, and 1.5 times with MPI
        (32 MiB, two processes on one host); both move as many bytes.
        """
        if not self.bucket.travels:
            flat = self.bucket.gather(lambda: self._sum)
            self._sum = flat
            return
        kind = self._sum.dtype, self._sum.device
        flat = self.bucket.gather(lambda: memory.get("gradients", self.bucket.size, *kind))
        received = memory.get("received", len(self._sizes) * self._sum.numel(), *kind)
        splits = torch.tensor(self._sizes, dtype=torch.int32)
        name, process_set = self.bucket.name, self.bucket.group.process_set
        handle = _alltoall_async(flat, splits, received, torch.empty_like(splits), name, process_set)
        self._sent = (received, handle)

    def receive(self) -> None:
        """Wait for the sum."""
        if self._sent is not None:
            received, handle = self._sent
            hvd.synchronize(handle)
            first, *others = received.view(len(self._sizes), self._sum.numel())
            # One after the other: on a CPU several times as fast as a sum over the first dimension.
            self._sum.copy_(first)
            for other in others:
                self._sum += other
            self._sent = None

    def give_gradients(self, used: set[torch.nn.Parameter]) -> None:
        """Give each part its gradient."""
        for slot, where, part in self.parts:
            if slot.parameter in used:
                first = slot.start + where.start - self._start
                part.grad = self._sum[first : first + part.numel()].to(part.dtype)

    def forget(self) -> None:
        """Take the gradients away."""
        for _, _, part in self.parts:
            part.grad = None

    def start_gather(self) -> int:
        """Begin to bring all ranks' ranges of the parameters together; returns Horovod's handle."""
        # MPI wants what is sent and what comes apart; the gradients have had their use, and leave their memory.
        self.forget()
        flat = carried(self._flat)
        own = flat[self._start : self._stop]
        own = self._sum.copy_(own) if self._sum.dtype == self._flat.dtype else own.clone()
        handle: int = _allgather_async(own, flat, f"{self.bucket.name}.parameters", self.bucket.group.process_set)
        return handle

    def _bounds(self) -> list[tuple[int, int]]:
        ranks = self.bucket.group.size
        return [bounds(self.bucket.size, ranks, rank) for rank in range(ranks)]

    def _overlap(self, slot: Slot) -> bool:
        return max(slot.start, self._start) < min(slot.stop, self._stop)

    def _part(self, slot: Slot) -> tuple[Slot, Range, torch.nn.Parameter]:
        start, stop = max(slot.start, self._start), min(slot.stop, self._stop)
        where = Range(slot.name, start - slot.start, stop - slot.start, slot.stop - slot.start)
        return slot, where, torch.nn.Parameter(self._flat[start:stop])


def state_pieces(
    optimizer: optim.Optimizer | ShardedOptimizer, parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, dict[str, Any]]:
    """What an optimizer keeps on this rank, by the parameters' names and the optimizer's keys.

    Args:
        optimizer: sharded or not.
        parameters: names and parameters of the model.

    Returns:
        For each key ``(start, values)``, a flat range of the parameter's values, or what is kept once for all of them
        as it is. The values aren't copied.
    """
    inner, ranges = _ranges(optimizer, parameters)
    return {
        where.name: {key: _piece(value, key, where, part) for key, value in inner.state[part].items()}
        for part, where in ranges.items()
        if part in inner.state
    }


def load_pieces(
    optimizer: optim.Optimizer | ShardedOptimizer,
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    keys: Callable[[str], Iterable[str]],
    get: Callable[[str, str], Any],
) -> None:
    """Give an optimizer this rank's part of a state, whichever ranks have written it. Options of the groups stay.

    Args:
        optimizer: sharded or not.
        parameters: names and parameters of the model.
        keys: what there is for a parameter of this name.
        get: the whole of it for a name and a key: values of all the parameter's elements, in any shape, or what is kept
            once for all of them.
    """
    inner, ranges = _ranges(optimizer, parameters)
    groups = inner.state_dict()["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    tensors = [part for group in inner.param_groups for part in group["params"]]
    state = {}
    for number, part in zip(numbers, tensors, strict=True):
        if part in ranges:
            where = ranges[part]
            kept = {key: _range_of(get(where.name, key), key, where, part) for key in keys(where.name)}
            if kept:
                state[number] = kept
    inner.load_state_dict({"state": state, "param_groups": groups})


def _ranges(
    optimizer: optim.Optimizer | ShardedOptimizer, parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> tuple[optim.Optimizer, dict[torch.Tensor, Range]]:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.optimizer, optimizer.ranges
    return optimizer, {p: Range(name, 0, p.numel(), p.numel()) for name, p in parameters}


def _piece(value: Any, key: str, where: Range, part: torch.Tensor) -> Any:
    if _of_elements(value, key, part.numel()):
        return where.start, value.reshape(-1)
    return value


def _range_of(value: Any, key: str, where: Range, part: torch.Tensor) -> Any:
    """A part's own copy of what is kept for the whole parameter."""
    if _of_elements(value, key, where.whole):
        return value.reshape(-1)[where.start : where.stop].clone().view(part.shape)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _of_elements(value: Any, key: str, elements: int) -> bool:
    """Whether the optimizer keeps a number for each element, or one for all."""
    if not isinstance(value, torch.Tensor) or value.numel() != elements:
        return False
    return value.ndim > 0 or key not in _SHARED


def _check_elementwise(optimizer: optim.Optimizer) -> None:
    kind = type(optimizer)
    if kind not in ELEMENTWISE and not getattr(kind, "elementwise", False):
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise UsageError(
            f"the state of {kind.__name__} can't be shared out over ranks: it isn't known to treat each element of a "
            f"parameter by itself, and a rank has only some of them",
            fix=f"take one of {known}, or, if yours is like them, write `elementwise = True` in its class",
        )


def _check_separate(named: list[tuple[str, torch.nn.Parameter]]) -> None:
    """Parameters of their own are moved into flat memory, and would no longer share it."""
    places = sorted(
        (
            parameter.untyped_storage().data_ptr() + parameter.storage_offset() * parameter.element_size(),
            name,
            parameter,
        )
        for name, parameter in named
        if parameter.numel()
    )
    for (start, name, parameter), (following, other, _) in pairwise(places):
        if following < start + _extent(parameter):
            raise UsageError(
                f"the parameters {name} and {other} share memory, which ends when the optimizer's state is shared out",
                fix="register one parameter under both names: second.weight = first.weight",
            )


def _extent(parameter: torch.Tensor) -> int:
    """Bytes from a parameter's first element to the end of its last."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    return int(1 + sum((size - 1) * stride for size, stride in steps)) * int(parameter.element_size())


def _optimized(
    optimizer: optim.Optimizer, named: list[tuple[str, torch.nn.Parameter]]
) -> list[tuple[str, torch.nn.Parameter]]:
    """Those of the model's parameters that the optimizer has."""
    has = {parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad}
    if unknown := len(has - {parameter for _, parameter in named}):
        raise UsageError(
            f"{unknown} of the optimizer's {len(has)} parameters aren't among the model's",
            fix="make the optimizer from the model's own parameters",
        )
    return [(name, parameter) for name, parameter in named if parameter in has]
