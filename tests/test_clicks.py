"""The made-up clicks of the recommender tasks, and their models, in this process alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdtrain.tasks import clicks_data

ROWS = (1000, 50, 3)


def test_clicks_are_the_same_each_time_and_others_in_the_evaluation() -> None:
    first, again = (clicks_data.draw(ROWS, 500, 1, evaluation=False) for _ in range(2))
    evaluation = clicks_data.draw(ROWS, 500, 1, evaluation=True)
    other = clicks_data.draw(ROWS, 500, 2, evaluation=False)
    for name in ("ids", "numbers", "clicked", "best_log_loss"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    for clicks in (evaluation, other):
        assert not np.array_equal(first.ids, clicks.ids)


def test_ids_fill_their_tables_and_some_are_frequent() -> None:
    ids = clicks_data.draw(ROWS, 20_000, 0, evaluation=False).ids
    assert ids.shape == (20_000, 3)
    assert (ids.min(0).tolist(), ids.max(0).tolist()) == ([0, 0, 0], [999, 49, 2])
    counts = np.bincount(ids[:, 1])
    # 1 / (place + 5): the first of 50 is 54 / 5 times as frequent as the last.
    assert counts[0] / counts[49] == pytest.approx(54 / 5, rel=0.3)


def test_the_best_log_loss_is_that_of_the_true_probabilities() -> None:
    clicks = clicks_data.draw(ROWS, 50_000, 0, evaluation=False)
    probability = np.exp(-clicks.best_log_loss)
    of_click = np.where(clicks.clicked == 1, probability, 1 - probability)
    # Where clicks are said to have some probability, so many are.
    for low in (0.1, 0.3, 0.6):
        there = (of_click > low) & (of_click < low + 0.1)
        assert clicks.clicked[there].mean() == pytest.approx(of_click[there].mean(), abs=0.02)
    rate = clicks.clicked.mean()
    nothing_known = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert clicks.best_log_loss.mean() < 0.9 * nothing_known


@pytest.mark.processes
def test_models_learn_and_take_batches_without_samples() -> None:
    """On one rank, where no Horovod runs."""
    torch = pytest.importorskip("torch")
    from hvdtrain.parallel.grid import Grid
    from hvdtrain.parallel.groups import ProcessSets
    from hvdtrain.tasks.clicks_torch import Clicks

    task = Clicks(clicks_data.ClicksOptions(rows=list(ROWS), samples=4000, eval_samples=1000))
    task.groups = ProcessSets(Grid()).groups(0)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model, 0.01)

    def excess() -> float:
        metrics: dict[str, Any] = task.metrics(model, task.eval_data()[:])
        return float(metrics["excess_log_loss"].mean().detach())

    before, data = excess(), task.train_data()
    for start in range(0, 4000, 250):
        optimizer.zero_grad()
        task.loss(model, data[start : start + 250]).mean().backward()
        optimizer.step()
    assert 0 < excess() < 0.5 * before
    optimizer.zero_grad()
    task.loss(model, data[:0]).sum().backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())
