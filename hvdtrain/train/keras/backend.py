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
from typing import Any, Literal, SupportsFloat, TypeVar

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.errors import UsageError
from hvdtrain.train import random_state
from hvdtrain.train.keras.data import Samples
from hvdtrain.train.keras.task import Task
from hvdtrain.train.keras.twin import Saver
from hvdtrain.train.membership import Member
from hvdtrain.train.sharding import Indices

T = TypeVar("T")

MODEL_FILE = "model.keras"


class KerasBackend(Member):
    """One rank's data, model and optimizer (see `hvdtrain.train.backend.Backend` for the methods)."""

    def __init__(self, task: Task, *, compression: Literal["none", "fp16"]) -> None:
        self._task = task
        self._compression = compression
        super().__init__(hvd)
        self.train_samples = 0
        self.eval_samples = 0
        self._seed = 0
        self._seed_states: list[keras.Variable] = []
        # Of rank 0, which may be another one later.
        self._saver: Saver | None = None
        self._device = _choose_device(hvd.local_rank(), self.local_size())

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
            state.assign([int(np.random.SeedSequence([seed, number]).generate_state(1)[0]), 0])

    def build(self, lr: float) -> None:
        """Makes data, model and optimizer, and traces the steps."""
        keras.utils.set_random_seed(self._seed)
        self._train_data = Samples(self._task.train_data(), "train_data()")
        self._eval_data = Samples(self._task.eval_data(), "eval_data()")
        self.train_samples = len(self._train_data)
        self.eval_samples = len(self._eval_data)
        self._model = self._task.model()
        optimizer = self._task.optimizer(self._model, lr)
        if not self.train_samples:
            return
        if not self._model.built:
            self._task.loss(self._model, self._train_data.batch(np.zeros(1, np.int64)))
        # Compiled for what that adds: loss scaling under mixed_float16, and the optimizer in the saved model.
        compression = getattr(hvd.Compression, self._compression)
        self._model.compile(hvd.DistributedOptimizer(optimizer, compression=compression))
        self._optimizer = self._model.optimizer
        self._optimizer.build(self._model.trainable_variables)
        self._seed_states = [v for v in self._model.variables if v.name == "seed_generator_state"]
        self._rate = lr
        self._rates = _learning_rates(self._optimizer, lr)
        self._compile_steps()
        if self.rank == 0:
            self._saver = Saver(self._model)

    def broadcast_state(self) -> None:
        """Gives all ranks rank 0's weights and optimizer state."""
        with self.heartbeat.collective("broadcast of the model"):
            hvd.broadcast_model(self._model, root_rank=0)
        # The learning rate is one of the optimizer's variables.
        self._rate = math.nan

    def train_batches(self, indices: Iterable[Indices]) -> Iterator[Any]:
        """A batch for each of the index arrays; None for an empty one."""
        return self._train_data.batches(indices)

    def train_step(self, batch: Any, samples: int, weight: float, lr: float) -> SupportsFloat:
        """One step of all ranks, whatever their numbers of samples."""
        if lr != self._rate:
            for variable, ratio in self._rates:
                variable.assign(lr * ratio)
            self._rate = lr
        # The ranks meet inside the compiled step: from out here nobody sees whether it computes or waits.
        self.heartbeat.doing("step")
        if not samples:
            self._idle_step()
            return 0.0
        loss: SupportsFloat = self._weighted_step(batch, tf.constant(weight, tf.float32))
        return loss

    def evaluate(self, indices: Iterable[Indices]) -> dict[str, float]:
        """The sum of each metric over this rank's samples."""
        with self.heartbeat.collective("broadcast of the statistics"):
            hvd.broadcast_variables(self._model.non_trainable_weights, root_rank=0)
        sums: dict[str, Any] = {}
        for batch in self._eval_data.batches(indices):
            # Again with each batch: an evaluation that goes on, however long it takes, doesn't hang.
            self.heartbeat.doing("evaluation")
            if batch is not None:
                for name, value in self._measure(batch).items():
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
        assert self._saver is not None
        write = self._saver.take()
        return lambda folder: write(folder / MODEL_FILE)

    def restore(self, folder: Path) -> None:
        """Reads what `snapshot` wrote."""
        try:
            self._model.load_weights(folder / MODEL_FILE)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the checkpoint doesn't fit the task's model and optimizer: {error}",
                where=str(folder),
                fix="start a new run, or make the model and the optimizer as they were",
            ) from error

    def digest(self) -> str:
        """Of weights and optimizer. Generators' states aren't part of it: they differ by rank."""
        found = hashlib.blake2b(digest_size=16)
        for variable in [*self._model.weights, *self._optimizer.variables]:
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
        # Random operations in the task's own functions are seeded here. They must differ by rank.
        keras.utils.set_random_seed((self._seed + 1 + self.rank) % 2**32)
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
            loss = tf.reduce_mean(_mean_or_per_sample(self._task.loss(self._model, batch), "loss()"))
            scaled = self._optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        self._has_gradient = [gradient is not None for gradient in gradients]
        # Dense, because a rank without samples has dense zeros where the others would have sparse gradients.
        weighted = [
            None if gradient is None else tf.convert_to_tensor(gradient) * tf.cast(weight, gradient.dtype)
            for gradient in gradients
        ]
        self._optimizer.apply(weighted, variables)
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


def _mean_or_per_sample(value: Any, source: str) -> tf.Tensor:
    """The value as it is, if it is a scalar or has one dimension."""
    tensor = tf.convert_to_tensor(value)
    if tensor.shape.rank not in (0, 1):
        raise UsageError(
            f"the task's {source} has shape {tensor.shape}",
            fix="return the mean of the batch (a scalar) or one value per sample, shape [samples]",
        )
    return tensor
