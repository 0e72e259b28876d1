"""What one process keeps of a model, and what each of four keeps that share it; and all of them under one memory limit.

Adam trains eight MLPs of 4 M parameters. `tensor` shares each matrix out; `sharded`, with samples of its own on each
rank, the gradients and Adam's state. Counted: bytes of parameters and of what the optimizer keeps, on the rank that has
most; beside them the peak resident memory of such a process, with its libraries.

The limit is on a process's private writable memory (RLIMIT_DATA), where PyTorch's CPU tensors are; address space
(RLIMIT_AS) has all libraries and shared files in it, too. It is the same number for all: what four ranks have before
the model is made, and `ROOM` of the whole model's bytes, of which one process needs 4 times (parameters, gradients and
two of Adam's).

Usage: python benchmarks/parallel_memory.py
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data_parallel import launch
from sharded_optimizer import MIB, state_bytes
from tensor_parallel import wait_for_all
from torch import nn

LAYERS, WIDTH, HIDDEN, BATCH_SIZE, STEPS = 8, 1024, 2048, 16, 3
ROOM = 3.0
LIMIT = "HVD_BENCHMARK_LIMIT"


def used_bytes() -> int:
    """This process's private writable memory, as RLIMIT_DATA counts it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024


def whole_bytes() -> int:
    """The parameters of the whole model."""
    return 4 * LAYERS * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)


def warm_up() -> None:
    """What a process loads at its first step (PyTorch's compiler, for one), and Horovod's first collective."""
    import horovod.torch as hvd

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(1, 2)).sum().backward()
    optimizer.step()
    hvd.allreduce(torch.ones(1), name="warm-up")


def train(way: str, groups: Any) -> dict[str, float]:
    """Some steps; returns this rank's bytes."""
    from hvdtrain.parallel.torch.sharded import ShardedOptimizer
    from hvdtrain.parallel.torch.tensor import ParallelMLP

    torch.manual_seed(0)
    model = nn.Sequential(*(ParallelMLP(WIDTH, HIDDEN, groups.tensor) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    begin: Callable[[], None] = optimizer.zero_grad
    finish: Callable[[], None] = lambda: None  # noqa: E731
    step: Callable[[], None] = optimizer.step
    if way == "sharded":
        replicas = groups.replicas
        sharded = ShardedOptimizer(optimizer, model.named_parameters(), lambda _: (replicas, replicas.size))
        begin, finish, step = sharded.begin, sharded.finish, sharded.step
    inputs = torch.randn(BATCH_SIZE, WIDTH)
    for _ in range(STEPS):
        begin()
        model(inputs).square().mean().backward()
        finish()
        step()
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"parameters": parameters, "optimizer": state_bytes(optimizer)}


def rank_main(way: str, folder: Path) -> None:
    """On each rank: train one way, under the limit if there is one; rank 0 writes the ranks' maxima."""
    import horovod.torch as hvd

    from hvdtrain.parallel import groups as parallel_groups
    from hvdtrain.parallel.grid import Grid

    torch.set_num_threads(1)
    size = int(os.environ["HVD_BENCHMARK_RANKS"])
    groups = parallel_groups.init(hvd, Grid(tensor=size) if way == "tensor" else Grid(data=size))
    warm_up()
    found: dict[str, float] = {"before": used_bytes()}
    if limit := int(os.environ.get(LIMIT, "0")):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        found |= train(way, groups) | {"trained": 1}
    except RuntimeError as error:
        # Others would wait for this one; one process alone may say what it died of.
        if size > 1 or "can't allocate memory" not in str(error):
            raise
        found |= {"parameters": 0, "optimizer": 0, "trained": 0}
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    largest = hvd.allreduce(torch.tensor(list(found.values()), dtype=torch.float64), op=hvd.Max)
    if groups.rank == 0:
        (folder / "result.json").write_text(json.dumps(dict(zip(found, largest.tolist(), strict=True))))
    wait_for_all()


WAYS = {"alone": ("none", 1), "tensor": ("gloo", 4), "sharded": ("gloo", 4)}


def main() -> None:
    """Print the table."""
    # Horovod's buffer for small messages: 128 MiB, unless it's told. And glibc, which after a while takes what is below
    # 32 MiB from one heap, where tensors of 8 MiB leave gaps as large as the model.
    os.environ |= {"HOROVOD_FUSION_THRESHOLD": str(8 * MIB), "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    # Four ranks on few cores may be late.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "200"
    free = {way: launch(__file__, way, *where) for way, where in WAYS.items()}
    limit = int(max(result["before"] for result in free.values()) + ROOM * whole_bytes())
    os.environ[LIMIT] = str(limit)
    limited = {way: launch(__file__, way, *where) for way, where in WAYS.items()}
    alone = free["alone"]
    print(
        f"| way | processes | parameters | Adam's state | both, of one process's | peak | under {limit / MIB:.0f} MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for way, result in free.items():
        both, all_of_it = (each["parameters"] + each["optimizer"] for each in (result, alone))
        print(
            f"| {way} | {WAYS[way][1]} | {result['parameters'] / MIB:.1f} MiB "
            f"| {result['optimizer'] / MIB:.1f} MiB, {result['optimizer'] / alone['optimizer']:.3f} "
            f"| {both / MIB:.1f} MiB, {both / all_of_it:.3f} | {result['peak'] / MIB:.0f} MiB "
            f"| {'trains' if limited[way]['trained'] else 'out of memory'} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
