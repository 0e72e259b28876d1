"""Steps of an 8.4 M-parameter model on two processes: hvdtrain's gradient exchange, Horovod's optimizer, PyTorch's DDP.

Each measurement starts processes of its own, those of DDP without Horovod, in turns with what they are compared to.

Usage: python benchmarks/data_parallel.py [PAIRS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from launch_overhead import BIN
from models import BATCH_SIZE, mlp
from pairs import Comparison, compare
from torch.nn import functional

WARM_UP, STEPS = 10, 50
Step = Callable[[Callable[[], Any]], None]  # Takes what runs the backward pass.


def launch(program: str, way: str, controller: str, processes: int) -> dict[str, float]:
    """Run ``program --rank WAY FOLDER`` on each rank; returns what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, program, "--rank", way, folder]
        # As `hvdtrain launch` does: Open MPI would poll without giving way.
        yields = str(int(2 * processes > (os.cpu_count() or 1)))
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HVD_BENCHMARK_RANKS": str(processes),
            "OMPI_MCA_mpi_yield_when_idle": yields,
        }
        if controller == "none":
            ranks = [
                subprocess.Popen(command, env={**env, "HVD_BENCHMARK_RANK": str(rank)}) for rank in range(processes)
            ]
            codes = [rank.wait() for rank in ranks]
            failed = any(codes)
        else:
            run = [str(BIN / "horovodrun"), "-np", str(processes), "-H", f"localhost:{processes}", f"--{controller}"]
            done = subprocess.run([*run, *command], env=env, capture_output=True, text=True)
            failed = done.returncode != 0
            if failed:
                sys.stderr.write(done.stdout + done.stderr)
        if failed:
            sys.exit(f"{way} on {controller} failed")
        result: dict[str, float] = json.loads((Path(folder) / "result.json").read_text())
        return result


def init_gloo(folder: Path) -> int:
    """PyTorch's own processes; returns the rank."""
    rank, size = int(os.environ["HVD_BENCHMARK_RANK"]), int(os.environ["HVD_BENCHMARK_RANKS"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    return rank


def time_steps(model: torch.nn.Module, begin: Callable[[], Any], finish: Callable[[], Any], shape: Any) -> float:
    """Median seconds of a step on noise."""
    torch.set_num_threads(1)
    images, labels = torch.randn(BATCH_SIZE, *shape), torch.arange(BATCH_SIZE) % 10
    times = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        begin()
        functional.cross_entropy(model(images), labels).backward()
        finish()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def by_ddp(folder: Path) -> tuple[int, float]:
    """Rank and step time of PyTorch's DistributedDataParallel on gloo."""
    rank = init_gloo(folder)
    network, shape = mlp()
    model = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    return rank, time_steps(model, optimizer.zero_grad, optimizer.step, shape)


def by_horovod(folder: Path) -> tuple[int, float]:
    """Those of Horovod's own optimizer."""
    import horovod.torch as hvd

    hvd.init()
    model, shape = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    taken = time_steps(model, optimizer.zero_grad, optimizer.step, shape)
    hvd.barrier()
    return hvd.rank(), taken


def by_exchange(folder: Path) -> tuple[int, float]:
    """Those of hvdtrain's gradient exchange."""
    import horovod.torch as hvd

    from hvdtrain.parallel import groups
    from hvdtrain.parallel.torch import buckets
    from hvdtrain.parallel.torch.exchange import GradientExchange

    buckets.keep_whole()
    replicas = groups.init(hvd).replicas
    model, shape = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    exchange = GradientExchange(model.named_parameters(), lambda _: (replicas, replicas.size))

    def finish() -> None:
        exchange.finish()
        optimizer.step()

    taken = time_steps(model, exchange.begin, finish, shape)
    hvd.barrier()
    return hvd.rank(), taken


def alone(folder: Path) -> tuple[int, float]:
    """Those of processes that don't communicate: what is left is communication."""
    rank = int(os.environ["HVD_BENCHMARK_RANK"])
    model, shape = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    return rank, time_steps(model, optimizer.zero_grad, optimizer.step, shape)


WAYS = {"ddp": by_ddp, "horovod": by_horovod, "exchange": by_exchange, "alone": alone}


def main() -> None:
    """Print the table."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 9

    def seconds(way: str, controller: str) -> float:
        return launch(__file__, way, controller, 2)["step_s"]

    print("| base | other | base's step | other's step | median difference |")
    print("|---|---|---|---|---|")
    ddp = ("ddp", "none")
    for base, other in (
        (ddp, ("exchange", "mpi")),
        (ddp, ("exchange", "gloo")),
        (("horovod", "mpi"), ("exchange", "mpi")),
        (("horovod", "gloo"), ("exchange", "gloo")),
        (("alone", "none"), ("exchange", "mpi")),
    ):
        result: Comparison = compare(partial(seconds, *base), partial(seconds, *other), pairs)
        print(
            f"| {', '.join(base)} | {', '.join(other)} | {1000 * result.base:.1f} ms | {1000 * result.ours:.1f} ms "
            f"| {result.percent:+.1f}% |",
            flush=True,
        )


def rank_main(way: str, folder: Path) -> None:
    """On each rank: measure one way."""
    rank, taken = WAYS[way](folder)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({"step_s": taken}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
