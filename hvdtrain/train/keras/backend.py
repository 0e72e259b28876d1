"""Keras 3 on TensorFlow and Horovod."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.errors import UsageError
from hvdtrain.keras.compression import Auto, compression_of
from hvdtrain.parallel.cut import cut_of
from hvdtrain.train import random_state
from hvdtrain.train.keras.data import Samples
from hvdtrain.train.keras.shared import Whole, broadcast, collect, hand_out, state_of
from hvdtrain.train.keras.task import Task
from hvdtrain.train.keras.twin import Saver
from hvdtrain.train.membership import Member
from hvdtrain.train.settings import Settings
from hvdtrain.train.sharding import Indices

T = TypeVar("T")

MODEL_FILE = "model.keras"


class KerasBackend(Member):
    """One rank's data, model and optimizer (see `hvdtrain.train.backend.Backend` for the methods)."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self._task = task
        self._compression = compression_of(getattr(hvd.Compression, settings.compression))
        self._op = hvd.Adasum if settings.adasum else hvd.Average
        super().__init__(hvd)
        task.groups = self.groups
        self._refuse(settings)
        self.train_samples = 0
        self.eval_samples = 0
        self._seed = 0
        self._seed_states: list[keras.Variable] = []
        # Of rank 0, which may be another one later.
        self._saver: Saver | None = None
        # Of rank 0 on a grid.
        self._whole: Whole | None = None
        self._device = _choose_device(hvd.local_rank(), self.local_size())

    @property
    def _tells(self) -> bool:
        """Whether this rank speaks for its replica, of which all ranks have the same outputs."""
        return self.groups.tensor.rank == 0

    def _refuse(self, settings: Settings) -> None:
        """What PyTorch's tasks can do alone."""
        divided, stages = settings.parallelism, self.groups.grid.pipeline
        reasons = {
            f"pipeline: {stages}": stages > 1 and "a Keras model isn't cut into stages",
            "shard_optimizer": divided.shard_optimizer and "a Keras optimizer keeps its state with whole variables",
            f"micro_batches: {divided.micro_batches}": divided.micro_batches is not None
            and "a Keras step computes its batch in one part; the optimizer's gradient_accumulation_steps adds up",
        }
        for what, reason in reasons.items():
            if reason:
                raise UsageError(
                    f"parallelism.{what} is for PyTorch's tasks, and this is one of Keras: {reason}",
                    where=type(self._task).__name__,
                    fix="leave it out; a Keras task can be divided by data, tensor and embedding",
                )

    def is_lost_rank(self, error: Exception) -> bool:
        """Horovod's own error, or TensorFlow's with its words."""
        # The step is compiled: what Horovod says comes as the error of a node of TensorFlow's graph, perhaps in
        # Gloo's words; its place in the code is always told.
        raised = isinstance(error, (tf.errors.UnknownError, tf.errors.AbortedError))
        of_horovod = raised and "horovod" in str(error).lower()
        return (self.elastic and of_horovod) or super().is_lost_rank(error)

    def rejoin(self) -> None:
        """Comes together with the ranks that are there now, and traces the steps for them."""
        super().rejoin()
        self._task.groups = self.groups
        if isinstance(self._compression, Auto):
            # Ranks that are new try it before their first step, and so must all.
            self._compression.forget()
        self._compile_steps()
        if self.rank == 0 and self._saver is None:
            self._saver = Saver(self._model)

    def remember(self) -> None:
        """Copies weights and optimizer."""
        self._memory = [variable.numpy() for variable in self._variables()]

    def recall(self) -> None:
        """Puts the copies back."""
        for variable, value in zip(self._variables(), self._memory, strict=True):
            variable.assign(value)
        self._rate = math.nan

    def _variables(self) -> list[keras.Variable]:
        return [*self._model.variables, *self._optimizer.variables]

    def describe(self) -> str:
        """Framework, versions, device and threads."""
        return f"Keras {keras.__version__} on TensorFlow {tf.__version__}, {self._device} each"

    def seed(self, seed: int) -> None:
        """Seeds Python, numpy and the model's own generators.

        Not TensorFlow's `tf.random`, which is seeded once, in `build`: it compiles every function anew for that.
        """
        self._seed = seed
        random.seed(seed)
        np.random.seed(seed)
        # Layers such as Dropout have generators of their own, which are seeded when they are made and never again.
        for number, state in enumerate(self._seed_states):
            # The ranks of a tensor group draw the same, but for activations that are cut.
            own = [self.groups.tensor.rank] if cut_of(state) else []
            state.assign([int(np.random.SeedSequence([seed, number, *own]).generate_state(1)[0]), 0])

    def build(self, lr: float) -> None:
        """Makes data, model and optimizer, and traces the steps."""
        keras.utils.set_random_seed(self._seed)
        self._train_data = Samples(self._task.train_data(), "train_data()")
        self._eval_data = Samples(self._task.eval_data(), "eval_data()")
        self.train_samples = len(self._train_data)
        self.eval_samples = len(self._eval_data)
        if not self.train_samples:
            return
        self._model, optimizer = self._make(lr)
        # Compiled for what that adds: loss scaling under mixed_float16, and the optimizer in the saved model.
        # An elastic job's groups change, and it is data parallel.
        parallel = None if self.groups.grid.is_data_parallel else self.groups
        self._model.compile(
            hvd.DistributedOptimizer(optimizer, compression=self._compression, op=self._op, parallel=parallel)
        )
        self._optimizer = self._model.optimizer
        self._optimizer.build(self._model.trainable_variables)
        self._seed_states = [v for v in self._model.variables if v.name == "seed_generator_state"]
        self._rate = lr
        self._rates = _learning_rates(self._optimizer, lr)
        self._compile_steps()
        if self.rank == 0 and parallel:
            self._whole = Whole(self._task, lambda: self._make(lr), state_of(self._model))
        elif self.rank == 0:
            self._saver = Saver(self._model)

    def _make(self, lr: float) -> tuple[keras.Model, keras.optimizers.Optimizer]:
        """The task's model, with its variables, and its optimizer."""
        model = self._task.model()
        optimizer = self._task.optimizer(model, lr)
        if not model.built:
            self._task.loss(model, self._train_data.batch(np.zeros(1, np.int64)))
        return model, optimizer

    def broadcast_state(self) -> None:
        """Gives all ranks the weights and the optimizer state of the first that has the same part: rank 0's."""
        with self.heartbeat.collective("broadcast of the model"):
            broadcast(state_of(self._model), self.groups)
        # The learning rate is one of the optimizer's variables.
        self._rate = math.nan

    def train_batches(self, indices: Iterable[Indices]) -> Iterator[Any]:
        """A batch for each of the index arrays; for an empty one None, or where tables are shared no samples."""
        return self._train_data.batches(indices, keep_empty=self._meets_empty)

    def train_step(self, batch: Any, samples: int, weight: float, lr: float) -> SupportsFloat:
        """One step of all ranks, whatever their numbers of samples."""
        if lr != self._rate:
            for variable, ratio in self._rates:
                variable.assign(lr * ratio)
            self._rate = lr
        # The ranks meet inside the compiled step: from out here nobody sees whether it computes or waits.
        self.heartbeat.doing("step")
        if batch is None:
            self._idle_step()
            return 0.0
        loss: SupportsFloat = self._weighted_step(batch, tf.constant(weight, tf.float32))
        return loss if samples and self._tells else 0.0

    def cut_axes(self) -> set[str]:
        """Axes of the grid over which this rank's variables are cut."""
        return {cut.axis for variable in self._model.trainable_variables if (cut := cut_of(variable))}

    def findings(self) -> list[str]:
        """What the compression's trial has found, once."""
        if not isinstance(self._compression, Auto):
            return []
        found, self._compression.why = self._compression.why, []
        return found

    @property
    def _meets_empty(self) -> bool:
        """Whether a rank without samples goes through the model all the same: its tables are other ranks' too."""
        return self.groups.embedding.size > 1

    def evaluate(self, indices: Iterable[Indices]) -> dict[str, float]:
        """The sum of each metric over this rank's samples."""
        with self.heartbeat.collective("broadcast of the statistics"):
            broadcast(self._model.non_trainable_weights, self.groups)
        sums: dict[str, Any] = {}
        for numbers in indices:
            # Again with each batch: an evaluation that goes on, however long it takes, doesn't hang.
            self.heartbeat.doing("evaluation")
            if len(numbers) or self._meets_empty:
                measured = self._measure(self._eval_data.batch(numbers))
                for name, value in measured.items() if len(numbers) and self._tells else ():
                    sums[name] = sums.get(name, 0.0) + value
        return {name: float(value) for name, value in sums.items()}

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks."""
        with self.heartbeat.collective("sum over ranks"):
            total = hvd.allreduce(tf.constant(values, tf.float64), op=hvd.Sum, name="hvdtrain.sum")
            return list(total.numpy().tolist())

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value."""
        with self.heartbeat.collective("broadcast"):
            result: T = hvd.broadcast_object(value, root_rank=0, name="hvdtrain.object")
        return result

    def gather(self, value: T) -> list[T]:
        """Each rank's value."""
        with self.heartbeat.collective("gathering"):
            values: list[T] = hvd.allgather_object(value, name="hvdtrain.gather")
        return values

    def snapshot(self) -> Callable[[Path], None]:
        """What is returned writes `MODEL_FILE`, with the optimizer; it loads without Horovod."""
        if self._saver is not None:
            write = self._saver.take()
            return lambda folder: write(folder / MODEL_FILE)
        with self.heartbeat.collective("gathering of the model"):
            wholes = collect(state_of(self._model), self.groups)
        if self._whole is None:
            return lambda folder: None
        write_whole = self._whole.take(wholes)
        # It isn't rank 0's part alone.
        return lambda folder: write_whole(folder.parent / MODEL_FILE)

    def restore(self, folder: Path) -> None:
        """Rank 0 reads what `snapshot` wrote, and gives all ranks what they have of it."""
        wholes = []
        try:
            if self._whole is not None:
                wholes = self._whole.read(folder / MODEL_FILE)
            elif self.rank == 0:
                self._model.load_weights(folder / MODEL_FILE)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the checkpoint doesn't fit the task's model and optimizer: {error}",
                where=str(folder),
                fix="start a new run, or make the model and the optimizer as they were",
            ) from error
        if self.parts:
            with self.heartbeat.collective("broadcast of the checkpoint"):
                hand_out(state_of(self._model), wholes, self.groups)
            self._rate = math.nan
        else:
            self.broadcast_state()

    def digest(self) -> str:
        """Of weights and optimizer. Generators' states aren't part of it: they differ by rank."""
        found = hashlib.blake2b(digest_size=16)
        for variable in state_of(self._model):
            found.update(np.ascontiguousarray(variable.numpy()).tobytes())
        return found.hexdigest()

    def random_state(self) -> dict[str, Any]:
        """Of Python, numpy and the model's own generators; TensorFlow's `tf.random` doesn't tell its state."""
        return random_state.capture() | {"keras": [state.numpy().tolist() for state in self._seed_states]}

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Goes on with the streams of a `random_state`."""
        random_state.restore(state)
        for variable, value in zip(self._seed_states, state["keras"], strict=True):
            variable.assign(value)

    def finish(self) -> None:
        """Waits for all ranks, then leaves Horovod."""
        with self.heartbeat.collective("end of the training"):
            hvd.barrier()
        hvd.shutdown()

    def _compile_steps(self) -> None:
        """Traces the step once, for batches of any size, here and not in the first, measured step."""
        # Random operations in the task's own functions are seeded here. They must differ by replica.
        keras.utils.set_random_seed((self._seed + 1 + self.stream) % 2**32)
        self._has_gradient: list[bool] = []
        # Without AutoGraph, which doesn't let hvdtrain's own errors through.
        compiled = functools.partial(tf.function, autograph=False, reduce_retracing=True)
        self._weighted_step = compiled(self._trace_weighted_step)
        self._weighted_step.get_concrete_function(self._train_data.signature(), tf.TensorSpec([], tf.float32))
        self._idle_step = compiled(self._trace_idle_step)
        self._measure = compiled(self._trace_measure)
        if self.eval_samples:
            self._measure.get_concrete_function(self._eval_data.signature())

    def _trace_weighted_step(self, batch: Any, weight: Any) -> Any:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            loss = _mean(_mean_or_per_sample(self._task.loss(self._model, batch), "loss()"))
            # Here and not on the gradients: those of shared tables go to other ranks within the backward pass.
            scaled = self._optimizer.scale_loss(loss * tf.cast(weight, loss.dtype))
        gradients = tape.gradient(scaled, variables)
        self._has_gradient = [gradient is not None for gradient in gradients]
        # Dense, because a rank without samples has dense zeros where the others would have sparse gradients.
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        self._optimizer.apply(dense, variables)
        return loss

    def _trace_idle_step(self) -> None:
        """A rank's part in a step for which it has no samples: zeros in the average."""
        variables = self._model.trainable_variables
        zeros = [
            tf.zeros(variable.shape, variable.dtype) if has_gradient else None
            for variable, has_gradient in zip(variables, self._has_gradient, strict=True)
        ]
        self._optimizer.apply(zeros, variables)

    def _trace_measure(self, batch: Any) -> dict[str, Any]:
        """The sum over the batch's samples of each metric, in float64."""
        samples = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float64)
        sums = {}
        for name, value in self._task.metrics(self._model, batch).items():
            values = tf.cast(_mean_or_per_sample(value, f"metrics()[{name!r}]"), tf.float64)
            sums[name] = tf.reduce_mean(values) * samples
        return sums


def _choose_device(local_rank: int, local_size: int) -> str:
    """A GPU of its own for each rank of a host, else its share of the cores; says which.

    Where a scheduler has given each rank one GPU, that is number 0.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        mine = gpus[local_rank % len(gpus)]
        tf.config.set_visible_devices(mine, "GPU")
        return "one " + str(tf.config.experimental.get_device_details(mine).get("device_name", "GPU"))
    # TensorFlow takes every core for itself, and ranks that do so on one host slow each other.
    threads = max(1, len(os.sched_getaffinity(0)) // local_size)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        with contextlib.suppress(KeyError, ValueError):
            threads = int(os.environ[name])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    return f"CPU, {threads} {'thread' if threads == 1 else 'threads'}"


def _learning_rates(optimizer: keras.optimizers.Optimizer, lr: float) -> list[tuple[keras.Variable, float]]:
    """The optimizer's learning rates, several in a `MultiOptimizer`, and each one's ratio to ``lr``.

    Optimizers that wrap others have an unused one of their own, which is 0 and stays it.
    """
    rates = [(v, float(v) / lr) for v in optimizer.variables if v.name == "learning_rate"]
    if not any(ratio for _, ratio in rates):
        raise UsageError(
            "optimizer() gave one whose learning rate can't be set",
            fix="make it with learning_rate=lr, and choose warm-up and decay in the job's options",
        )
    return rates


def _mean(loss: tf.Tensor) -> tf.Tensor:
    """The mean of a batch's losses, in float32 at least; 0 of none, where a mean would be no number."""
    precise = loss if loss.dtype == tf.float64 else tf.cast(loss, tf.float32)
    return tf.reduce_sum(precise) / tf.cast(tf.maximum(tf.size(precise), 1), precise.dtype)


def _mean_or_per_sample(value: Any, source: str) -> tf.Tensor:
    """The value as it is, if it is a scalar or has one dimension."""
    tensor = tf.convert_to_tensor(value)
    if tensor.shape.rank not in (0, 1):
        raise UsageError(
            f"the task's {source} has shape {tensor.shape}",
            fix="return the mean of the batch (a scalar) or one value per sample, shape [samples]",
        )
    return tensor
