"""What each rank of test_parallel_pipeline.py runs: pipelines against the same model in one process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.parallel import groups as parallel_groups
from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.torch.collectives import all_reduce
from hvdtrain.parallel.torch.pipeline import Pipeline
from hvdtrain.parallel.torch.stages import agreed_costs, balanced_cut, build_stage, costs_by_parameters

WIDTH = 6
STEPS = 3


class Fork(nn.Module):
    """Gives a tuple: floats, integers, a boolean scalar, and floats without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = self.inner(x)
        return inner, (x > 0).long(), torch.tensor(True), torch.ones_like(x), x[:0]


class Middle(nn.Module):
    """A tuple in and out, one of whose tensors comes in non-contiguous memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, number, flag, ones, empty = value
        return self.inner(x).t(), number, flag, ones, empty


class Join(nn.Module):
    def forward(self, value: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, number, flag, ones, empty = value
        assert flag.dtype == torch.bool
        assert flag.item()
        assert empty.shape == (0, WIDTH)
        return x.t() * number + ones


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


# In-place layers begin stages; with four stages each of a model's four groups is one.
PLAIN: list[Callable[[], nn.Module]] = [
    linear,
    lambda: nn.Sequential(nn.ReLU(inplace=True), linear()),
    lambda: nn.Sequential(nn.Tanh(), nn.BatchNorm1d(WIDTH), linear()),
    lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 1)),
]
TUPLES: list[Callable[[], nn.Module]] = [Fork, Middle, Join, lambda: nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 1))]
DROPPING: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(linear(), nn.Dropout(0.4), nn.Tanh()) for _ in range(4)
]


# Computes in double precision and rounds on the way: one process's numbers are the pipeline's. Two stages hand over
# bfloat16, four all of them.
ROUNDING: list[Callable[[], nn.Module]] = [
    lambda dtype=dtype: nn.Sequential(Cast(torch.float64), linear(), Cast(dtype))  # type: ignore[misc]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
]


def samples(step: int, sizes: list[int], replica: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return list(torch.randn(sum(sizes), WIDTH, dtype=torch.float64, generator=generator).split(sizes))


def loss(output: torch.Tensor, number: int) -> torch.Tensor:
    return (output.double() - number).square().mean()


def sizes_of(step: int, replica: int) -> list[int]:
    """Uneven, with an empty one, and in the last step none at all for one of the replicas."""
    if replica and step == STEPS - 1:
        return []
    return [[4, 3, 4, 0, 4, 4], [4], [2, 4]][step]


class Case:
    """The stage and its twin, from the same seed."""

    def __init__(self, name: str, groups: Any, makers: list[Callable[[], nn.Module]], **options: Any) -> None:
        self.name = f"{name}, {options}"
        self.groups = groups
        torch.manual_seed(3)
        self.twin = nn.Sequential(*(make() for make in makers)).double()
        torch.manual_seed(3)
        costs = agreed_costs(lambda: costs_by_parameters(makers), groups)
        self.cut = balanced_cut(costs, groups.grid.pipeline)
        self.stage = build_stage(makers, self.cut[groups.coordinates["pipeline"]]).double()
        self.waits: set[str] = set()
        self.pipeline = Pipeline(self.stage, groups, waiting=self.waiting, **options)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        self.waits.add(text)
        yield

    def step(self, step: int) -> None:
        replica, sizes = self.groups.replicas.rank, sizes_of(step, self.groups.replicas.rank)
        data = samples(step, sizes, replica)
        found = self.pipeline.step(sizes, data.__getitem__, loss)
        expected = {number: loss(self.twin(part), number) for number, part in enumerate(data) if len(part)}
        if expected:
            sum(expected.values()).backward()
        assert list(found) == (list(expected) if self.pipeline.is_last else [])
        for number, value in found.items():
            self.same(f"loss {number} of step {step}", value, expected[number])

    def compare_gradients(self) -> None:
        twin = dict(self.twin.named_parameters())
        for name, parameter in self.stage.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None
                continue
            expected = all_reduce(twin[name].grad, self.groups.replicas)
            self.same(name, all_reduce(parameter.grad, self.groups.replicas), expected)
        buffers = dict(self.twin.named_buffers())
        for name, buffer in self.stage.named_buffers():
            self.same(name, buffer, buffers[name])

    def evaluate(self) -> None:
        self.stage.eval(), self.twin.eval()
        sizes = [3, 4, 0, 4, 4, 4, 1]
        data = samples(9, sizes, self.groups.replicas.rank)
        seen = {}
        self.pipeline.forward_only(sizes, data.__getitem__, lambda output, number: seen.update({number: output}))
        assert list(seen) == ([n for n, size in enumerate(sizes) if size] if self.pipeline.is_last else [])
        for number, output in seen.items():
            assert not output.requires_grad
            self.same(f"output {number}", output, self.twin(data[number]))

    def same(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(
            found, expected.detach(), rtol=0, atol=1e-10, msg=lambda text: f"{self.name}, {what}: {text}"
        )


def against_the_twin(groups: Any) -> None:
    for name, makers, schedule, recompute in (
        ("plain", PLAIN, "gpipe", False), ("plain", PLAIN, "1f1b", True),
        ("tuples", TUPLES, "gpipe", True), ("tuples", TUPLES, "1f1b", False),
        ("rounding", ROUNDING, "1f1b", False),
    ):  # fmt: skip
        case = Case(name, groups, makers, schedule=schedule, recompute=recompute)
        for step in range(STEPS):
            case.step(step)
        case.compare_gradients()
        case.evaluate()
        stage = groups.coordinates["pipeline"]
        if not case.pipeline.is_first:
            assert f"activations of stage {stage - 1}, micro-batch 4" in case.waits
        if not case.pipeline.is_last:
            assert f"gradients of stage {stage + 1}, micro-batch 4" in case.waits
        measured = case.pipeline.measured
        assert measured
        assert measured.busy_s + measured.waiting_s <= measured.total_s


def dropout_when_computed_again(groups: Any) -> None:
    """The same draws with and without recomputation, in both passes and for what follows."""
    for schedule in ("gpipe", "1f1b"):
        found = []
        for recompute in (False, True):
            case = Case("dropout", groups, DROPPING, schedule=schedule, recompute=recompute)
            torch.manual_seed(groups.rank)
            case.pipeline.step(sizes_of(0, 0), samples(0, sizes_of(0, 0), 0).__getitem__, loss)
            found.append([*(parameter.grad for parameter in case.stage.parameters()), torch.rand(())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def frozen_first_stage(groups: Any) -> None:
    """Its output has no gradient; those of later stages have."""
    case = Case("frozen", groups, PLAIN)
    case.twin[: case.cut[0].stop].requires_grad_(False)
    case.stage.requires_grad_(not case.pipeline.is_first)
    case.step(0)
    case.compare_gradients()


def changed_shapes(groups: Any) -> None:
    """Sizes may hold lengths. Where they don't and should, the stage says so itself, and sends nothing."""
    makers: list[Callable[[], nn.Module]] = [nn.Identity]
    pipeline = Pipeline(build_stage(makers, range(1)), groups)
    sizes = [(3, 2), (3, 5)]
    found = pipeline.step(sizes, lambda number: torch.ones(sizes[number]), lambda output, _: output.sum())
    assert [float(value) for value in found.values()] == ([6, 15] if pipeline.is_last else [])
    if not pipeline.is_first:
        return
    # Of a size that is new, so that nothing is under way; then of one that is known: there the job would end.
    for size, wrong, message in (((9, 9), {}, "gives a dict"), ((3, 2), torch.ones(3, 4), "and before it gave")):
        with pytest.raises(UsageError, match=message):
            pipeline.step([size], {0: wrong}.__getitem__, lambda *_: torch.zeros(()))


def main() -> None:
    torch.set_num_threads(1)
    groups = parallel_groups.init(hvd, Grid.from_text(sys.argv[1]))
    for case in (against_the_twin, dropout_when_computed_again, frozen_first_stage, changed_shapes):
        case(groups)
    sys.stdout.write(f"RANK {hvd.rank()} DONE\n")
    hvd.barrier()


if __name__ == "__main__":
    main()
