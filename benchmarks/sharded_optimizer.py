"""Steps with Adam's state shared out: hvdtrain's sharded optimizer against PyTorch's ZeroRedundancyOptimizer on DDP.

And the state's size on the rank that has most of it. The model has 8.4 M parameters.

Usage: python benchmarks/sharded_optimizer.py [ROUNDS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from data_parallel import init_gloo, time_steps
from models import mlp
from pairs import summarize
from tensor_parallel import quotient, rounds, wait_for_all

OURS = [("hvdtrain", "gloo"), ("hvdtrain", "mpi")]
MIB = 2**20


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer keeps beside the parameters, on this rank."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def by_zero(folder: Path) -> tuple[int, float, int]:
    """Rank, step time and the largest rank's bytes of ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank = init_gloo(folder)
    network, shape = mlp()
    model = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=0.001)
    taken = time_steps(model, optimizer.zero_grad, optimizer.step, shape)
    kept = torch.tensor(state_bytes(optimizer.optim))
    torch.distributed.all_reduce(kept, torch.distributed.ReduceOp.MAX)
    return rank, taken, int(kept)


def by_hvdtrain(folder: Path) -> tuple[int, float, int]:
    """Those of hvdtrain's."""
    import horovod.torch as hvd

    from hvdtrain.parallel import groups
    from hvdtrain.parallel.torch import buckets
    from hvdtrain.parallel.torch.sharded import ShardedOptimizer

    buckets.keep_whole()
    replicas = groups.init(hvd).replicas
    model, shape = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    sharded = ShardedOptimizer(optimizer, model.named_parameters(), lambda _: (replicas, replicas.size))

    def finish() -> None:
        sharded.finish()
        sharded.step()

    taken = time_steps(model, sharded.begin, finish, shape)
    kept = hvd.allreduce(torch.tensor(state_bytes(optimizer)), op=hvd.Max)
    return hvd.rank(), taken, int(kept)


WAYS = {"zero": by_zero, "hvdtrain": by_hvdtrain}


def rank_main(way: str, folder: Path) -> None:
    """On each rank: measure one way."""
    torch.manual_seed(0)
    rank, taken, kept = WAYS[way](folder)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({"step_s": taken, "state_bytes": kept}))
    wait_for_all()


def main() -> None:
    """Print the table."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    whole = 8 * sum(parameter.numel() for parameter in mlp()[0].parameters())
    print(f"Adam's whole state: {whole / MIB:.1f} MiB. State: on the rank that has most, and its part of the whole.\n")
    print("| processes | Horovod's controller | ZeRO's step | ours | quotient | ZeRO's state | ours |")
    print("|---|---|---|---|---|---|---|")
    for processes in (2, 4):
        theirs, *ours = rounds(__file__, [("zero", "none"), *OURS], processes, number)
        for (_, controller), results in zip(OURS, ours, strict=True):
            pairs = [(one["step_s"], two["step_s"]) for one, two in zip(theirs, results, strict=True)]
            found = summarize(pairs)
            kept = [of[0]["state_bytes"] for of in (theirs, results)]
            states = [f"{number / MIB:.1f} MiB, {number / whole:.3f}" for number in kept]
            print(
                f"| {processes} | {controller} | {1000 * found.base:.1f} ms | {1000 * found.ours:.1f} ms "
                f"| {quotient(pairs):.2f} | {states[0]} | {states[1]} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
