"""What test_parallel_memory.py runs on each rank: `python parallel_memory_cases.py FOLDER CASE RANKS`.

Each rank writes what its case returns to FOLDER/CASE-RANK.json.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.groups import Groups, init
from hvdtrain.parallel.torch.exchange import GradientExchange
from hvdtrain.parallel.torch.sharded import ShardedOptimizer
from hvdtrain.parallel.torch.tensor import ParallelMLP

# 8.4 million parameters: 34 MB, as much of gradients, and twice as much of Adam's state.
WIDTH, HIDDEN = 1024, 4096
LIMIT_MB = 100


def size(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


def state_of(optimizer: torch.optim.Optimizer) -> int:
    return size(value for state in optimizer.state.values() for value in state.values())


def trained(groups: Groups, *, shard: bool, width: int = WIDTH, hidden: int = HIDDEN) -> dict[str, int]:
    """Three steps with Adam. Bytes of this rank's parameters and of its optimizer's state."""
    torch.manual_seed(1)
    model = ParallelMLP(width, hidden, groups.tensor)
    optimizer: Any = torch.optim.Adam(model.parameters())
    named = list(model.named_parameters())

    def everywhere(_: torch.nn.Parameter) -> Any:
        return groups.replicas, groups.replicas.size

    exchange: Any = ShardedOptimizer(optimizer, named, everywhere) if shard else GradientExchange(named, everywhere)
    for _ in range(3):
        exchange.begin()
        model(torch.ones(2, width)).square().mean().backward()
        exchange.finish()
        (exchange if shard else optimizer).step()
    return {"parameters": size(model.parameters()), "state": state_of(optimizer)}


def limited(groups: Groups) -> dict[str, Any]:
    """The same, in no more memory than a small model takes and so many MB."""
    trained(groups, shard=False, width=16, hidden=16)  # libraries' own memory, Horovod's buffers
    (used_kb,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    most = 1024 * int(used_kb) + LIMIT_MB * 10**6
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        return trained(groups, shard=False)
    except RuntimeError as error:
        return {"error": str(error)}


def main() -> None:
    folder, case, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    groups = init(hvd, Grid(data=ranks) if case == "sharded" else Grid(tensor=ranks))
    found = limited(groups) if case == "limited" else trained(groups, shard=True)
    (folder / f"{case}-{hvd.rank()}.json").write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()
