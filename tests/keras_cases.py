"""What test_keras.py checks, on real ranks: `horovodrun -np 2 python keras_cases.py FOLDER [CASE…]`.

Each case returns numbers, which every rank writes to FOLDER/rank-N.json. Most cases train a model on both ranks, each
with its half of every batch, and the same model in this process alone on whole batches, and say how far apart the
weights ended.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.errors import HvdtrainError
from hvdtrain.keras import variables

FOLDER = Path(sys.argv[1])
BATCH = 8
STEPS = 6
WORDS = 12

rng = np.random.default_rng(7)
FEATURES = rng.normal(size=(2 * BATCH * STEPS, 5)).astype("float32")
# Ranks that see different targets have different gradients: an average that isn't taken shows.
TARGETS = (FEATURES @ rng.normal(size=(5, 3)) + np.arange(len(FEATURES))[:, None] % 7).astype("float32")
TOKENS = rng.integers(0, WORDS, size=(2 * BATCH * STEPS, 4))


def half(data: np.ndarray) -> np.ndarray:
    """This rank's samples: its half of every global batch."""
    return data.reshape(STEPS, 2, BATCH, *data.shape[1:])[:, hvd.rank()].reshape(BATCH * STEPS, *data.shape[1:])


def dense_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)], **options)


def embedding_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(WORDS, 6), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((4,), dtype="int32"), *layers])


def apart(left: list[Any], right: list[Any]) -> float:
    return max(
        float(np.abs(np.asarray(a, "float64") - np.asarray(b, "float64")).max())
        for a, b in zip(left, right, strict=True)
    )


def across_ranks(arrays: list[Any]) -> float:
    """How far this rank's arrays are from rank 0's."""
    return apart(hvd.allgather_object([np.asarray(array, "float64") for array in arrays])[0], arrays)


def state_of(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in [*model.weights, *model.optimizer.variables]]


def fit(
    model: keras.Model, optimizer: Any, inputs: np.ndarray, targets: np.ndarray, batch: int, **options: Any
) -> None:
    epochs = options.pop("epochs", 2)
    callbacks = options.pop("callbacks", None)
    model.compile(optimizer=optimizer, loss="mse", **options)
    model.fit(inputs, targets, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


def compare(
    make_optimizer: Callable[[], Any],
    make_model: Callable[[], keras.Model] = dense_model,
    wrap: Callable[[Any], Any] = hvd.DistributedOptimizer,
    make_reference: Callable[[], Any] | None = None,
    reference_batch: int = 2 * BATCH,
    **options: Any,
) -> dict[str, float]:
    """Trains distributed and alone; the learning must have moved the weights for the rest to mean anything."""
    inputs = TOKENS if make_model is embedding_model else FEATURES
    start = make_model().get_weights()
    model, alone = make_model(), make_model()
    fit(model, wrap(make_optimizer()), half(inputs), half(TARGETS), BATCH, **options)
    fit(alone, (make_reference or make_optimizer)(), inputs, TARGETS, reference_batch, **options)
    return {
        "from_one_process": apart(model.get_weights(), alone.get_weights()),
        "across_ranks": across_ranks(state_of(model)),
        "moved": apart(model.get_weights(), start),
    }


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except HvdtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


# --- one process with all samples ---------------------------------------------------------------------------------


def equal_sgd() -> dict[str, float]:
    return compare(sgd)


def equal_clipnorm() -> dict[str, float]:
    return compare(lambda: sgd(clipnorm=0.3))


def equal_clipvalue() -> dict[str, float]:
    return compare(lambda: sgd(clipvalue=0.05))


def equal_global_clipnorm() -> dict[str, float]:
    return compare(lambda: sgd(global_clipnorm=0.3))


def equal_adamw_ema() -> dict[str, float]:
    return compare(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3))


def equal_nadam() -> dict[str, float]:
    """It has an update step of its own."""
    return compare(lambda: keras.optimizers.Nadam(0.01))


def equal_schedule() -> dict[str, float]:
    return compare(
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.0, 10, warmup_target=0.1, warmup_steps=4))
    )


def equal_loss_scale_factor() -> dict[str, float]:
    return compare(lambda: sgd(loss_scale_factor=128.0, clipnorm=0.3))


def equal_groups() -> dict[str, float]:
    return compare(sgd, wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, groups=3))


def equal_eagerly() -> dict[str, float]:
    return compare(sgd, run_eagerly=True, epochs=1)


def equal_steps_per_execution() -> dict[str, float]:
    return compare(sgd, steps_per_execution=2)


def equal_sum() -> dict[str, float]:
    """The sum over two ranks is twice the average."""
    return compare(
        lambda: keras.optimizers.SGD(0.01),
        wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, op=hvd.Sum),
        make_reference=lambda: keras.optimizers.SGD(0.02),
    )


def equal_accumulation_of_keras() -> dict[str, float]:
    return compare(
        lambda: sgd(gradient_accumulation_steps=3, clipnorm=0.3),
        make_reference=lambda: sgd(clipnorm=0.3),
        reference_batch=6 * BATCH,
    )


def equal_accumulation_of_horovod() -> dict[str, float]:
    return compare(
        lambda: sgd(global_clipnorm=0.3),
        wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, backward_passes_per_step=3),
        make_reference=lambda: sgd(global_clipnorm=0.3),
        reference_batch=6 * BATCH,
    )


def equal_accumulation_eagerly() -> dict[str, float]:
    return compare(
        lambda: sgd(gradient_accumulation_steps=3),
        make_reference=sgd,
        reference_batch=6 * BATCH,
        run_eagerly=True,
        epochs=1,
    )


def equal_embedding() -> dict[str, float]:
    return compare(lambda: sgd(clipnorm=0.3), embedding_model)


def equal_embedding_adam() -> dict[str, float]:
    return compare(lambda: keras.optimizers.Adam(0.01), embedding_model)


def equal_embedding_accumulation() -> dict[str, float]:
    return compare(
        lambda: sgd(gradient_accumulation_steps=3), embedding_model, make_reference=sgd, reference_batch=6 * BATCH
    )


def equal_multi_optimizer() -> dict[str, float]:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return {"from_one_process": 0.0, "across_ranks": 0.0, "moved": 1.0}

    def make() -> keras.optimizers.Optimizer:
        options = {"default_optimizer": sgd(clipnorm=0.3), "optimizer_map": {".*bias": keras.optimizers.Adam(0.01)}}
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(**options))

    return compare(make)


def equal_own_optimizer() -> dict[str, float]:
    """A user's optimizer whose `apply` is its own."""

    class SignDescent(keras.optimizers.Optimizer):
        def build(self, variables: Any) -> None:
            super().build(variables)

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            if not self.built:
                self.build(trainable_variables)
            for gradient, variable in zip(grads, trainable_variables or self._trainable_variables, strict=True):
                variable.assign(variable - 0.01 * keras.ops.sign(gradient))

    return compare(lambda: SignDescent(0.1))


def equal_bfloat16() -> dict[str, float]:
    """Horovod has no bfloat16; half-precision variables end within their own rounding."""
    return compare(lambda: keras.optimizers.SGD(0.01), lambda: dense_model_of("bfloat16"))


def dense_model_of(policy: str) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "tanh", dtype=policy), keras.layers.Dense(3, dtype=policy)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.dtype_policy = policy
    return model


def equal_loop_in_graph() -> dict[str, float]:
    return own_loop(lambda optimizer, pairs: optimizer.apply_gradients(pairs), tf.function)


def equal_loop_eagerly() -> dict[str, float]:
    return own_loop(lambda optimizer, pairs: optimizer.apply(*zip(*pairs, strict=True)), lambda step: step)


def own_loop(apply: Callable[[Any, Any], Any], compiled: Callable[[Any], Any]) -> dict[str, float]:
    """With a variable that the loss doesn't touch: its gradient is None."""

    def train(optimizer: Any, inputs: np.ndarray, targets: np.ndarray, batch: int) -> list[np.ndarray]:
        model = dense_model()
        spare = keras.Variable(np.ones(3, "float32"), name="spare")
        trainable = [*model.trainable_variables, spare]

        @compiled
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            apply(optimizer, list(zip(tape.gradient(loss, trainable), trainable, strict=True)))

        for start in range(0, len(inputs), batch):
            step(inputs[start : start + batch], targets[start : start + batch])
        return [variable.numpy() for variable in trainable]

    start = dense_model().get_weights()
    got = train(hvd.DistributedOptimizer(sgd(clipnorm=0.3)), half(FEATURES), half(TARGETS), BATCH)
    alone = train(sgd(clipnorm=0.3), FEATURES, TARGETS, 2 * BATCH)
    return {"from_one_process": apart(got, alone), "across_ranks": across_ranks(got), "moved": apart(got[:-1], start)}


def equal_after_plain_training() -> dict[str, float]:
    """An optimizer that was built and used alone, and then made distributed, goes on with its moments."""
    model, alone = dense_model(), dense_model()
    start = model.get_weights()
    for each in (model, alone):
        fit(each, sgd(), FEATURES[:32], TARGETS[:32], 16, epochs=1)
    momentum = apart(model.optimizer.variables[2:], [np.zeros(v.shape) for v in model.optimizer.variables[2:]])
    same = hvd.DistributedOptimizer(model.optimizer) is model.optimizer
    model.make_train_function(force=True)
    model.fit(half(FEATURES), half(TARGETS), batch_size=BATCH, shuffle=False, verbose=0)
    alone.fit(FEATURES, TARGETS, batch_size=2 * BATCH, shuffle=False, verbose=0)
    return {
        "from_one_process": apart(state_of(model), state_of(alone)),
        "across_ranks": across_ranks(state_of(model)),
        "moved": min(apart(model.get_weights(), start), momentum) if same else 0.0,
    }


def equal_with_names_that_differ() -> dict[str, float]:
    """Rank 0 makes a model and an optimizer more, so its layers and its optimizer have other automatic names."""
    if hvd.rank() == 0:
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), keras.layers.Dense(2)])
        keras.optimizers.SGD()
    result = compare(lambda: sgd(gradient_accumulation_steps=3), make_reference=sgd, reference_batch=6 * BATCH)
    names = hvd.allgather_object(dense_model().layers[0].name)
    return {**result, "moved": result["moved"] if names[0] != names[1] else 0.0}


# --- communication -------------------------------------------------------------------------------------------------


def compression() -> dict[str, float]:
    return compare(
        lambda: keras.optimizers.SGD(0.01),
        embedding_model,
        wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16),
    )


def collectives() -> dict[str, float]:
    """Allreduces of each of the model's four weights in an epoch of 6 steps, as Horovod's own timeline tells."""
    counts = {}
    for name, options in {"plain": {}, "accumulated": {"gradient_accumulation_steps": 3}}.items():
        model = dense_model()
        fit(model, hvd.DistributedOptimizer(sgd(**options)), half(FEATURES), half(TARGETS), BATCH, epochs=1)
        path = FOLDER / f"timeline-{name}.json"
        hvd.start_timeline(str(path))
        model.fit(half(FEATURES), half(TARGETS), batch_size=BATCH, shuffle=False, verbose=0)
        hvd.stop_timeline()
        if hvd.rank() == 0:
            events = timeline(path)
            gradients = {e["pid"] for e in events if "DistributedOptimizer" in e.get("args", {}).get("name", "")}
            began = [e["pid"] for e in events if e.get("name") == "NEGOTIATE_ALLREDUCE"]
            counts[name] = sum(pid in gradients for pid in began) / 4
        hvd.barrier()
    return counts


def timeline(path: Path) -> list[dict[str, Any]]:
    """Horovod closes the file some time after it was told to stop."""
    end = time.monotonic() + 60
    while not path.read_text().endswith("]"):
        assert time.monotonic() < end
        time.sleep(0.05)
    return json.loads(path.read_text())


def constant_gradients() -> dict[str, list[float]]:
    """Rank 1's gradients are constants of its graph, rank 0's change from step to step: the average must too."""
    dense, rows = keras.Variable([0.0, 0.0]), keras.Variable([[0.0], [0.0]])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0))
    optimizer.build([dense, rows])

    def step(value: tf.Tensor) -> None:
        own = tf.fill([2], value) if hvd.rank() == 0 else tf.constant([2.0, 4.0])
        row = tf.fill([1, 1], value) if hvd.rank() == 0 else tf.constant([[6.0]])
        optimizer.apply([own, tf.IndexedSlices(row, tf.constant([hvd.rank()]), tf.constant([2, 1]))])

    compiled = tf.function(step)
    seen = []
    for value in (0.0, 2.0, 4.0):
        compiled(tf.constant(value))
        seen.append([*dense.numpy().tolist(), *rows.numpy().ravel().tolist()])
    return {"seen": seen}


def process_set() -> dict[str, float]:
    """Each rank's set is itself alone, so each trains as one process on its own half."""
    model, alone = dense_model(), dense_model()
    own = hvd.DistributedOptimizer(sgd(), process_set=SETS[hvd.rank()])
    fit(model, own, half(FEATURES), half(TARGETS), BATCH)
    fit(alone, sgd(), half(FEATURES), half(TARGETS), BATCH)
    return {
        "from_one_process": apart(model.get_weights(), alone.get_weights()),
        "ranks_apart": hvd.allgather_object(across_ranks(model.get_weights()))[1],
    }


# --- mixed precision -----------------------------------------------------------------------------------------------


def scaled_by_hand() -> dict[str, float]:
    return overflow(lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0)))


def scaled_by_compile() -> dict[str, float]:
    return overflow(lambda: hvd.DistributedOptimizer(sgd()))


def scaled_with_accumulation() -> dict[str, float]:
    return overflow(lambda: hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2)))


def overflow(make_optimizer: Callable[[], Any]) -> dict[str, float]:
    """Rank 1's third batch overflows float16; rank 0's doesn't. Both must leave that step out."""
    model = dense_model_of("mixed_float16")
    targets = half(TARGETS) * 0.01
    if hvd.rank() == 1:
        targets[2 * BATCH] = 60000.0
    fit(model, make_optimizer(), half(FEATURES), targets, BATCH, epochs=1)
    scaler = model.optimizer
    third, fresh = slice(2 * BATCH, 3 * BATCH), dense_model_of("mixed_float16")
    with tf.GradientTape() as tape:
        difference = tf.cast(fresh(half(FEATURES)[third]), tf.float32) - targets[third]
        loss = tf.reduce_mean(difference**2) * scaler.initial_scale
    gradients = tape.gradient(loss, fresh.trainable_variables)
    return {
        "own_overflows": float(not all(np.isfinite(gradient.numpy()).all() for gradient in gradients)),
        "is_scaled": float(isinstance(scaler, keras.optimizers.LossScaleOptimizer)),
        "halvings": float(np.log2(scaler.initial_scale / float(scaler.dynamic_scale))),
        "steps_left_out": float(STEPS - scaler.inner_optimizer._iterations.numpy()),
        # Accumulators hold each rank's own gradients until they are reduced.
        "across_ranks": across_ranks([*model.get_weights(), *(v.numpy() for v in scaler._variables)]),
        "finite": float(np.isfinite(model.get_weights()[0]).all()),
    }


# --- broadcast -----------------------------------------------------------------------------------------------------


def broadcast_of_model() -> dict[str, float]:
    keras.utils.set_random_seed(hvd.rank())
    layers = [
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential([keras.Input((5,)), *layers])
    fit(
        model,
        keras.optimizers.Adam(0.01 * (1 + hvd.rank())),
        half(FEATURES),
        half(TARGETS),
        BATCH,
        epochs=1 + hvd.rank(),
    )
    before = hvd.allgather_object(across_ranks(state_of(model)))[1]
    roots = hvd.broadcast_object([array.tolist() for array in state_of(model)], 1)
    hvd.broadcast_model(model, root_rank=1)
    seeds = hvd.allgather_object([v.numpy().tolist() for v in model.variables if "seed" in v.path])
    return {
        "before": before,
        "across_ranks": across_ranks(state_of(model)),
        "from_root": apart(state_of(model), roots),
        "steps": float(model.optimizer.iterations.numpy()),
        "learning_rate": float(model.optimizer.learning_rate),
        "seed_states": float(len(seeds[0])),
        "seeds_differ": float(seeds[0] != seeds[1]),
    }


def broadcast_of_every_dtype() -> dict[str, float]:
    dtypes = ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "bool"]
    shapes: list[tuple[int, ...]] = [(), (0, 3), (7, 3)]
    mine = [tf.Variable(tf.cast(tf.fill(shape, hvd.rank()), dtype)) for dtype in dtypes for shape in shapes]
    large = tf.Variable(tf.fill((3000,), float(hvd.rank())))
    whole, variables.PACKET_BYTES = variables.PACKET_BYTES, 1000
    try:
        hvd.broadcast_variables([*mine, large], root_rank=1)
    finally:
        variables.PACKET_BYTES = whole
    return {"from_root": max(float(np.abs(v.numpy().astype("float64") - 1).max(initial=0)) for v in [*mine, large])}


def broadcast_of_models_that_differ() -> dict[str, str]:
    def model(units: int, layers: int = 1) -> keras.Model:
        return keras.Sequential([keras.Input((5,)), *(keras.layers.Dense(units) for _ in range(layers))])

    return {
        "shape": error_of(lambda: hvd.broadcast_model(model(3 + hvd.rank()))),
        "count": error_of(lambda: hvd.broadcast_model(model(5, 1 + hvd.rank()))),
        "unbuilt": error_of(lambda: hvd.broadcast_model(keras.Sequential([keras.layers.Dense(3)]))),
        "strings": error_of(lambda: hvd.broadcast_variables([tf.Variable(["a"]), tf.Variable("b")])),
        "strings_on_one": error_of(
            lambda: hvd.broadcast_variables([tf.Variable(["a"]) if hvd.rank() else tf.Variable([1.0])])
        ),
    }


# --- callbacks -----------------------------------------------------------------------------------------------------


def callback_broadcast() -> dict[str, float]:
    """Ranks start from different weights: as if all had started from rank 0's."""
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    alone = dense_model()
    alone.set_weights(hvd.broadcast_object(model.get_weights(), 0))
    before = across_ranks(model.get_weights())
    broadcast = [hvd.BroadcastGlobalVariablesCallback(0)]
    fit(model, hvd.DistributedOptimizer(sgd()), half(FEATURES), half(TARGETS), BATCH, callbacks=broadcast)
    fit(alone, sgd(), FEATURES, TARGETS, 2 * BATCH)
    return {
        "before": hvd.allgather_object(before)[1],
        "across_ranks": across_ranks(state_of(model)),
        "from_one_process": apart(model.get_weights(), alone.get_weights()),
    }


def callback_broadcast_to_unbuilt() -> dict[str, float]:
    """A model whose variables come to be in the first batch."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    broadcast = [hvd.BroadcastGlobalVariablesCallback(1)]
    fit(model, hvd.DistributedOptimizer(sgd()), half(FEATURES), half(TARGETS), BATCH, callbacks=broadcast)
    return {"across_ranks": across_ranks(state_of(model))}


def callback_metrics() -> dict[str, float]:
    """Shares of unequal size, in training and in validation, weigh by their samples."""
    cut = [slice(0, 20), slice(20, 96)][hvd.rank()]
    held_out = [slice(0, 70), slice(70, 96)][hvd.rank()]
    model = dense_model()
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", metrics=["mae"])
    whole = model.evaluate(FEATURES, TARGETS, verbose=0, return_dict=True)
    own = model.evaluate(FEATURES[cut], TARGETS[cut], verbose=0, return_dict=True)
    history = model.fit(
        FEATURES[cut],
        TARGETS[cut],
        validation_data=(FEATURES[held_out], TARGETS[held_out]),
        epochs=4,
        validation_freq=2,
        verbose=0,
        callbacks=[hvd.MetricAverageCallback()],
    ).history
    errors = [abs(value - whole[key.removeprefix("val_")]) for key, values in history.items() for value in values]
    return {
        "from_whole": max(errors),
        "own_from_whole": abs(own["loss"] - whole["loss"]),
        "across_ranks": across_ranks([np.array(history[key]) for key in sorted(history)]),
        "logs": float(len(history)),
    }


def callback_early_stopping() -> dict[str, float]:
    """The ranks' own losses tell them to stop at different epochs; the average tells all the same."""

    class Planted(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["watched"] = [[5, 4, 6, 7, 8, 9], [5, 4, 3, 2, 1, 0]][hvd.rank()][epoch]

    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    stop = keras.callbacks.EarlyStopping("watched", mode="min", patience=1)
    callbacks = [Planted(), hvd.callbacks.MetricAverageCallback(), stop]
    # A share of another size for each rank: the average is weighted, 16 to 32 samples.
    size = [16, 32][hvd.rank()]
    history = model.fit(FEATURES[:size], TARGETS[:size], batch_size=size // 2, epochs=6, verbose=0, callbacks=callbacks)
    return {"epochs": float(len(history.epoch)), "third": history.history["watched"][2]}


def callback_warmup() -> dict[str, Any]:
    rates = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(round(float(self.model.optimizer.learning_rate), 6))

    said = io.StringIO()
    warmup = hvd.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2, verbose=1)
    decay = hvd.LearningRateScheduleCallback(0.4, 0.1, start_epoch=3)
    with contextlib.redirect_stdout(said):
        fit(
            dense_model(),
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)),
            half(FEATURES)[: 2 * BATCH],
            half(TARGETS)[: 2 * BATCH],
            BATCH,
            epochs=5,
            callbacks=[warmup, decay, Note()],
        )
    return {"rates": rates, "said": said.getvalue()}


def callback_errors() -> dict[str, str]:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    batches = ((FEATURES[:8], TARGETS[:8]) for _ in range(3))

    def warm_up(optimizer: Any, *data: Any) -> None:
        model = dense_model()
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(*data, verbose=0, callbacks=[hvd.LearningRateWarmupCallback(0.1)])

    return {
        "schedule": error_of(lambda: warm_up(keras.optimizers.SGD(schedule), FEATURES, TARGETS)),
        "steps": error_of(lambda: warm_up(keras.optimizers.SGD(0.1), batches)),
    }


# --- refusals and XLA ----------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    class OwnStep(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply(grads, trainable_variables)

    class OwnCheck(keras.optimizers.LossScaleOptimizer):
        def check_finite(self, grads: Any) -> Any:
            return True

    built = sgd()
    built.build(dense_model().trainable_variables)
    once = hvd.DistributedOptimizer(sgd())
    return {
        "twice": error_of(lambda: hvd.DistributedOptimizer(once)),
        "twice_inside": error_of(lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(once))),
        "no_optimizer": error_of(lambda: hvd.DistributedOptimizer("sgd")),
        "op": error_of(lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Max)),
        "passes": error_of(lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)),
        "groups": error_of(lambda: hvd.DistributedOptimizer(sgd(), groups=0)),
        "both_accumulate": error_of(
            lambda: hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=2)
        ),
        "built": error_of(lambda: hvd.DistributedOptimizer(built, backward_passes_per_step=2)),
        "built_goes": error_of(lambda: hvd.DistributedOptimizer(built)),
        "own_step": error_of(lambda: hvd.DistributedOptimizer(OwnStep(0.1), backward_passes_per_step=2)),
        "own_check": error_of(lambda: hvd.DistributedOptimizer(OwnCheck(sgd()))),
        "broadcast_in_graph": error_of(lambda: tf.function(lambda: hvd.broadcast_variables([]))()),
    }


def xla() -> dict[str, Any]:
    def compiled(optimizer: Any) -> keras.Model:
        model = dense_model()
        model.compile(optimizer=optimizer, loss="mse", jit_compile="auto")
        return model

    listed = tf.config.list_physical_devices
    # On a CPU "auto" never means XLA: let Keras believe in a GPU while it decides, and only then.
    tf.config.list_physical_devices = lambda *_: [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    try:
        auto_plain = compiled(sgd()).jit_compile
        auto_distributed = compiled(hvd.DistributedOptimizer(sgd())).jit_compile
    finally:
        tf.config.list_physical_devices = listed
    asked = {"jit_compile": True, "epochs": 1}
    return {
        "auto_plain": auto_plain,
        "auto_distributed": auto_distributed,
        "plain": error_of(lambda: fit(dense_model(), sgd(), FEATURES, TARGETS, 16, **asked)),
        "distributed": error_of(
            lambda: fit(dense_model(), hvd.DistributedOptimizer(sgd()), FEATURES, TARGETS, 16, **asked)
        ),
        "scaled": error_of(
            lambda: fit(
                dense_model_of("mixed_float16"), hvd.DistributedOptimizer(sgd()), FEATURES, TARGETS, 16, **asked
            )
        ),
    }


# --- saving --------------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("mine")
class Registered(keras.optimizers.SGD):
    """A user's own optimizer, which Keras knows by its registered name."""


def saving() -> dict[str, Any]:
    """Saves with each optimizer; test_keras.py loads the files where neither Horovod nor hvdtrain can be imported."""
    optimizers = {
        "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
        "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 30), momentum=0.9),
        "accumulating": lambda: sgd(gradient_accumulation_steps=2),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(sgd()),
        "registered": lambda: Registered(0.05, momentum=0.9),
    }
    result = {}
    for name, make in optimizers.items():
        model = dense_model()
        fit(model, hvd.DistributedOptimizer(make()), half(FEATURES), half(TARGETS), BATCH)
        if hvd.rank() == 0:
            model.save(FOLDER / f"{name}.keras")
            np.savez(FOLDER / f"{name}.npz", *state_of(model))
        result[name] = type(make()).__name__
    return result


def equal_after_loading() -> dict[str, float]:
    """Saved halfway, loaded on both ranks and trained on: as one process that trains without a break."""
    path = FOLDER / "halfway.keras"
    model, alone = dense_model(), dense_model()
    start = model.get_weights()
    fit(model, hvd.DistributedOptimizer(sgd()), half(FEATURES), half(TARGETS), BATCH, epochs=1)
    if hvd.rank() == 0:
        model.save(path)
    hvd.barrier()
    loaded = hvd.load_model(path, compression=hvd.Compression.none)
    loaded.fit(half(FEATURES), half(TARGETS), batch_size=BATCH, shuffle=False, verbose=0)
    fit(alone, sgd(), FEATURES, TARGETS, 2 * BATCH)
    return {
        "from_one_process": apart(state_of(loaded), state_of(alone)),
        "across_ranks": across_ranks(state_of(loaded)),
        "moved": apart(loaded.get_weights(), start),
    }


CASES = {
    name: case
    for name, case in list(globals().items())
    if callable(case)
    and getattr(case, "__module__", "") == "__main__"
    and name.startswith(("equal_", "scaled_", "broadcast_of", "callback_"))
} | {case.__name__: case for case in (compression, collectives, constant_gradients, process_set, refusals, xla, saving)}


if __name__ == "__main__":
    SETS = [hvd.ProcessSet([rank]) for rank in range(2)]
    hvd.init(process_sets=SETS)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    results: dict[str, Any] = {}
    for case_name in sys.argv[2:] or CASES:
        print("case", case_name, flush=True)
        results[case_name] = CASES[case_name]()
        (FOLDER / f"rank-{hvd.rank()}.json").write_text(json.dumps(results))
    hvd.barrier()
