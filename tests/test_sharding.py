"""Sharding: pure, so properties over all sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.train.sharding import Share, epoch_order, shares, steps_per_epoch

SAMPLES = st.integers(1, 300)
BATCH = st.integers(1, 100)
SIZE = st.integers(1, 12)


def all_shares(samples: int, global_batch: int, size: int, epoch: int = 0) -> list[list[Share]]:
    """Step by step, the shares of all ranks."""
    order = epoch_order(samples, 7, epoch)
    return [list(step) for step in zip(*(shares(order, global_batch, rank, size) for rank in range(size)), strict=True)]


@given(SAMPLES, BATCH, SIZE)
def test_every_sample_is_taken_once_per_epoch(samples: int, global_batch: int, size: int) -> None:
    steps = all_shares(samples, global_batch, size)
    taken = np.concatenate([share.indices for step in steps for share in step])
    assert sorted(taken.tolist()) == list(range(samples))
    assert len(steps) == steps_per_epoch(samples, global_batch)


@given(SAMPLES, BATCH, SIZE)
def test_ranks_take_what_one_process_with_the_global_batch_takes(samples: int, global_batch: int, size: int) -> None:
    """Step by step, and in its order."""
    together = [np.concatenate([share.indices for share in step]) for step in all_shares(samples, global_batch, size)]
    alone = [step[0].indices for step in all_shares(samples, global_batch, 1)]
    for many, one in zip(together, alone, strict=True):
        assert many.tolist() == one.tolist()


@given(SAMPLES, BATCH, SIZE)
def test_a_step_is_spread_evenly(samples: int, global_batch: int, size: int) -> None:
    for step in all_shares(samples, global_batch, size):
        counts = [len(share.indices) for share in step]
        assert max(counts) <= math.ceil(global_batch / size)
        assert max(counts) - min(counts) <= 1
        # Rank 0 always has samples: it knows what an evaluation measures.
        assert counts[0] == max(counts) > 0
        assert {share.total for share in step} == {sum(counts)}


@given(SAMPLES, BATCH, SIZE)
def test_weighted_means_average_to_the_mean_over_the_step(samples: int, global_batch: int, size: int) -> None:
    values = np.random.default_rng(0).normal(size=samples)
    for step in all_shares(samples, global_batch, size):
        of_ranks = [share.weight * values[share.indices].mean() if len(share.indices) else 0.0 for share in step]
        every_sample = np.concatenate([values[share.indices] for share in step])
        assert np.mean(of_ranks) == pytest.approx(every_sample.mean())


def test_full_steps_need_no_weight() -> None:
    assert {share.weight for step in all_shares(64, 32, 4) for share in step} == {1.0}


def test_fewer_samples_than_ranks() -> None:
    (step,) = all_shares(2, 40, 5)
    assert [len(share.indices) for share in step] == [1, 1, 0, 0, 0]
    assert [share.weight for share in step] == [2.5, 2.5, 0, 0, 0]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    orders = {tuple(epoch_order(100, seed, epoch)) for seed in (0, 1, 2**32 - 1) for epoch in (0, 1, 2)}
    assert len(orders) == 9
    assert orders == {tuple(epoch_order(100, seed, epoch)) for seed in (0, 1, 2**32 - 1) for epoch in (0, 1, 2)}


def test_the_order_is_this_one() -> None:
    """Hosts with other versions of numpy, and a resumed run, must find the same."""
    assert epoch_order(10, 1, 2).tolist() == [6, 5, 4, 2, 1, 9, 0, 3, 8, 7]
