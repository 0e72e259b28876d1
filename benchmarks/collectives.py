"""Collectives of 32 MiB and of 16 bytes on one host: Horovod's under both controllers, and PyTorch's on gloo.

It tells how much of a step is Horovod itself: what moves many bytes, and what every message costs, however small. The
memory is there already, and four buckets travel at the same time, as in a step.

Usage: python benchmarks/collectives.py [ROUNDS]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from data_parallel import init_gloo
from tensor_parallel import rounds, wait_for_all

VALUES, BUCKETS, TINY, CALLS = 1 << 23, 4, 4, 15
WAYS = [("pytorch", "none"), ("horovod", "gloo"), ("horovod", "mpi")]
Waits = list[Callable[[], object]]


def by_pytorch(folder: Path) -> tuple[int, Callable[[], object], dict[str, Callable[[], Waits]]]:
    """Rank, barrier, and what begins each collective and gives what waits for it."""
    from torch import distributed

    rank = init_gloo(folder)
    whole, gathered, tiny = torch.randn(VALUES), torch.empty(VALUES), torch.zeros(TINY)
    ranks = distributed.get_world_size()
    own = whole[: VALUES // ranks].clone()
    ins, outs = whole.split(VALUES // BUCKETS), gathered.split(VALUES // BUCKETS)
    parts = gathered.split(VALUES // ranks)

    def exchange() -> Waits:
        return [distributed.all_to_all_single(out, one, async_op=True).wait for one, out in zip(ins, outs, strict=True)]

    def spread() -> Waits:
        parts[rank].copy_(own)
        return [distributed.broadcast(part, root, async_op=True).wait for root, part in enumerate(parts)]

    return (
        rank,
        distributed.barrier,
        {
            "allreduce": lambda: [distributed.all_reduce(one, async_op=True).wait for one in ins],
            "alltoall": exchange,
            "allgather": spread,
            "tiny": lambda: [distributed.all_reduce(tiny, async_op=True).wait],
        },
    )


def by_horovod(folder: Path) -> tuple[int, Callable[[], object], dict[str, Callable[[], Waits]]]:
    """Those of Horovod."""
    from functools import partial

    import horovod.torch as hvd
    from horovod.torch.mpi_ops import _allgather_async, _alltoall_async, global_process_set

    from hvdtrain.parallel.torch import buckets

    buckets.keep_whole()
    hvd.init()
    whole, gathered, tiny = torch.randn(VALUES), torch.empty(VALUES), torch.zeros(TINY)
    own = whole[: VALUES // hvd.size()].clone()
    ins, outs = whole.split(VALUES // BUCKETS), gathered.split(VALUES // BUCKETS)
    splits = torch.full((hvd.size(),), VALUES // BUCKETS // hvd.size(), dtype=torch.int32)
    received = torch.empty_like(splits)

    def waits(handles: list[int]) -> Waits:
        return [partial(hvd.synchronize, handle) for handle in handles]

    def sum_up() -> Waits:
        return waits([hvd.allreduce_async_(one, op=hvd.Sum, name=f"sum.{n}") for n, one in enumerate(ins)])

    def exchange() -> Waits:
        pairs = enumerate(zip(ins, outs, strict=True))
        return waits([_alltoall_async(a, splits, b, received, f"all.{n}", global_process_set) for n, (a, b) in pairs])

    def gather() -> Waits:
        pairs = enumerate(zip(own.split(own.numel() // BUCKETS), outs, strict=True))
        return waits([_allgather_async(a, b, f"gather.{n}", global_process_set) for n, (a, b) in pairs])

    def tell() -> Waits:
        return waits([hvd.allreduce_async_(tiny, op=hvd.Sum, name="tiny")])

    return hvd.rank(), hvd.barrier, {"allreduce": sum_up, "alltoall": exchange, "allgather": gather, "tiny": tell}


def rank_main(way: str, folder: Path) -> None:
    """On each rank: measure one way; milliseconds."""
    torch.set_num_threads(1)
    rank, barrier, collectives = {"pytorch": by_pytorch, "horovod": by_horovod}[way](folder)
    result = {}
    for name, begin in collectives.items():
        times = []
        for _ in range(CALLS):
            barrier()
            started = time.perf_counter()
            for wait in begin():
                wait()
            times.append(1000 * (time.perf_counter() - started))
        result[name] = statistics.median(times[3:])
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    wait_for_all()


def main() -> None:
    """Print the table."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(
        "| processes | | allreduce | alltoall | allgather (PyTorch: broadcasts) | 16 bytes |\n|---|---|---|---|---|---|"
    )
    for processes in (2, 4):
        for (way, controller), results in zip(WAYS, rounds(__file__, WAYS, processes, number), strict=True):
            cells = [f"{statistics.median(result[name] for result in results):.1f} ms" for name in results[0]]
            name = "PyTorch, gloo" if way == "pytorch" else f"Horovod, {controller}"
            print(f"| {processes} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
