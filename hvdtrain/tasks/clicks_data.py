"""Made-up clicks whose probabilities are known: what a recommender is to learn, and how well it can be learned at all.

A sample has an id in each of several fields, such as user, page and device, some of which are far more frequent than
others, and a few numbers. Each id has a hidden vector; the click's log-odds are the scaled sum of all products of two
fields' vectors, as in a factorization machine (Rendle, "Factorization Machines", 2010, equation 1), and of a weighted
sum of the numbers. Whether there is a click is drawn with that probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hvdtrain.train.options import Options

ROWS = (100_000, 20_000, 5_000, 1_000, 200, 50, 12, 3)
NUMBERS = 4
_HIDDEN = 4
_BIAS = -1.5
# Popularity of a field's ids, the most frequent first: 1 / (place + this), as words have it (Zipf).
_FLATTENING = 5.0


class ClicksOptions(Options):
    """Options of the two tasks `Clicks`."""

    rows: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2)] = Field(list(ROWS))
    """Rows of each field's embedding table."""

    width: Annotated[int, Field(ge=1)] = 16
    """Size of an embedding's vector."""

    hidden: Annotated[int, Field(ge=1)] = 64
    """Units of the hidden layer on top; the one at the bottom has half as many."""

    samples: Annotated[int, Field(ge=1)] = 300_000
    """Training samples."""

    eval_samples: Annotated[int, Field(ge=1)] = 20_000
    """Samples of the evaluation."""

    data_seed: Annotated[int, Field(ge=0)] = 0
    """Of the made-up clicks."""


@dataclass(frozen=True)
class Clicks:
    """Samples.

    Attributes:
        ids: int64 ``[samples, fields]``.
        numbers: float32 ``[samples, NUMBERS]``, normally distributed.
        clicked: float32 ``[samples]``, 0 or 1.
        best_log_loss: float32 ``[samples]``, of a prediction of the true probability: no model has less on average.
    """

    ids: NDArray[np.int64]
    numbers: NDArray[np.float32]
    clicked: NDArray[np.float32]
    best_log_loss: NDArray[np.float32]


def draw(rows: Sequence[int], samples: int, seed: int, *, evaluation: bool) -> Clicks:
    """Samples of the seed's world, the same in each call; those of the evaluation are others than the training's.

    Args:
        rows: number of ids of each field, of two at least.
        samples: how many.
        seed: of the hidden vectors and of the samples.
        evaluation: whether they are for the evaluation.
    """
    world = np.random.default_rng([seed, 0])
    weights = world.normal(size=NUMBERS)
    hidden = [world.normal(size=(count, _HIDDEN)) for count in rows]
    sampler = np.random.default_rng([seed, 2 if evaluation else 1])
    ids = np.stack([_draw_ids(sampler, count, samples) for count in rows], axis=1)
    numbers = sampler.normal(size=(samples, NUMBERS)).astype(np.float32)
    vectors = np.stack([table[ids[:, field]] for field, table in enumerate(hidden)], axis=1)
    pairs = len(rows) * (len(rows) - 1) / 2
    # Both parts have a variance of one, or near it.
    log_odds = _BIAS + _products(vectors) / np.sqrt(pairs * _HIDDEN) + numbers @ weights / np.sqrt(NUMBERS)
    probability = 1 / (1 + np.exp(-log_odds))
    clicked = sampler.random(samples) < probability
    best = -np.log(np.where(clicked, probability, 1 - probability))
    return Clicks(ids, numbers, clicked.astype(np.float32), best.astype(np.float32))


def _products(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of the products of all pairs of a sample's vectors (Rendle 2010, lemma 3.1)."""
    result: NDArray[np.float64] = ((vectors.sum(1) ** 2).sum(-1) - (vectors**2).sum((1, 2))) / 2
    return result


def _draw_ids(sampler: np.random.Generator, count: int, samples: int) -> NDArray[np.int64]:
    shares = np.cumsum(1 / (np.arange(count) + _FLATTENING))
    return np.searchsorted(shares / shares[-1], sampler.random(samples), side="right").astype(np.int64)
