"""PyTorch on Horovod."""

# ruff: noqa: D102 -- Backend describes its methods

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.errors import UsageError
from hvdtrain.parallel.groups import Group
from hvdtrain.parallel.torch import buckets
from hvdtrain.parallel.torch.adasum import Adasum
from hvdtrain.parallel.torch.collectives import carried
from hvdtrain.parallel.torch.compression import Reducer, make_reducer
from hvdtrain.parallel.torch.compression_auto import Auto
from hvdtrain.parallel.torch.cuts import cut_of
from hvdtrain.parallel.torch.exchange import GradientExchange
from hvdtrain.parallel.torch.sharded import ShardedOptimizer, load_pieces, state_pieces
from hvdtrain.train import random_state
from hvdtrain.train.membership import Member
from hvdtrain.train.settings import Settings
from hvdtrain.train.sharding import Indices
from hvdtrain.train.torch import files
from hvdtrain.train.torch.feed import Feed, Parts, length, mean_loss, per_sample_or_mean
from hvdtrain.train.torch.norms import clip
from hvdtrain.train.torch.parts import (
    MODEL_FILE,
    NAMES,
    OPTIMIZER_FILE,
    PART_FILE,
    Saved,
    load_model,
    part_of_rank,
    piece,
    plain_optimizer_state,
)
from hvdtrain.train.torch.piped import Piped
from hvdtrain.train.torch.task import Task

T = TypeVar("T")

# Enough micro-batches for each stage that filling and draining the pipeline costs a fifth at most.
_MICRO_BATCHES_PER_STAGE = 4


class TorchBackend(Member):
    """One rank's data, model and optimizer (see `hvdtrain.train.backend.Backend` for the methods)."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self._task = task
        self._settings = settings
        self._divided = settings.parallelism
        if not settings.adasum:
            buckets.keep_whole()
        super().__init__(hvd)
        task.groups = self.groups
        self.train_samples = 0
        self.eval_samples = 0
        self._exchange: Any = None
        self._reducer: Reducer | None = None
        self._told = set[str]()
        self._device = _choose_device(hvd.local_rank())
        self._share_cores(self.local_size())
        self._looks_at_gradients = type(task).on_gradients is not Task.on_gradients
        self._refuse()

    @property
    def parts(self) -> Sequence[int]:
        return range(self.size) if self._divided.shard_optimizer else super().parts

    @property
    def _tells(self) -> bool:
        """Whether this rank speaks for its replica: it has the outputs, and no other rank before it has them."""
        return self.groups.tensor.rank == 0 and self.groups.after is None

    def rejoin(self) -> None:
        super().rejoin()
        self._task.groups = self.groups
        if isinstance(self._exchange, GradientExchange):
            self._exchange.remove()
            self._exchange = self._make_exchange()

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
        self.train_samples = length(self._train_data, "train_data()")
        self.eval_samples = 0 if self._eval_data is None else length(self._eval_data, "eval_data()")
        grid, divided = self.groups.grid, self._divided
        passes = divided.micro_batches or (_MICRO_BATCHES_PER_STAGE * grid.pipeline if grid.pipeline > 1 else 1)
        # Each pass of a layer whose table ranks share is a meeting of these ranks.
        shares_tables = grid.embedding > 1
        self._feed = Feed(self._task, self._device, passes=passes, keep_empty=shares_tables)
        self._eval_feed = Feed(self._task, self._device, passes=1, keep_empty=shares_tables)
        self._piped = None
        if grid.pipeline > 1:
            self._piped = Piped(self._task, self.groups, divided, self._device, self.heartbeat, self._sample_of)
            self._model = self._piped.stage
        else:
            self._model = self._task.model().to(self._device)
        optimizer = self._task.optimizer(self._model, lr)
        self._rate_ratios = [group["lr"] / lr for group in optimizer.param_groups]
        self._names = _names(optimizer, self._model)
        self._optimizer: Any = optimizer
        if divided.shard_optimizer:
            self._optimizer = self._exchange = ShardedOptimizer(optimizer, self._trained(), self._group_of)
        else:
            self._exchange = self._make_exchange()

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad]

    def _make_exchange(self) -> GradientExchange:
        self._told = set[str]()
        if self._settings.adasum:
            # Its dot products are of what travels together: each parameter alone.
            return GradientExchange(self._trained(), self._group_of, Adasum(), bucket_mb=0)
        self._reducer = make_reducer(self._settings.compression)
        return GradientExchange(self._trained(), self._group_of, self._reducer)

    def broadcast_state(self) -> None:
        with self.heartbeat.collective("broadcast of the model"):
            self._broadcast_model()
        if not self.parts:
            # Horovod's own broadcast_optimizer_state takes a step with zero gradients if there was none yet, and so
            # counts it and applies weight decay.
            state = self.broadcast_object(files.pack(self._optimizer.state_dict()) if self.rank == 0 else b"")
            if self.rank != 0:
                self._optimizer.load_state_dict(files.unpack(state))

    def train_batches(self, indices: Iterable[Indices]) -> Iterator[Parts]:
        self._model.train()
        return self._feed.batches(self._train_data, indices)

    def train_step(self, batch: Parts, samples: int, weight: float, lr: float) -> SupportsFloat:
        for group, ratio in zip(self._optimizer.param_groups, self._rate_ratios, strict=True):
            group["lr"] = lr * ratio
        # Without samples there is no backward pass; zeros are this rank's part in the average.
        self._exchange.begin(len(batch))
        loss = self._pass_through(batch, samples, weight) if batch else 0.0
        with self.heartbeat.collective("gradients"):
            self._exchange.finish()
        if (limit := self._task.max_gradient_norm()) is not None:
            with self.heartbeat.collective("norm of the gradients"):
                clip(
                    self.groups,
                    limit,
                    sharded=self._divided.shard_optimizer,
                    squared_norm=self._exchange.squared_norm,
                    scale=self._exchange.scale_gradients,
                )
        if self._looks_at_gradients:
            self._task.on_gradients(self._model)
        with self.heartbeat.collective("parameters"):
            self._optimizer.step()
        return loss if self._tells else 0.0

    def _pass_through(self, batch: Parts, samples: int, weight: float) -> SupportsFloat:
        """Forward and backward, part by part. Returns the mean loss of the samples, where this rank has it."""
        shares = [number / samples if samples else 0.0 for _, number in batch]
        if self._piped:
            return self._piped.step(batch, shares, weight)
        total: Any = 0.0
        for (part, number), share in zip(batch, shares, strict=True):
            mean = mean_loss(self._task.loss(self._model, part), number)
            factor = weight * share
            (mean if factor == 1 else mean * factor).backward()
            # The mean of no samples is no number.
            total = total + (mean.detach() * share if number else 0.0)
        return total

    def cut_axes(self) -> set[str]:
        return {cut.axis for _, parameter in self._model.named_parameters() if (cut := cut_of(parameter))}

    def findings(self) -> list[str]:
        found = self._reducer.why if isinstance(self._reducer, Auto) else {}
        new = [line for group, line in found.items() if group not in self._told]
        self._told.update(found)
        return new

    def evaluate(self, indices: Iterable[Indices]) -> dict[str, float]:
        self._broadcast_buffers()
        self._model.eval()
        sums: dict[str, torch.Tensor] = {}

        def add(model: Any, batch: Any, samples: int) -> None:
            for name, value in self._task.metrics(model, batch).items():
                values = per_sample_or_mean(value, samples, f"metrics()[{name!r}]").double()
                if samples and self._tells:
                    sums[name] = sums.get(name, 0) + (values.sum() if values.ndim else values * samples)

        with torch.no_grad():
            for parts_of_step in self._eval_feed.batches(self._eval_data, indices):
                # Again with each batch: an evaluation that goes on, however long it takes, doesn't hang.
                self.heartbeat.doing("evaluation")
                for batch, samples in parts_of_step:
                    if self._piped:
                        self._piped.evaluate(batch, samples, add)
                    else:
                        add(self._model, batch, samples)
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
        if not self.parts:
            model, optimizer = self._copy_state()

            def write(folder: Path) -> None:
                files.save(model, folder / MODEL_FILE)
                files.save(optimizer | {NAMES: self._names}, folder / OPTIMIZER_FILE)

            return write
        pieces = state_pieces(self._optimizer, self._model.named_parameters())
        part = files.to_host(part_of_rank(self._model, pieces, self.groups, sharded=self._divided.shard_optimizer))
        return lambda folder: files.save(part, folder / PART_FILE)

    def _copy_state(self) -> tuple[Any, Any]:
        """Model and optimizer in the host's memory."""
        return files.to_host(self._model.state_dict()), files.to_host(self._optimizer.state_dict())

    def restore(self, folder: Path) -> None:
        try:
            if self.parts:
                saved = Saved(folder)
                load_model(self._model, saved, self.groups)
                self._load_pieces(saved)
                return
            if self.rank == 0:
                self._load_whole(folder)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the checkpoint doesn't fit the task's model and optimizer: {error}",
                where=str(folder),
                fix="start a new run, or make the model and the optimizer as they were",
            ) from error
        self.broadcast_state()

    def _load_whole(self, folder: Path) -> None:
        """What one rank or several have written, for a rank that has the whole model."""
        if (folder / MODEL_FILE).exists():
            self._model.load_state_dict(files.load(folder / MODEL_FILE))
            state = files.load(folder / OPTIMIZER_FILE)
            state.pop(NAMES, None)
        else:
            saved = Saved(folder)
            load_model(self._model, saved, self.groups)
            state = plain_optimizer_state(saved, self._names, self._optimizer.state_dict()["param_groups"])
        self._optimizer.load_state_dict(state)

    def digest(self) -> str:
        state = [self._model.state_dict()]
        # Each replica has other ranges of a sharded optimizer's state.
        return files.digest(state if self._divided.shard_optimizer else [*state, self._optimizer.state_dict()])

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

    def _refuse(self) -> None:
        """What can't work, before anything is built."""
        divided = not self.groups.grid.is_data_parallel or self._divided.shard_optimizer
        if self._looks_at_gradients and divided:
            raise UsageError(
                "the task's on_gradients() would see only the part of the gradients that this rank has",
                where=type(self._task).__name__,
                fix="to clip them return the limit from max_gradient_norm(), or leave 'parallelism' out",
            )

    def _group_of(self, parameter: torch.nn.Parameter) -> tuple[Group, int]:
        """Over which ranks a parameter's gradient is summed, and by what the sum is divided.

        A table that the embedding axis shares has had the gradients of its group in the backward pass already.
        """
        cut = cut_of(parameter)
        groups = self.groups
        over = groups.data if cut is not None and cut.axis == "embedding" else groups.replicas
        # Adasum is no sum that has to be divided.
        return over, 1 if self._settings.adasum else groups.replicas.size

    def _broadcast_model(self) -> None:
        groups = self.groups
        # With the second names of what two layers share, which the state has too.
        cuts = {name: cut_of(value) for name, value in self._model.named_parameters(remove_duplicate=False)}
        state = {name: value for name, value in self._model.state_dict().items() if isinstance(value, torch.Tensor)}
        tables = {name for name, cut in cuts.items() if cut is not None and cut.axis == "embedding"}
        _broadcast({name: value for name, value in state.items() if name in tables}, groups.data)
        _broadcast({name: value for name, value in state.items() if name not in tables}, groups.replicas)
        _broadcast({name: value for name, value in state.items() if cuts.get(name) is None}, groups.tensor)

    def _broadcast_buffers(self) -> None:
        """Each rank keeps running statistics of its own; the first replica's are the ones that are saved."""
        with self.heartbeat.collective("broadcast of the buffers"):
            _broadcast(dict(self._model.named_buffers()), self.groups.replicas)

    def _sample_of(self, samples: int) -> Any:
        """The first samples as a batch on the device, by which layers are timed."""
        numbers = np.arange(min(samples, self.train_samples))
        feed = Feed(self._task, self._device, passes=1, keep_empty=False)
        return next(feed.batches(self._train_data, [numbers]))[0][0]

    def _load_pieces(self, saved: Saved) -> None:
        parameters = dict(self._model.named_parameters())

        def get(name: str, key: str) -> Any:
            return piece(saved.optimizer(name, key), parameters[name], self.groups)

        load_pieces(self._optimizer, self._model.named_parameters(), saved.optimizer_keys, get)

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


def _names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[str]:
    """Of the parameters, in the order of the numbers that the optimizer's state has for them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def _broadcast(tensors: dict[str, torch.Tensor], group: Group) -> None:
    """Give the group's ranks the tensors of its first."""
    if group.size == 1:
        return
    handles = [
        hvd.broadcast_async_(carried(value), group.ranks[0], name=f"hvdtrain.{name}", process_set=group.process_set)
        for name, value in tensors.items()
    ]
    for handle in handles:
        hvd.synchronize(handle)
