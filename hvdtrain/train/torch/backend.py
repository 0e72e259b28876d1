"""PyTorch on Horovod."""

# ruff: noqa: D102 -- Backend describes its methods

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsFloat, TypeVar

import horovod.torch as hvd
import numpy as np
import torch
from torch.utils.data import TensorDataset

from hvdtrain.errors import UsageError
from hvdtrain.train import random_state
from hvdtrain.train.membership import Member
from hvdtrain.train.sharding import Indices
from hvdtrain.train.torch import files
from hvdtrain.train.torch.task import Task

T = TypeVar("T")

MODEL_FILE = "model.pt"
OPTIMIZER_FILE = "optimizer.pt"


class TorchBackend(Member):
    """One rank's data, model and optimizer (see `hvdtrain.train.backend.Backend` for the methods)."""

    def __init__(self, task: Task, *, compression: Literal["none", "fp16"]) -> None:
        self._task = task
        self._compression = compression
        super().__init__(hvd)
        self.train_samples = 0
        self.eval_samples = 0
        self._device = _choose_device(hvd.local_rank())
        self._share_cores(self.local_size())
        self._clips = type(task).on_gradients is not Task.on_gradients

    def remember(self) -> None:
        self._memory = self._copy_state()

    def recall(self) -> None:
        model, optimizer = self._memory
        self._model.load_state_dict(model)
        # The optimizer keeps what it is given.
        self._optimizer.load_state_dict(copy.deepcopy(optimizer))

    def describe(self) -> str:
        if self._device.type == "cuda":
            return f"PyTorch {torch.__version__}, one {torch.cuda.get_device_name(self._device)} each"
        threads = torch.get_num_threads()
        return f"PyTorch {torch.__version__}, CPU, {threads} {'thread' if threads == 1 else 'threads'} each"

    def seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def build(self, lr: float) -> None:
        self._train_data = self._task.train_data()
        self._eval_data = self._task.eval_data()
        self.train_samples = _length(self._train_data, "train_data()")
        self.eval_samples = 0 if self._eval_data is None else _length(self._eval_data, "eval_data()")
        self._model = self._task.model().to(self._device)
        optimizer = self._task.optimizer(self._model, lr)
        self._rate_ratios = [group["lr"] / lr for group in optimizer.param_groups]
        self._optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self._model.named_parameters(),
            compression=getattr(hvd.Compression, self._compression),
            # A rank without samples has dense zeros where the others have sparse gradients.
            sparse_as_dense=True,
        )

    def broadcast_state(self) -> None:
        with self.heartbeat.collective("broadcast of the model"):
            hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        # Horovod's own broadcast_optimizer_state takes a step with zero gradients if there was none yet, and so counts
        # it and applies weight decay.
        state = self.broadcast_object(files.pack(self._optimizer.state_dict()) if self.rank == 0 else b"")
        if self.rank != 0:
            self._optimizer.load_state_dict(files.unpack(state))

    def train_batches(self, indices: Iterable[Indices]) -> Iterator[Any]:
        self._model.train()
        return self._batches(self._train_data, indices)

    def train_step(self, batch: Any, samples: int, weight: float, lr: float) -> SupportsFloat:
        for group, ratio in zip(self._optimizer.param_groups, self._rate_ratios, strict=True):
            group["lr"] = lr * ratio
        self._optimizer.zero_grad()
        loss: SupportsFloat = 0.0
        # Without samples there is no backward pass; the step itself then gives zeros to the average.
        if samples:
            mean = _per_sample_or_mean(self._task.loss(self._model, batch), samples, "loss()")
            if mean.ndim:
                mean = mean.mean()
            (mean if weight == 1 else mean * weight).backward()
            loss = mean.detach()
        with self.heartbeat.collective("gradients"):
            self._optimizer.synchronize()
        if self._clips:
            self._task.on_gradients(self._model)
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        return loss

    def evaluate(self, indices: Iterable[Indices]) -> dict[str, float]:
        self._broadcast_buffers()
        self._model.eval()
        sums: dict[str, torch.Tensor] = {}
        arrays = list(indices)
        with torch.no_grad():
            for numbers, batch in zip(arrays, self._batches(self._eval_data, arrays), strict=True):
                # Again with each batch: an evaluation that goes on, however long it takes, doesn't hang.
                self.heartbeat.doing("evaluation")
                if batch is None:
                    continue
                for name, value in self._task.metrics(self._model, batch).items():
                    values = _per_sample_or_mean(value, len(numbers), f"metrics()[{name!r}]").double()
                    total = values.sum() if values.ndim else values * len(numbers)
                    sums[name] = sums.get(name, 0) + total
        return {name: float(total) for name, total in sums.items()}

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        with self.heartbeat.collective("sum over ranks"):
            total = hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum, name="hvdtrain.sum")
        return list(total.tolist())

    def broadcast_object(self, value: T) -> T:
        with self.heartbeat.collective("broadcast"):
            result: T = hvd.broadcast_object(value, root_rank=0, name="hvdtrain.object")
        return result

    def gather(self, value: T) -> list[T]:
        with self.heartbeat.collective("gathering"):
            values: list[T] = hvd.allgather_object(value, name="hvdtrain.gather")
        return values

    def snapshot(self) -> Callable[[Path], None]:
        model, optimizer = self._copy_state()

        def write(folder: Path) -> None:
            files.save(model, folder / MODEL_FILE)
            files.save(optimizer, folder / OPTIMIZER_FILE)

        return write

    def _copy_state(self) -> tuple[Any, Any]:
        """Model and optimizer in the host's memory."""
        return files.to_host(self._model.state_dict()), files.to_host(self._optimizer.state_dict())

    def restore(self, folder: Path) -> None:
        try:
            self._model.load_state_dict(files.load(folder / MODEL_FILE))
            self._optimizer.load_state_dict(files.load(folder / OPTIMIZER_FILE))
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the checkpoint doesn't fit the task's model and optimizer: {error}",
                where=str(folder),
                fix="start a new run, or make the model and the optimizer as they were",
            ) from error

    def digest(self) -> str:
        return files.digest([self._model.state_dict(), self._optimizer.state_dict()])

    def random_state(self) -> dict[str, Any]:
        state = random_state.capture() | {"torch": _as_text(torch.get_rng_state())}
        if self._device.type == "cuda":
            state["cuda"] = _as_text(torch.cuda.get_rng_state(self._device))
        return state

    def set_random_state(self, state: dict[str, Any]) -> None:
        random_state.restore(state)
        torch.set_rng_state(_as_tensor(state["torch"]))
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_as_tensor(state["cuda"]), self._device)

    def finish(self) -> None:
        with self.heartbeat.collective("end of the training"):
            hvd.barrier()
        hvd.shutdown()

    def _batches(self, dataset: Any, indices: Iterable[Indices]) -> Iterator[Any]:
        arrays = list(indices)
        filled = [array for array in arrays if len(array)]
        if type(dataset) is TensorDataset and type(self._task).batches is Task.batches:
            # Tensors in memory can be indexed as a whole; sample by sample a batch of 64 takes a hundred times longer.
            loaded: Iterable[Any] = (dataset[torch.from_numpy(array)] for array in filled)
        else:
            loaded = self._task.batches(dataset, [array.tolist() for array in filled])
        # Made here and not with the first batch: PyTorch's DataLoader draws a random number for it.
        batches = iter(loaded)
        if self._device.type != "cpu":
            batches = (_to(self._device, batch) for batch in batches)
        return (next(batches) if len(array) else None for array in arrays)

    def _broadcast_buffers(self) -> None:
        """Each rank keeps running statistics of its own; rank 0's are the ones that are saved."""
        buffers = dict(self._model.named_buffers())
        if buffers:
            with self.heartbeat.collective("broadcast of the buffers"):
                hvd.broadcast_parameters(buffers, root_rank=0)

    @staticmethod
    def _share_cores(local_size: int) -> None:
        """PyTorch takes every core for itself, and ranks that do so on one host slow each other."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))


def _choose_device(local_rank: int) -> torch.device:
    """A GPU of its own for each rank of a host. Where a scheduler has given each rank one, that is number 0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _as_text(state: torch.Tensor) -> str:
    return random_state.to_text(state.numpy().tobytes())


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(random_state.to_bytes(text)), dtype=torch.uint8)


def _length(dataset: Any, source: str) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise UsageError(
            f"{source} gave a {type(dataset).__name__}, which has no length",
            fix="return a map-style dataset: one with len() and [i], so that its samples can be shared out",
        ) from error


def _per_sample_or_mean(value: Any, samples: int, source: str) -> torch.Tensor:
    """The value as it is, when it is a scalar or has one number per sample."""
    tensor = torch.as_tensor(value)
    if tensor.ndim and tensor.shape != (samples,):
        raise UsageError(
            f"the task's {source} has shape {list(tensor.shape)}",
            fix=f"return the mean of the batch (a scalar) or one value per sample (here [{samples}])",
        )
    return tensor


def _to(device: torch.device, batch: Any) -> Any:
    """The batch on the device: tensors in any nesting of tuples, lists and mappings."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _to(device, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(device, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_to(device, value) for value in batch)
    return batch
