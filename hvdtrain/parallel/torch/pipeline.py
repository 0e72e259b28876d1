"""Pipeline parallelism: each rank computes one stage of the model, and hands activations and gradients to neighbours.

They travel as Horovod's broadcasts within the two ranks of neighbouring stages. Both ends start a broadcast without
waiting for it: the sender computes on at once, and the receiver has asked for its next micro-batch before it computes
the present one.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Literal, NamedTuple

import horovod.torch as hvd
import torch
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Group, Groups
from hvdtrain.parallel.torch.collectives import name_of
from hvdtrain.parallel.torch.schedules import SCHEDULES, Measured, Size, filled

# Of the tensors that stages hand over; Horovod sees bits only, since it refuses bfloat16 and bool, and NCCL int16.
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
# Numbers in the message that says what the tensors of a size are like.
_HEADER = 128
# Micro-batches without a backward pass that may be under way at once between two stages.
_UNDER_WAY = 4


class Pipeline:
    """One rank's stage of a pipeline. Every rank of the pipeline makes one, and all call the same methods alike.

    A pipeline of one stage never calls Horovod.

    Args:
        stage: this rank's layers, called with one argument: a tensor, or a tuple of tensors where the layer before
            gives one (see `hvdtrain.parallel.torch.stages.build_stage`).
        groups: this rank's place.
        schedule: ``1f1b`` or ``gpipe`` (see `hvdtrain.parallel.torch.schedules`).
        recompute: keep each micro-batch's input alone, and compute its activations again before its backward pass,
            with the same random draws; running statistics are counted once (Chen et al., "Training Deep Nets with
            Sublinear Memory Cost", 2016). The last stage then computes each micro-batch once, right before its
            backward pass.
        waiting: entered around each wait for a neighbour, with what it waits for.
        device: where received tensors go; None: where the stage's parameters are, or PyTorch's default.

    Attributes:
        measured: the last `step`; None before the first.

    Raises:
        UsageError: there is no schedule of that name.
    """

    def __init__(
        self,
        stage: nn.Module,
        groups: Groups,
        *,
        schedule: str = "1f1b",
        recompute: bool = False,
        waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        device: torch.device | None = None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise UsageError(f"there is no pipeline schedule {schedule!r}", fix=f"take one of {', '.join(SCHEDULES)}")
        self.measured: Measured | None = None
        self._stage = stage
        self._number = number = groups.coordinates["pipeline"]
        self._stages = groups.grid.pipeline
        self._schedule = SCHEDULES[schedule]
        self._recompute = recompute
        self._waiting = waiting
        if device is None:
            tensor = next(chain(stage.parameters(), stage.buffers()), None)
            device = torch.get_default_device() if tensor is None else tensor.device
        self._device = device
        self._before = _Link(groups.before, number - 1, device, self._wait) if groups.before else None
        self._after = _Link(groups.after, number + 1, device, self._wait) if groups.after else None
        self._busy_s = self._waiting_s = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this stage calls `inputs`."""
        return self._before is None

    @property
    def is_last(self) -> bool:
        """Whether this stage calls `loss` and `use`."""
        return self._after is None

    def step(
        self,
        micro_batches: Sequence[Size],
        inputs: Callable[[int], Any],
        loss: Callable[[Any, int], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Forward and backward passes of all micro-batches; gradients are added to ``.grad``.

        Args:
            micro_batches: the size of each, the same on all stages. Those without samples are left out.
            inputs: gives the first stage's input of the micro-batch of that number, from 0.
            loss: gives the scalar to be differentiated, from the last stage's output and the micro-batch's number.

        Returns:
            On the last stage each micro-batch's loss by its number, without gradient; elsewhere nothing.

        Raises:
            UsageError: a stage's output or the loss isn't what can be handed over or differentiated.
        """
        numbers = filled(micro_batches)
        actions = self._schedule(self._stages, self._number, len(numbers))
        passes = [_Pass(kind, numbers[slot], slot, (True, micro_batches[numbers[slot]])) for kind, slot in actions]
        kept: dict[int, _Kept] = {}
        losses = {}
        with self._measuring():
            inbox = _Inbox(self._needs(passes))
            for each in passes:
                if each.kind == "forward":
                    kept[each.slot] = self._forward(each, inbox, inputs, loss)
                else:
                    outputs = self._backward(each, inbox, kept.pop(each.slot))
                    if self.is_last:
                        losses[each.micro_batch] = outputs[0].detach()
            self._settle()
        return losses

    def forward_only(
        self,
        micro_batches: Sequence[Size],
        inputs: Callable[[int], Any],
        use: Callable[[Any, int], object],
    ) -> None:
        """Forward passes of all micro-batches without gradients; the last stage calls `use` with each output.

        Args:
            micro_batches: as for `step`; there may be many: few are under way at once.
            inputs: as for `step`.
            use: gets the output and the micro-batch's number.
        """
        passes = [
            _Pass("forward", number, place % _UNDER_WAY, (False, micro_batches[number]))
            for place, number in enumerate(filled(micro_batches))
        ]
        inbox = _Inbox(self._needs(passes))
        with torch.no_grad():
            for each in passes:
                output = self._stage(inputs(each.micro_batch) if self.is_first else inbox.take())
                if self._after:
                    self._after.send_activations(each, output)
                else:
                    use(output, each.micro_batch)
        self._settle()

    def _forward(
        self, each: _Pass, inbox: _Inbox, inputs: Callable[[int], Any], loss: Callable[[Any, int], torch.Tensor]
    ) -> _Kept:
        if self.is_first:
            with self._computing():
                value, leaves = inputs(each.micro_batch), []
        else:
            value = inbox.take()
            leaves = [tensor.requires_grad_() for tensor in _floating(_tensors(value))]
        if self._after is None:

            def losses() -> list[torch.Tensor]:
                with self._computing():
                    return [loss(self._stage(_copy(value)), each.micro_batch)]

            made = [] if self._recompute else losses()
            return _Kept(leaves, losses if self._recompute else lambda: made)
        random_state = self._random_state()
        with self._computing(), torch.set_grad_enabled(not self._recompute):
            output = self._stage(_copy(value))
        self._after.send_activations(each, output)
        if self._recompute:
            return _Kept(leaves, lambda: self._run_again(value, random_state))
        kept = _floating(_tensors(output))
        return _Kept(leaves, lambda: kept)

    def _backward(self, each: _Pass, inbox: _Inbox, kept: _Kept) -> list[torch.Tensor]:
        # Before the gradients are waited for: if it means computing again, that fills the time.
        outputs = kept.outputs()
        if self.is_last and outputs[0].ndim:
            raise UsageError(
                f"the loss of micro-batch {each.micro_batch} has shape {list(outputs[0].shape)}",
                fix="return a scalar, such as the mean over the samples",
            )
        gradients = [None] if self.is_last else _tensors(inbox.take())
        with self._computing():
            pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward(*zip(*pairs, strict=True))
        if self._before:
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.leaves]
            self._before.send(each, "gradients", found)
        return outputs

    def _random_state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_gpu = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_gpu

    def _run_again(self, value: Any, state: tuple[torch.Tensor, torch.Tensor | None]) -> list[torch.Tensor]:
        on_cpu, on_gpu = state
        with self._computing(), torch.random.fork_rng(devices=[] if on_gpu is None else [self._device]):
            torch.set_rng_state(on_cpu)
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu, self._device)
            # On copies of the buffers, so that running statistics aren't counted twice.
            buffers = {name: buffer.clone() for name, buffer in self._stage.named_buffers()}
            return _floating(_tensors(torch.func.functional_call(self._stage, buffers, (_copy(value),))))

    def _needs(self, passes: Iterable[_Pass]) -> Iterator[tuple[_Link, _Pass]]:
        """What this stage receives, in the order in which it needs it."""
        for each in passes:
            link = self._before if each.kind == "forward" else self._after
            if link:
                yield link, each

    def _settle(self) -> None:
        for link in filter(None, (self._before, self._after)):
            link.settle()

    def _wait(self, text: str, handles: list[int]) -> None:
        started = time.perf_counter()
        with self._waiting(text):
            for handle in handles:
                hvd.synchronize(handle)
        self._waiting_s += time.perf_counter() - started

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._busy_s += time.perf_counter() - started

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        self._busy_s = self._waiting_s = 0.0
        started = time.perf_counter()
        yield
        self.measured = Measured(self._busy_s, self._waiting_s, time.perf_counter() - started)


class _Pass(NamedTuple):
    """A micro-batch's way through the stages in one direction.

    Attributes:
        kind: the direction.
        micro_batch: its number.
        slot: what stands for it in names; no two that are under way at once have the same.
        key: what the shapes and dtypes depend on.
    """

    kind: Literal["forward", "backward"]
    micro_batch: int
    slot: int
    key: tuple[bool, Size]


class _Kept(NamedTuple):
    """What the backward pass of a micro-batch needs.

    Attributes:
        leaves: the received tensors that get gradients.
        outputs: gives what is differentiated: the loss, or the stage's floating outputs.
    """

    leaves: list[torch.Tensor]
    outputs: Callable[[], list[torch.Tensor]]


class _Layout(NamedTuple):
    """What a stage hands over: one tensor or a tuple, of these dtypes and shapes."""

    is_tuple: bool
    parts: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, output: Any, stage: int) -> _Layout:
        tensors = output if isinstance(output, tuple) else (output,)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
                found = tensor.dtype if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
                raise UsageError(
                    f"stage {stage} of the pipeline gives {found}, which can't be handed to the next",
                    fix="cut behind a layer that gives a tensor or a tuple of tensors, real numbers or integers",
                )
        return cls(isinstance(output, tuple), tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors))

    def to_header(self) -> torch.Tensor:
        numbers = [int(self.is_tuple), len(self.parts)]
        for dtype, shape in self.parts:
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        if len(numbers) > _HEADER:
            raise UsageError(
                f"a stage of the pipeline gives {len(self.parts)} tensors, too many to be handed over",
                fix="cut where fewer tensors go on",
            )
        return torch.tensor(numbers + [0] * (_HEADER - len(numbers)))

    @classmethod
    def from_header(cls, header: torch.Tensor) -> _Layout:
        numbers = iter(header.tolist())
        is_tuple, count = next(numbers), next(numbers)
        parts = []
        for _ in range(count):
            dtype, dims = _DTYPES[next(numbers)], next(numbers)
            parts.append((dtype, tuple(next(numbers) for _ in range(dims))))
        return cls(bool(is_tuple), tuple(parts))

    def of_gradients(self) -> _Layout:
        return _Layout(True, tuple((dtype, shape) for dtype, shape in self.parts if dtype.is_floating_point))


class _Arrival(NamedTuple):
    layout: _Layout
    tensors: list[torch.Tensor]
    handles: list[int]


class _Link:
    """The way to a neighbouring stage and back.

    The stage before announces the layout of its activations with the first micro-batch of a size; the gradients'
    follows from it.
    """

    def __init__(
        self, pair: Group, neighbour: int, device: torch.device, wait: Callable[[str, list[int]], None]
    ) -> None:
        self._pair = pair
        self._own_rank, self._other_rank = pair.ranks[pair.rank], pair.ranks[1 - pair.rank]
        self._neighbour = neighbour
        self._device = device
        self._wait = wait
        self._layouts: dict[tuple[bool, Size], _Layout] = {}
        self._sent: dict[tuple[str, int], list[int]] = {}

    def send_activations(self, each: _Pass, output: Any) -> None:
        layout = _Layout.of(output, self._neighbour - 1)
        known = self._layouts.setdefault(each.key, layout)
        if known is layout:
            self.send(each, "layout", [layout.to_header()])
        elif known != layout:
            raise UsageError(
                f"stage {self._neighbour - 1} of the pipeline gives {layout.parts} for a micro-batch of size "
                f"{each.key[1]}, and before it gave {known.parts}",
                fix="let the sizes of micro-batches hold all that shapes depend on, as (samples, length)",
            )
        self.send(each, "activations", _tensors(output))

    def send(self, each: _Pass, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to send. The tensors must stay as they are until then."""
        done = [key for key, handles in self._sent.items() if key == (what, each.slot) or all(map(hvd.poll, handles))]
        for key in done:
            self._settle(key)
        self._sent[what, each.slot] = self._start(self._own_rank, each, what, tensors)

    def begin(self, each: _Pass) -> _Arrival | None:
        """Begin to receive; None where the layout isn't known yet."""
        layout = self._layouts.get(each.key)
        if layout is None:
            return None
        if each.kind == "backward":
            layout = layout.of_gradients()
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in layout.parts]
        what = "activations" if each.kind == "forward" else "gradients"
        return _Arrival(layout, tensors, self._start(self._other_rank, each, what, tensors))

    def end(self, each: _Pass, begun: _Arrival | None) -> Any:
        """Wait until what `begin` began is there: a tensor or a tuple."""
        what = "activations" if each.kind == "forward" else "gradients"
        text = f"{what} of stage {self._neighbour}, micro-batch {each.micro_batch}"
        if begun is None:
            begun = self.begin(each) or self._begin_with_layout(each, text)
        self._wait(text, begun.handles)
        return tuple(begun.tensors) if begun.layout.is_tuple else begun.tensors[0]

    def settle(self) -> None:
        """Wait until all that was sent is with the neighbour."""
        for key in list(self._sent):
            self._settle(key)

    def _begin_with_layout(self, each: _Pass, text: str) -> _Arrival:
        header = torch.empty(_HEADER, dtype=torch.int64, device="cpu")
        self._wait(text, self._start(self._other_rank, each, "layout", [header]))
        self._layouts[each.key] = _Layout.from_header(header)
        begun = self.begin(each)
        assert begun is not None
        return begun

    def _settle(self, key: tuple[str, int]) -> None:
        self._wait(f"stage {self._neighbour} to take {key[0]}", self._sent.pop(key))

    def _start(self, sender: int, each: _Pass, what: str, tensors: Iterable[torch.Tensor]) -> list[int]:
        handles = []
        for part, tensor in enumerate(tensors):
            bits = tensor.detach().contiguous().view(_BITS[tensor.itemsize])
            if bits.numel():
                name = name_of(f"{what}.{each.slot}.{part}", bits, self._pair)
                handles.append(
                    hvd.broadcast_async_(bits, sender, name=name, process_set=self._pair.process_set),
                )
        return handles


class _Inbox:
    """What a stage receives in a step, in order; the next is always asked for before the present one is computed."""

    def __init__(self, needs: Iterable[tuple[_Link, _Pass]]) -> None:
        self._needs = deque(needs)
        self._look_ahead()

    def take(self) -> Any:
        link, each = self._needs.popleft()
        taken = link.end(each, self._begun)
        self._look_ahead()
        return taken

    def _look_ahead(self) -> None:
        self._begun: _Arrival | None = None
        if self._needs:
            link, each = self._needs[0]
            self._begun = link.begin(each)


def _tensors(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _floating(tensors: Iterable[Any]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()]


def _copy(value: Any) -> Any:
    """A layer that works in place may change neither what is to have a gradient nor what is computed with again."""
    copies = tuple(tensor.clone() if _floating([tensor]) else tensor for tensor in _tensors(value))
    return copies if isinstance(value, tuple) else copies[0]
