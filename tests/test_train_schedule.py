"""The learning rate of each step."""

from __future__ import annotations

import math

import pytest

from hvdtrain.train.options import Options
from hvdtrain.train.schedule import Schedule, scaled_rate


def rates(size: int = 4, steps_per_epoch: int = 10, **options: object) -> list[float]:
    parsed = Options.model_validate(options)
    schedule = Schedule(parsed, size=size, steps_per_epoch=steps_per_epoch)
    return [schedule(step) for step in range(parsed.epochs * steps_per_epoch)]


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_scaling_by_the_number_of_workers(scaling: str, factor: float) -> None:
    options = Options(lr=0.1, lr_scaling=scaling)  # type: ignore[arg-type]
    assert scaled_rate(options, 4) == pytest.approx(0.1 * factor)
    assert rates(lr=0.1, lr_scaling=scaling) == pytest.approx([0.1 * factor] * 10)


def test_warm_up_to_a_scaled_rate_starts_at_the_unscaled_one() -> None:
    found = rates(lr=0.1, lr_scaling="linear", warmup_epochs=1.0, epochs=2)
    assert found[:10] == pytest.approx([0.1 + 0.03 * (step + 1) for step in range(10)])
    assert found[9:] == pytest.approx([0.4] * 11)


def test_warm_up_without_scaling_starts_at_zero() -> None:
    assert rates(lr=0.1, warmup_epochs=0.5)[:6] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])


def test_one_worker_needs_no_warm_up_to_a_scaled_rate() -> None:
    assert rates(size=1, lr=0.1, lr_scaling="linear", warmup_epochs=1.0) == pytest.approx([0.1] * 10)


def test_decay_begins_where_the_warm_up_ends_and_would_reach_zero_after_the_last_step() -> None:
    linear = rates(lr=1.0, warmup_epochs=1.0, lr_decay="linear", epochs=3)
    assert linear[10:] == pytest.approx([1 - step / 20 for step in range(20)])
    cosine = rates(lr=1.0, warmup_epochs=1.0, lr_decay="cosine", epochs=3)
    assert cosine[10:] == pytest.approx([(1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)])
    assert min(cosine) > 0


def test_warm_up_for_the_whole_training() -> None:
    assert rates(lr=1.0, warmup_epochs=1.0, lr_decay="cosine") == pytest.approx([0.1 * n for n in range(1, 11)])


def test_a_step_between_whole_ones_is_never_above_the_rate() -> None:
    """After a change of the number of workers, with a warm-up of one step."""
    schedule = Schedule(Options(lr=0.1, warmup_epochs=0.1), size=1, steps_per_epoch=10)
    assert [schedule(step) for step in (0, 0.5, 1)] == pytest.approx([0.1, 0.1, 0.1])
