"""The loop's backend for PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.train.torch.task import Task

_COMPRESSION = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}


class TorchBackend:
    """One rank of a PyTorch task; see `hvdtrain.train.backend.Backend`."""

    def __init__(self, task: Task, *, compression: str = "none") -> None:
        hvd.init()
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.train_samples = 0
        self.eval_samples = 0
        self._task = task
        self._compression = _COMPRESSION[compression]
        self._device = self._choose_device()

    def _choose_device(self) -> torch.device:
        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank())
            return torch.device("cuda", hvd.local_rank())
        if "OMP_NUM_THREADS" not in os.environ:
            # Ranks that share the cores would each start a thread for every core.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
        return torch.device("cpu")

    def build(self, seed: int, lr: float) -> None:
        """Load the data, build model and optimizer, and give all ranks rank 0's initial state."""
        torch.manual_seed(seed)
        self._train_data: Any = self._task.train_data()
        self._eval_data: Any = self._task.eval_data()
        self.train_samples = len(self._train_data)
        self.eval_samples = len(self._eval_data) if self._eval_data is not None else 0
        self._model = self._task.model().to(self._device)
        optimizer = self._task.optimizer(self._model, lr)
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self._optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=self._model.named_parameters(), compression=self._compression
        )
        self._model.train()
        # Dropout and augmentation must differ from rank to rank, and from the initialisation.
        torch.manual_seed(seed + 1 + self.rank)

    def batches(self, indices: Sequence[Sequence[int]]) -> Iterator[Any]:
        """One batch of the training data per list of sample numbers; None for an empty list."""
        loaded = self._load(self._train_data, [own for own in indices if own])
        for own in indices:
            yield next(loaded) if own else None

    def _load(self, data: Any, indices: list[Sequence[int]]) -> Iterator[Any]:
        if type(data) is TensorDataset:
            # Its tensors can be indexed by many samples at once, which is far cheaper than collating them.
            for own in indices:
                yield self._to_device(data[torch.as_tensor(own)])
        else:
            for batch in DataLoader(data, batch_sampler=indices):
                yield self._to_device(batch)

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._device, non_blocking=True)
        if isinstance(value, dict):
            return {key: self._to_device(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return tuple(self._to_device(item) for item in value)
        return value

    def step(self, batch: Any, weight: float) -> torch.Tensor | float:
        """One optimizer step; see `hvdtrain.train.backend.Backend.step`."""
        self._optimizer.zero_grad()
        if batch is None:
            # Zero gradients for every parameter: the other ranks wait for this one's part of the average.
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    (parameter.sum() * 0.0).backward()
            self._optimizer.step()
            return 0.0
        loss = self._task.loss(self._model, batch)
        (loss if weight == 1 else loss * weight).backward()
        self._optimizer.step()
        return loss.detach()

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next steps."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def evaluate(self, indices: Sequence[Sequence[int]]) -> dict[str, tuple[float, int]]:
        """Sum and count of each metric over these batches of the evaluation data."""
        totals: dict[str, tuple[float, int]] = {}
        self._model.eval()
        with torch.no_grad():
            for batch in self._load(self._eval_data, list(indices)):
                for name, values in self._task.metrics(self._model, batch).items():
                    total, count = totals.get(name, (0.0, 0))
                    totals[name] = (total + values.sum(dtype=torch.float64).item(), count + values.numel())
        self._model.train()
        return totals

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank."""
        gathered: list[Any] = hvd.allgather_object(value)
        return gathered

    def save(self, folder: Path) -> None:
        """Write ``model.pt`` and ``optimizer.pt``, state dicts that load without Horovod."""
        torch.save(self._model.state_dict(), folder / "model.pt")
        torch.save(self._optimizer.state_dict(), folder / "optimizer.pt")

    def describe(self) -> str:
        """Framework, parameters and threads."""
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        where = str(self._device) if self._device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
        return f"PyTorch {torch.__version__}, {self.size} workers with {where} each, {parameters:,} parameters"

    def finish(self) -> None:
        """Wait for all ranks, then leave Horovod."""
        hvd.barrier()
        hvd.shutdown()
