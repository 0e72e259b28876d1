"""Schedules and cuts of a pipeline, and pipelines of one stage: without other processes."""

from __future__ import annotations

import random
import weakref
from itertools import combinations, pairwise
from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.parallel.torch.schedules import SCHEDULES, Action, bubble, filled, most_kept

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

from torch import nn  # noqa: E402

from hvdtrain.parallel.grid import Grid  # noqa: E402
from hvdtrain.parallel.groups import ProcessSets  # noqa: E402
from hvdtrain.parallel.torch import stages  # noqa: E402
from hvdtrain.parallel.torch.pipeline import Pipeline  # noqa: E402

ALL_SMALL = [(stages, micro_batches) for stages in range(1, 6) for micro_batches in range(9)]


def simulate(lines: list[list[Action]], forward: int = 1, backward: int = 1) -> float:
    """When the last stage of all is done, if each begins an action as soon as what it needs is there."""
    done: dict[tuple[str, int, int], int] = {}
    clocks = [0] * len(lines)
    todo = [list(line) for line in lines]
    while any(todo):
        ready = []
        for stage, line in enumerate(todo):
            if not line:
                continue
            kind, number = line[0]
            neighbour = stage - 1 if kind == "forward" else stage + 1
            needs = [(kind, neighbour, number)] if 0 <= neighbour < len(lines) else []
            needs += [("forward", stage, number)] if kind == "backward" else []
            if all(need in done for need in needs):
                ready.append((stage, max([clocks[stage], *(done[need] for need in needs)])))
        assert ready, f"deadlock: {todo}"
        for stage, start in ready:
            kind, number = todo[stage].pop(0)
            clocks[stage] = done[kind, stage, number] = start + (forward if kind == "forward" else backward)
    return max(clocks)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), ALL_SMALL)
def test_every_pass_once_without_deadlock_in_the_time_of_theory(name: str, stages: int, micro_batches: int) -> None:
    lines = [SCHEDULES[name](stages, stage, micro_batches) for stage in range(stages)]
    for line in lines:
        assert sorted(line) == sorted(
            Action(kind, number) for kind in ("forward", "backward") for number in range(micro_batches)
        )
    time = simulate(lines, forward=1, backward=2)
    if micro_batches:
        assert 1 - 3 * micro_batches / time == pytest.approx(bubble(stages, micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), ALL_SMALL)
def test_what_is_kept(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        assert most_kept(SCHEDULES["gpipe"](stages, stage, micro_batches)) == micro_batches
        assert most_kept(SCHEDULES["1f1b"](stages, stage, micro_batches)) == min(micro_batches, stages - stage)


def test_a_deadlock_would_be_seen() -> None:
    line = [Action("backward", 0), Action("forward", 0)]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([line])


def test_micro_batches_without_samples_are_left_out() -> None:
    assert filled([2, 0, (0, 7), (1, 0)]) == [0, 3]


def test_cuts_are_as_good_as_the_best_of_all() -> None:
    draw = random.Random(0)  # noqa: S311 -- not for secrets
    for _ in range(200):
        costs = [draw.choice([0.0, draw.random(), draw.randint(1, 5)]) for _ in range(draw.randint(1, 8))]
        count = draw.randint(1, len(costs))
        cut = stages.balanced_cut(costs, count)
        assert [number for own in cut for number in own] == list(range(len(costs)))
        assert len(cut) == count
        assert all(cut)
        every = ([0, *ends, len(costs)] for ends in combinations(range(1, len(costs)), count - 1))
        best = min(max(sum(costs[a:b]) for a, b in pairwise(ends)) for ends in every)
        assert max(sum(costs[number] for number in own) for own in cut) == pytest.approx(best)


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(UsageError, match="3 layers, and the pipeline 4 stages"):
        stages.balanced_cut([1, 1, 1], 4)


def test_a_stage_is_a_part_of_the_whole_and_foreign_layers_are_freed() -> None:
    living: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def make() -> Any:
        nonlocal most
        layer = nn.Linear(3, 3)
        living.add(layer)
        most = max(most, len(living))
        return layer

    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    draw = torch.rand(())
    torch.manual_seed(0)
    assert stages.costs_by_parameters([make] * 6) == [12.0] * 6
    assert len(living) == 0
    own = stages.build_stage([make] * 6, range(3, 5))
    assert torch.rand(()) == draw
    # Its own two and one foreign one.
    assert (most, len(living)) == (3, 2)
    expected = {name: value for name, value in whole.state_dict().items() if name[0] in "34"}
    assert own.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in own.state_dict().items())


def test_costs_by_time_follow_the_work_and_leave_sample_and_draws_alone() -> None:
    sample = torch.ones(64, 512)
    torch.manual_seed(0)
    draw = torch.rand(())
    torch.manual_seed(0)
    makers = [lambda: nn.ReLU(inplace=True), lambda: nn.Linear(512, 512), lambda: nn.Linear(512, 2)]
    costs = stages.costs_by_time(makers, -sample)
    assert costs[1] > costs[2] > 0
    assert costs[1] > costs[0] > 0
    assert torch.equal(sample, torch.ones(64, 512))
    assert torch.rand(()) == draw
    assert stages.agreed_costs(lambda: costs, ProcessSets(Grid()).groups(0)) == costs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_one_stage_does_what_one_process_does(schedule: str, recompute: bool, no_horovod: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)).double()
    data = torch.randn(7, 3, dtype=torch.float64).split([3, 2, 2])
    torch.manual_seed(1)
    expected_losses = [model(part).square().mean() for part in data]
    sum(expected_losses).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    statistics = model[1].running_mean.clone()
    model.zero_grad()
    model[1].reset_running_stats()

    torch.manual_seed(1)
    pipeline = Pipeline(model, ProcessSets(Grid()).groups(0), schedule=schedule, recompute=recompute)
    losses = pipeline.step(
        [3, 2, 0, 2], [*data[:2], None, data[2]].__getitem__, lambda output, _: output.square().mean()
    )
    assert list(losses) == [0, 1, 3]
    assert list(losses.values()) == pytest.approx([loss.item() for loss in expected_losses], abs=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
    torch.testing.assert_close(model[1].running_mean, statistics, rtol=0, atol=1e-12)
    measured = pipeline.measured
    assert measured is not None
    assert measured.waiting_s == 0 < measured.busy_s <= measured.total_s
    seen = []
    pipeline.forward_only([3, 0, 2], lambda number: data[number // 2], lambda output, number: seen.append(number))
    assert seen == [0, 2]
    assert pipeline.step([], data.__getitem__, lambda output, _: output.sum()) == {}


def test_wrong_schedules_and_losses() -> None:
    groups = ProcessSets(Grid()).groups(0)
    with pytest.raises(UsageError, match="no pipeline schedule 'zb'"):
        Pipeline(nn.Linear(1, 1), groups, schedule="zb")
    with pytest.raises(UsageError, match=r"loss of micro-batch 1 has shape \[2, 1\]"):
        Pipeline(nn.Linear(1, 1), groups).step([0, 2], lambda _: torch.ones(2, 1), lambda output, _: output)


@pytest.fixture
def no_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    import horovod.torch as hvd

    for name in ("broadcast_async_", "synchronize", "poll"):
        monkeypatch.setattr(hvd, name, None)
