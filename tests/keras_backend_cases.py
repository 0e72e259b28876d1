"""What test_keras_train.py checks of the loop's Keras backend, on real ranks: `keras_backend_cases.py FOLDER`."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.errors import HvdtrainError
from hvdtrain.train.keras import Options, Task
from hvdtrain.train.keras.backend import KerasBackend
from hvdtrain.train.settings import Settings
from hvdtrain.train.sharding import epoch_order, shares

FOLDER = Path(sys.argv[1])
SAMPLES = 41
LR = 0.05

rng = np.random.default_rng(5)
FEATURES = rng.normal(size=(SAMPLES, 5)).astype("float32")
TARGETS = (FEATURES @ rng.normal(size=(5, 3)) + np.arange(SAMPLES)[:, None] % 7).astype("float32")
TOKENS = rng.integers(0, 9, size=(SAMPLES, 4))


class Regression(Task):
    """Two dense layers; a variant sets `layers`, `make_optimizer` or `data`."""

    layers: Callable[[], list[Any]] = staticmethod(lambda: [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    make_optimizer: Callable[[float], Any] = staticmethod(lambda lr: keras.optimizers.SGD(lr, momentum=0.9))
    data: Any = (FEATURES, TARGETS)
    shape: tuple[int, ...] = (5,)

    def model(self) -> keras.Model:
        return keras.Sequential([keras.Input(self.shape), *self.layers()])

    def optimizer(self, model: keras.Model, lr: float) -> keras.optimizers.Optimizer:
        return self.make_optimizer(lr)

    def train_data(self) -> Any:
        return self.data

    def eval_data(self) -> Any:
        return self.data

    def loss(self, model: keras.Model, batch: Any, training: bool = True) -> tf.Tensor:
        inputs, targets = batch
        return keras.losses.mean_squared_error(targets, tf.cast(model(inputs, training=training), tf.float32))


def variant(**attributes: Any) -> type[Regression]:
    return type("Variant", (Regression,), {k: staticmethod(v) if callable(v) else v for k, v in attributes.items()})


def backend_of(task: type[Task], seed: int = 1, **settings: Any) -> KerasBackend:
    backend = KerasBackend(task(Options()), Settings.model_validate(settings))
    backend.seed(seed)
    backend.build(LR)
    backend.broadcast_state()
    return backend


def train(backend: KerasBackend, batch_size: int, epochs: int = 2, lr: float = LR) -> None:
    for epoch in range(epochs):
        mine = list(shares(epoch_order(SAMPLES, 0, epoch), batch_size * backend.size, backend.rank, backend.size))
        batches = backend.train_batches(share.indices for share in mine)
        for share, batch in zip(mine, batches, strict=True):
            backend.train_step(batch, len(share.indices), share.weight, lr)


def state_of(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


def apart(left: list[Any], right: list[Any]) -> float:
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(left, right, strict=True))


def compare(task: type[Regression], batch_size: int) -> dict[str, float]:
    """Trains on the ranks, and in a loop by hand on global batches, from the same weights."""
    backend = backend_of(task)
    start = backend._model.get_weights()
    reference = task(Options())
    alone = reference.model()
    alone.set_weights(start)
    optimizer = reference.make_optimizer(LR)
    train(backend, batch_size)
    for epoch in range(2):
        order = epoch_order(SAMPLES, 0, epoch)
        for first in range(0, SAMPLES, 2 * batch_size):
            numbers = order[first : first + 2 * batch_size]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(reference.loss(alone, tuple(array[numbers] for array in task.data)))
            optimizer.apply(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables)
    mine = backend._model.get_weights()
    ranks = hvd.allgather_object(mine)
    return {
        "from_one_process": apart(mine, alone.get_weights()),
        "across_ranks": apart(*ranks),
        "moved": apart(mine, start),
        "traces": float(backend._weighted_step.experimental_get_tracing_count()),
    }


def equal_with_an_uneven_tail() -> dict[str, float]:
    """41 samples in steps of 16: the last has 5 and 4."""
    return compare(Regression, 8)


def equal_with_a_rank_without_samples() -> dict[str, float]:
    """41 samples in steps of 20: the last has 1 and 0."""
    return compare(Regression, 10)


def equal_in_one_step() -> dict[str, float]:
    """41 samples in a step of 80: 21 and 20."""
    return compare(Regression, 40)


def equal_with_clipping() -> dict[str, float]:
    return compare(variant(make_optimizer=lambda lr: keras.optimizers.Adam(lr, global_clipnorm=0.1)), 10)


def equal_with_accumulation() -> dict[str, float]:
    """Two steps of 20, and one of 1 that waits for the next epoch's first."""
    return compare(variant(make_optimizer=lambda lr: keras.optimizers.SGD(lr, gradient_accumulation_steps=2)), 10)


def equal_with_embedding() -> dict[str, float]:
    layers = lambda: [keras.layers.Embedding(9, 6), keras.layers.Flatten(), keras.layers.Dense(3)]  # noqa: E731
    return compare(variant(layers=layers, shape=(4,), data=(TOKENS, TARGETS)), 10)


def equal_with_a_layer_without_gradient() -> dict[str, float]:
    class Spare(keras.layers.Dense):
        def build(self, shape: Any) -> None:
            super().build(shape)
            self.spare = self.add_weight(shape=(2,), initializer="ones")

    return compare(variant(layers=lambda: [Spare(3)]), 10)


def mixed_precision() -> dict[str, float]:
    """Compile puts the loss scaling around; a rank without samples takes part in its decisions."""

    class Mixed(Regression):
        def model(self) -> keras.Model:
            keras.config.set_dtype_policy("mixed_float16")
            model = super().model()
            keras.config.set_dtype_policy("float32")
            return model

    backend = backend_of(Mixed)
    before = backend.evaluate([np.arange(SAMPLES)])["loss"]
    train(backend, 10, epochs=5)
    return {
        "is_scaled": float(isinstance(backend._optimizer, keras.optimizers.LossScaleOptimizer)),
        "across_ranks": apart(*hvd.allgather_object(backend._model.get_weights())),
        "gain": before / backend.evaluate([np.arange(SAMPLES)])["loss"],
    }


def dropout_differs_by_rank_and_repeats() -> dict[str, Any]:
    backend = backend_of(variant(layers=lambda: [keras.layers.Dropout(0.5), keras.layers.Dense(3)]))
    layer = backend._model.layers[0]
    ones = np.ones((1, 64), "float32")

    def mask(seed: int) -> list[float]:
        backend.seed(seed)
        return keras.ops.convert_to_numpy(layer(ones, training=True))[0].tolist()

    mine = hvd.allgather_object(mask(10 + backend.rank))
    return {"differs": mine[0] != mine[1], "repeats": mask(10 + backend.rank) == mine[backend.rank]}


def evaluation_measures_what_is_saved() -> dict[str, float]:
    """Batch normalisation's statistics differ by rank while training, and are rank 0's when it is measured."""
    backend = backend_of(variant(layers=lambda: [keras.layers.BatchNormalization(), keras.layers.Dense(3)]))
    train(backend, 8)
    statistics = [v.numpy() for v in backend._model.non_trainable_weights]
    before = apart(*hvd.allgather_object(statistics))
    mine = np.arange(SAMPLES)[backend.rank :: 2]
    total = sum(backend.sum_over_ranks([backend.evaluate([mine[:7], mine[7:7], mine[7:]])["loss"]]))
    statistics = [v.numpy() for v in backend._model.non_trainable_weights]
    task = Regression(Options())
    whole = tf.reduce_mean(task.loss(backend._model, (FEATURES, TARGETS), training=False))
    return {
        "before": before,
        "after": apart(*hvd.allgather_object(statistics)),
        "mean_from_whole": abs(total / SAMPLES - float(whole)),
        "without_samples": float(len(backend.evaluate([]))),
    }


def compressed() -> dict[str, Any]:
    """Each kind that a job can name: what it moves the weights by, and how far that is from what none does."""
    weights, found = {}, {}
    for kind in ("none", "bf16", "topk", "auto"):
        backend = backend_of(Regression, compression=kind)
        start = backend._model.get_weights()
        train(backend, 8)
        weights[kind] = backend._model.get_weights()
        found[kind] = {
            "moved": apart(weights[kind], start),
            "from_none": apart(weights[kind], weights["none"]),
            "across_ranks": apart(*hvd.allgather_object(weights[kind])),
            "findings": [backend.findings(), backend.findings()],
        }
    return found


class Plain(keras.Model):
    """Keras can't make it again: it doesn't know the number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(number)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def get_config(self) -> dict[str, Any]:
        return {}


class WithPlain(Regression):
    def model(self) -> keras.Model:
        return Plain(3)


def restored() -> dict[str, float]:
    return restore(Regression)


def restored_where_keras_can_not_make_the_model_again() -> dict[str, float]:
    return restore(WithPlain)


def restore(task: type[Task]) -> dict[str, float]:
    backend = backend_of(task)
    train(backend, 8)
    folder = FOLDER / f"checkpoint-{task.__name__}"
    drawn = random.getstate()
    write = backend.snapshot() if backend.rank == 0 else None
    assert random.getstate() == drawn
    saved = hvd.broadcast_object(state_of(backend._model))
    # What is written is what the variables were, and another thread may do it.
    train(backend, 8)
    since = apart(state_of(backend._model), saved)
    if write:
        folder.mkdir(exist_ok=True)
        thread = threading.Thread(target=write, args=(folder,))
        thread.start()
        thread.join()
    fresh = backend_of(task, seed=9)
    before = apart(state_of(fresh._model), saved)
    fresh.restore(folder)
    digests = fresh.gather(fresh.digest())
    return {
        "since": since,
        "before": before,
        "after": apart(state_of(fresh._model), saved),
        "digests": float(len(set(digests))),
        "differing_digests": float(len({*digests, backend.digest()})),
    }


def data_by_numbers() -> dict[str, float]:
    """Data that is made when it is asked for, in a dict."""

    class Squares:
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
            return {"x": FEATURES[numbers], "y": TARGETS[numbers]}

    class Named(Regression):
        data = Squares()

        def loss(self, model: keras.Model, batch: Any, training: bool = True) -> tf.Tensor:
            return tf.reduce_mean(super().loss(model, (batch["x"], batch["y"]), training))

    results = []
    for task in (Named, Regression):
        backend = backend_of(task)
        train(backend, 8)
        results.append((backend._model.get_weights(), backend.evaluate([np.arange(9), np.arange(9, 41)])["loss"]))
    (by_number, mean), (by_array, per_sample) = results
    return {"from_arrays": apart(by_number, by_array), "loss_apart": abs(mean / per_sample - 1)}


def learning_rates() -> dict[str, Any]:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return {"rates": [0.2, 2.0]}
    options = {"optimizer_map": {".*bias": keras.optimizers.SGD(10 * LR)}}

    def make(lr: float) -> Any:
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.SGD(lr), **options)
        )

    backend = backend_of(variant(make_optimizer=make))
    train(backend, 8, epochs=1, lr=0.2)
    return {"rates": sorted(round(float(each.learning_rate), 6) for each in backend._optimizer.optimizers)}


def threads() -> dict[str, float]:
    KerasBackend(Regression(Options()), Settings())
    return {"intra_op": float(tf.config.threading.get_intra_op_parallelism_threads())}


def errors() -> dict[str, str]:
    def error_of(task: type[Task]) -> str:
        try:
            backend_of(task)
        except HvdtrainError as error:
            return str(error)
        return "no error"

    class Wide(Regression):
        def loss(self, model: keras.Model, batch: Any, training: bool = True) -> tf.Tensor:
            return model(batch[0], training=training) - batch[1]

    class WideMetric(Regression):
        def metrics(self, model: keras.Model, batch: Any) -> dict[str, tf.Tensor]:
            return {"error": model(batch[0], training=False) - batch[1]}

    class NoConfig(Plain):
        get_config = keras.Model.get_config

    class WithoutConfig(Regression):
        def model(self) -> keras.Model:
            return NoConfig(3)

    def refusal(**settings: Any) -> str:
        try:
            KerasBackend(Regression(Options()), Settings.model_validate(settings))
        except HvdtrainError as error:
            return str(error)
        return "no error"

    # Rank 0 saves, and it alone tells.
    saving = "no error"
    try:
        KerasBackend(WithoutConfig(Options()), Settings()).build(LR)
    except HvdtrainError as error:
        saving = str(error)
    schedule = keras.optimizers.schedules.CosineDecay(LR, 10)
    return {
        "config": saving,
        "shards": refusal(parallelism={"shard_optimizer": True}),
        "parts": refusal(parallelism={"micro_batches": 2}),
        "loss": error_of(Wide),
        "metric": error_of(WideMetric),
        "lengths": error_of(variant(data=(FEATURES, TARGETS[:7]))),
        "empty": error_of(variant(data=())),
        "iterator": error_of(variant(data=iter([1]))),
        "schedule": error_of(variant(make_optimizer=lambda lr: keras.optimizers.SGD(schedule))),
    }


NAMES = [
    *(name for name in list(globals()) if name.startswith("equal_")),
    "mixed_precision",
    "dropout_differs_by_rank_and_repeats",
    "evaluation_measures_what_is_saved",
    "compressed",
    "restored",
    "restored_where_keras_can_not_make_the_model_again",
    "data_by_numbers",
    "learning_rates",
    "threads",
    "errors",
]

if __name__ == "__main__":
    results: dict[str, Any] = {}
    for name in sys.argv[2:] or NAMES:
        print("case", name, flush=True)
        results[name] = globals()[name]()
        (FOLDER / f"backend-{hvd.rank()}.json").write_text(json.dumps(results))
    hvd.barrier()
