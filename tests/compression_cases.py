"""What test_compression.py looks at, on each rank: `python compression_cases.py FOLDER RANKS CASE ...`.

Each rank writes what its cases return to FOLDER/rank-N.pt. Twins are float64 sums over the ranks, made by the test.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.groups import Group, Groups, init
from hvdtrain.parallel.torch.compression import Reducer, make_reducer
from hvdtrain.parallel.torch.compression_topk import TopK

KINDS = ("none", "fp16", "bf16", "topk", "auto")
GROUPS = ("replicas", "data")  # all four ranks, and two of them
SIZES = (0, 1, 2, 3, 7, 1000, 70_001)
DTYPES = ("float64", "float16", "bfloat16", "int64")
EXTREMES = [float("nan"), float("inf"), 3e38, 1e38, 70_000.0, 1.0, 1e-30]
STEPS, ENTRIES, RATIO = 25, 2000, 0.05
ROWS, FEATURES, UPDATES = 64, 120, 140


def gradient(rank: int, size: int, seed: int = 0, dtype: str = "float32") -> torch.Tensor:
    """A rank's values, which the test makes again."""
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + rank))
    return (100 * drawn).to(getattr(torch, dtype))


def reduce(reducer: Reducer, buckets: dict[str, torch.Tensor], group: Group, *, backwards: bool = False) -> None:
    """As a training step does it: all are on their way before the first is waited for."""
    names = list(buckets)[:: -1 if backwards else 1]
    reductions = [reducer.start(buckets[name], group, f"{group.name}.{name}") for name in names]
    for reduction in reductions[1:]:  # one of them is finished without
        reduction.proceed()
    for reduction in reductions:
        reduction.finish()


def sums(groups: Groups) -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        for name in GROUPS:
            buckets = {f"sum.{kind}.{size}": gradient(hvd.rank(), size) for size in SIZES}
            reduce(make_reducer(kind), buckets, getattr(groups, name))
            found |= {(kind, name, size): bucket for size, bucket in zip(SIZES, buckets.values(), strict=True)}
    return found


def types(groups: Groups) -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        buckets = {f"type.{kind}.{dtype}": gradient(hvd.rank(), 1001, dtype=dtype) for dtype in DTYPES}
        reduce(make_reducer(kind), buckets, groups.replicas)
        found |= {(kind, dtype): bucket for dtype, bucket in zip(DTYPES, buckets.values(), strict=True)}
    return found


def extremes(groups: Groups) -> dict[Any, Any]:
    """Rank 1 has the extremes, the others zeros."""
    found = {}
    for kind in KINDS:
        values = torch.tensor(EXTREMES) if hvd.rank() == 1 else torch.zeros(len(EXTREMES))
        reduce(make_reducer(kind), {f"extremes.{kind}": values}, groups.replicas)
        found[kind] = values
    return found


def feedback(groups: Groups) -> dict[Any, Any]:
    """Everything that was applied, what is left, and how another reducer goes on with what is left."""
    reducer, group = TopK(RATIO), groups.replicas
    applied = torch.zeros(ENTRIES, dtype=torch.float64)
    sent = []
    for step in range(STEPS):
        bucket = gradient(group.rank, ENTRIES, step)
        reduce(reducer, {"feedback": bucket}, group)
        applied += bucket
        sent.append(int((bucket != 0).sum()))
    (kept,) = reducer.state_dict().values()
    left, residual = kept["residual"].double(), kept["residual"].clone()
    resumed, went_on = TopK(RATIO), {}
    resumed.load_state_dict(reducer.state_dict())
    for number, one in enumerate((reducer, resumed)):
        went_on[number] = gradient(group.rank, ENTRIES, STEPS)
        reduce(one, {"feedback": went_on[number]}, group)
    pair = TopK(RATIO)  # what was kept is of four ranks
    pair.load_state_dict({"data.feedback": {"ranks": group.size, "residual": residual}})
    of_pair = gradient(hvd.rank(), ENTRIES)
    reduce(pair, {"feedback": of_pair}, groups.data)
    (kept,) = pair.state_dict().values()
    own = gradient(hvd.rank(), ENTRIES)
    chosen = own.abs().topk(int(RATIO * ENTRIES)).indices
    dropped = torch.equal(kept["residual"], own.index_fill(0, chosen, 0))
    return {"applied": applied, "left": left, "sent": sent, "went on": went_on, "dropped": dropped}


def learns(groups: Groups) -> dict[Any, Any]:
    """Linear regression on data of each rank's own: how far the weights are from the true ones, begun at 1."""
    generator = torch.Generator().manual_seed(5 + hvd.rank())
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    truth = torch.linspace(-1, 1, FEATURES)
    found = {}
    for kind in KINDS:
        weights, reducer = torch.zeros(FEATURES), TopK(0.1) if kind == "topk" else make_reducer(kind)
        for _ in range(UPDATES):
            wrong = inputs.T @ (inputs @ (weights - truth)) / ROWS
            reduce(reducer, {f"learns.{kind}": wrong}, groups.replicas)
            weights -= 0.25 * wrong / groups.replicas.size
        found[kind] = ((weights - truth).norm() / truth.norm()).item()
    return found


def auto(groups: Groups, sizes: tuple[int, ...] = (1000, 30)) -> dict[Any, Any]:
    """Two groups on trial together; ranks begin their buckets in different orders."""
    reducer = make_reducer("auto")
    wrong = 0.0
    for step in range(16):
        for name in GROUPS:
            group = getattr(groups, name)
            buckets = {str(size): torch.full((size,), float(hvd.rank() + step)) for size in sizes}
            reduce(reducer, buckets, group, backwards=bool(hvd.rank() % 2))
            due = float(sum(rank + step for rank in group.ranks))
            wrong = max(wrong, *(float((bucket - due).abs().max()) for bucket in buckets.values()))
    return {"chosen": reducer.chosen, "why": reducer.why, "wrong": wrong}  # type: ignore[attr-defined]


def auto_large(groups: Groups) -> dict[Any, Any]:
    return auto(groups, (700_000, 300_000))


CASES = {case.__name__: case for case in (sums, types, extremes, feedback, learns, auto, auto_large)}


def main(folder: str, ranks: str, *names: str) -> None:
    groups = init(hvd, Grid(data=2, embedding=int(ranks) // 2))
    torch.save({name: CASES[name](groups) for name in names}, Path(folder, f"rank-{hvd.rank()}.pt"))
    # A rank that ended would take Horovod away from the others.
    hvd.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
