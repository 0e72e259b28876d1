"""How long a checkpoint of 300 MB (25 million parameters, with Adam) stops the training, beside a synchronous save.

Usage: python benchmarks/checkpoint_blocking.py [PAIRS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from pairs import compare

from hvdtrain.train.backend import Backend
from hvdtrain.train.checkpoints import Checkpoints
from hvdtrain.train.options import Options
from hvdtrain.train.saving import Saving
from hvdtrain.train.settings import CheckpointSettings, Settings
from hvdtrain.train.state import State

# Three layers of this width have 25 million parameters.
WIDTH = 2886
BATCH_SIZE = 32


def torch_backend() -> Backend:
    """PyTorch with the model."""
    import torch
    from torch.utils.data import TensorDataset

    from hvdtrain.train.torch import Task

    class Wide(Task):
        def model(self) -> Any:
            return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))

        def optimizer(self, model: Any, lr: float) -> Any:
            return torch.optim.Adam(model.parameters(), lr)

        def train_data(self) -> Any:
            return TensorDataset(torch.randn(BATCH_SIZE, WIDTH))

        def loss(self, model: Any, batch: Any) -> Any:
            return model(batch[0]).square().mean()

    return Wide(Options()).backend(Settings())


def keras_backend() -> Backend:
    """Keras with the same."""
    import keras

    from hvdtrain.train.keras import Task

    class Wide(Task):
        def model(self) -> Any:
            return keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(3))])

        def optimizer(self, model: Any, lr: float) -> Any:
            return keras.optimizers.Adam(lr)

        def train_data(self) -> Any:
            return np.random.default_rng(0).normal(size=(BATCH_SIZE, WIDTH)).astype("float32")

        def loss(self, model: Any, batch: Any, training: bool = True) -> Any:
            return keras.ops.mean(keras.ops.square(model(batch, training=training)))

    return Wide(Options()).backend(Settings())


class Measurement:
    """One process that trains and saves."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self._backend = backend
        backend.seed(0)
        backend.build(1e-4)
        backend.broadcast_state()
        (self._batch,) = backend.train_batches([np.arange(BATCH_SIZE)])
        self._checkpoints = Checkpoints(folder, keep=1)
        settings = CheckpointSettings(every_steps=1, keep=1)
        self._saving = Saving(settings, self._checkpoints, backend, run_folder=folder, say=print)
        self._saves = 0
        self.slowed: list[float] = []

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        started = time.perf_counter()
        for _ in range(count):
            float(self._backend.train_step(self._batch, BATCH_SIZE, 1.0, 1e-4))
        return time.perf_counter() - started

    def synchronous(self) -> float:
        """Seconds until a checkpoint is on disk."""
        started = time.perf_counter()
        state = self._state()
        self._checkpoints.write(state.step, state.model_dump(mode="json"), self._backend.snapshot())
        return time.perf_counter() - started

    def behind(self) -> float:
        """Seconds for which the training stops; how much longer the steps then take is kept in `slowed`."""
        started = time.perf_counter()
        self._saving.save(self._state())
        stopped = time.perf_counter() - started
        steps, beside = 0, 0.0
        while any(thread.name == "hvdtrain-checkpoint" for thread in threading.enumerate()):
            beside += self.steps(1)
            steps += 1
        self._saving.finish()
        self.slowed.append(beside - self.steps(steps))
        return stopped

    def _state(self) -> State:
        self._saves += 1
        return State(
            step=self._saves,
            epoch=0,
            epoch_samples=0,
            train_samples=1,
            seed=0,
            size=1,
            grid={},
            task="wide:Wide",
            options={},
        )


def measure(framework: str, pairs: int) -> dict[str, float]:
    """Medians in seconds."""
    with tempfile.TemporaryDirectory() as name:
        measurement = Measurement({"PyTorch": torch_backend, "Keras": keras_backend}[framework](), Path(name))
        measurement.behind()
        measurement.slowed.clear()
        compared = compare(measurement.synchronous, measurement.behind, pairs)
    slowed = statistics.median(measurement.slowed)
    return {"synchronous": compared.base, "stopped": compared.ours, "slowed": slowed}


def main() -> None:
    """Print the table; each framework has a process of its own."""
    if len(sys.argv) > 2:
        sys.stdout.write(json.dumps(measure(sys.argv[2], int(sys.argv[1]))) + "\n")
        return
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(
        "| checkpoint of 300 MB | synchronous | hvdtrain: training stops for | and its steps take longer by, in all |"
    )
    print("|---|---|---|---|")
    for framework in ("PyTorch", "Keras"):
        done = subprocess.run(
            [sys.executable, __file__, str(pairs), framework], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {framework}, {pairs} pairs | {found['synchronous']:.2f} s | {found['stopped']:.3f} s "
            f"| {found['slowed']:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
