"""A step of transformer blocks on ranks that share their matrices: hvdtrain's layers against PyTorch's DTensor on gloo.

Both begin with the same weights and see the same tokens; the losses after all steps are compared, too.

Usage: python benchmarks/tensor_parallel.py [ROUNDS]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from data_parallel import init_gloo, launch
from pairs import summarize
from torch import nn
from torch.nn import functional

WARM_UP, STEPS = 5, 20
OURS = [("hvdtrain", "gloo"), ("hvdtrain", "mpi")]
BLOCKS, HEADS = 2, 8


@dataclass(frozen=True)
class Size:
    """Of the blocks, and of a step's input."""

    width: int
    samples: int
    length: int


# One in which a step computes, and one in which it waits for messages of 128 KiB.
SIZES = {"wide": Size(512, 4, 128), "narrow": Size(256, 2, 64)}


class Attention(nn.Module):  # type: ignore[misc]
    """Plain self-attention, whose first projection has query, key and value of one head next to each other.

    So PyTorch can cut it in one piece, as hvdtrain's is.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head_width = width // HEADS
        for parameter in self.qkv.parameters():
            by_head = parameter.detach().unflatten(0, (3, HEADS, self.head_width)).transpose(0, 1)
            parameter.data = by_head.reshape(parameter.shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[samples, length, width]`` to the same."""
        query, key, value = self.qkv(inputs).unflatten(-1, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class Block(nn.Module):  # type: ignore[misc]
    """Attention and MLP, each behind a normalization and beside a residual connection."""

    def __init__(self, width: int, attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.LayerNorm(width), attention()
        self.before_mlp, self.mlp = nn.LayerNorm(width), mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[samples, length, width]`` to the same."""
        inputs = inputs + self.attention(self.before_attention(inputs))
        return inputs + self.mlp(self.before_mlp(inputs))


def by_dtensor(folder: Path) -> tuple[int, Callable[[int], nn.Module]]:
    """Rank, and what makes blocks of a width that torch.distributed.tensor.parallel has cut as its manual says."""
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank = init_gloo(folder)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    cut = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
    }

    def block(width: int) -> nn.Module:
        def mlp() -> nn.Module:
            return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        return parallelize_module(Block(width, partial(Attention, width), mlp), mesh, cut)

    return rank, block


def by_hvdtrain(folder: Path) -> tuple[int, Callable[[int], nn.Module]]:
    """Those of hvdtrain's layers."""
    import horovod.torch as hvd

    from hvdtrain.parallel import groups
    from hvdtrain.parallel.grid import Grid
    from hvdtrain.parallel.torch.tensor import ParallelAttention, ParallelMLP

    group = groups.init(hvd, Grid(tensor=int(os.environ["HVD_BENCHMARK_RANKS"]))).tensor

    def block(width: int) -> nn.Module:
        attention = partial(ParallelAttention, width, HEADS, group)
        return Block(width, attention, partial(ParallelMLP, width, 4 * width, group))

    return group.rank, block


WAYS = {"dtensor": by_dtensor, "hvdtrain": by_hvdtrain}


def measure(block: Callable[[int], nn.Module], size: Size) -> tuple[float, float]:
    """Median seconds of a step, and the loss after the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block(size.width) for _ in range(BLOCKS)))
    torch.manual_seed(1)
    inputs = torch.randn(size.samples, size.length, size.width, requires_grad=True)
    wanted = torch.randn(size.samples, size.length, size.width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    times = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:]), loss.item()


def rank_main(way: str, folder: Path) -> None:
    """On each rank: measure one way with all sizes."""
    torch.set_num_threads(1)
    rank, block = WAYS[way](folder)
    result = {}
    for name, size in SIZES.items():
        result[f"{name} step_s"], result[f"{name} loss"] = measure(block, size)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    wait_for_all()


def wait_for_all() -> None:
    """A rank that ended first would take the others' connections away."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    else:
        import horovod.torch as hvd

        hvd.barrier()


def rounds(program: str, ways: list[tuple[str, str]], processes: int, number: int) -> list[list[dict[str, float]]]:
    """Launch all ways (with their controllers) in turns, each round beginning with another; a list for each way."""
    results: list[list[dict[str, float]]] = [[] for _ in ways]
    for turn in range(number):
        for place in range(len(ways)):
            way = (turn + place) % len(ways)
            results[way].append(launch(program, *ways[way], processes))
    return results


def main() -> None:
    """Print the table."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print("| blocks | processes | Horovod's controller | DTensor's step | hvdtrain's step | quotient |")
    print("|---|---|---|---|---|---|")
    for processes in (2, 4):
        theirs, *ours = rounds(__file__, [("dtensor", "none"), *OURS], processes, number)
        for name, size in SIZES.items():
            losses = [result[f"{name} loss"] for results in (theirs, *ours) for result in results]
            if max(losses) - min(losses) > 1e-4 * max(losses):
                sys.exit(f"the ways don't compute the same: losses {losses}")
            for (_, controller), results in zip(OURS, ours, strict=True):
                key = f"{name} step_s"
                pairs = [(one[key], two[key]) for one, two in zip(theirs, results, strict=True)]
                found = summarize(pairs)
                print(
                    f"| {BLOCKS} x {size.width}, {size.samples * size.length} tokens | {processes} | {controller} "
                    f"| {1000 * found.base:.1f} ms | {1000 * found.ours:.1f} ms | {quotient(pairs):.2f} |",
                    flush=True,
                )


def quotient(pairs: list[tuple[float, float]]) -> float:
    """Median of the second by the first of each pair: what disturbs a round disturbs both."""
    return statistics.median(ours / base for base, ours in pairs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
