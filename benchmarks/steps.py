"""Trains the same model in turns by a loop written by hand on Horovod, and by hvdtrain's: `steps.py MODEL PAIRS`.

Both run in the same two processes, one after the other, so that what disturbs the machine disturbs both. Rank 0 prints
a line of JSON: the ``(by hand, hvdtrain)`` pairs of step times in seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from models import BATCH_SIZE, MODELS, WINDOW, dataset
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvdtrain.train.loop import Run, train
from hvdtrain.train.settings import Settings
from hvdtrain.train.torch import Options, Task
from hvdtrain.train.torch.backend import TorchBackend

RATE = 0.001


class KeptBackend(TorchBackend):
    """Doesn't leave Horovod at the end: the next training follows."""

    def finish(self) -> None:
        """Wait for all ranks."""
        hvd.barrier()


class Benchmark(Task):
    """One of the models."""

    name: str

    def model(self) -> nn.Module:
        """The model."""
        return MODELS[self.name]()[0]

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9)

    def train_data(self) -> TensorDataset:
        """Noise."""
        return dataset(MODELS[self.name]()[1], hvd.size())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(model(batch[0]), batch[1])

    def backend(self, settings: Settings) -> KeptBackend:
        """Keeps Horovod."""
        return KeptBackend(self, settings)


def by_hvdtrain(name: str) -> float:
    """Median step time of a short training by hvdtrain, the first window left out."""
    task = Benchmark(Options(batch_size=BATCH_SIZE, lr=RATE, log_every_steps=WINDOW))
    task.name = name
    with tempfile.TemporaryDirectory() as folder:
        train(task, Run("benchmark", Path(folder), 0, Settings()))
        if hvd.rank() != 0:
            return 0.0
        records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        return statistics.median([record["step_time_s"] for record in records if "step_time_s" in record][1:])


def by_hand(name: str) -> float:
    """The same by what a user would write on Horovod alone."""
    model, shape = MODELS[name]()
    data = dataset(shape, hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    windows = []
    started = time.perf_counter()
    for step, indices in enumerate(order[hvd.rank() :: hvd.size()].split(BATCH_SIZE), 1):
        images, labels = data[indices]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % WINDOW == 0:
            loss.item()
            now = time.perf_counter()
            windows.append((now - started) / WINDOW)
            started = now
    hvd.barrier()
    return statistics.median(windows[1:])


def main() -> None:
    """Measure in turns."""
    name, pairs = sys.argv[1], int(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    measured = []
    for pair in range(pairs):
        if pair % 2:
            second, first = by_hvdtrain(name), by_hand(name)
        else:
            first, second = by_hand(name), by_hvdtrain(name)
        measured.append((first, second))
    if hvd.rank() == 0:
        sys.stdout.write(json.dumps(measured) + "\n")
    hvd.barrier()


if __name__ == "__main__":
    main()
