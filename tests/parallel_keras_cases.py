"""What test_parallel_keras.py checks on four ranks: `python parallel_keras_cases.py FOLDER`.

Each rank writes what its cases return to FOLDER/rank-N.json. Twins are written with NumPy and plain TensorFlow, from
whole variables that the plain initializers make.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras.compression import Auto, BFloat16, Compression, Wire, compression_of
from hvdtrain.keras.exchange import GradientExchange
from hvdtrain.keras.optimizer import DistributedOptimizer
from hvdtrain.parallel import groups as parallel_groups
from hvdtrain.parallel.cut import Cut, bounds, cut_of, mark
from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.groups import Group, Groups, ProcessSets
from hvdtrain.parallel.keras.collectives import all_reduce, enter, gather, leave, scatter
from hvdtrain.parallel.keras.shared import ParallelDropout
from hvdtrain.parallel.keras.tensor import (
    ColumnParallelDense,
    ParallelAttention,
    ParallelMLP,
    RowParallelDense,
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)

tf.get_logger().setLevel("ERROR")  # It complains of each new graph.
RANKS = 4
SEED = 5
WORDS, WIDTH, HEADS, LENGTH, BATCH = 24, 8, 4, 6, 8

GROUPS = parallel_groups.init(hvd, Grid(tensor=2, data=2))
# The group of all ranks has Horovod's own process set: it needs no other start.
ALL = ProcessSets(Grid(tensor=RANKS)).groups(GROUPS.rank)
# The same ranks in the same process sets, under the names of another grid.
EMBEDDING = replace(
    ProcessSets(Grid(embedding=2, data=2)).groups(GROUPS.rank),
    embedding=replace(GROUPS.tensor, name="embedding"),
    data=GROUPS.data,
)
GRIDS = {"tensor 4": ALL, "tensor 2 x data 2": GROUPS}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def apart(left: Any, right: Any) -> float:
    return float(np.abs(np.asarray(left, "float64") - np.asarray(right, "float64")).max())


def across_ranks(arrays: list[np.ndarray]) -> bool:
    """Whether all ranks have the same bits."""
    return len(set(hvd.allgather_object(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)))) == 1


def whole(part: Any, cut: Cut | None, group: Group) -> np.ndarray:
    """All ranks' parts of a variable or of its gradient, put together by hand."""
    if cut is None or group.size == 1:
        return np.asarray(part)
    parts = hvd.allgather_object(np.asarray(part), process_set=group.process_set)
    blocks = [np.split(one, cut.blocks, cut.dim) for one in parts]
    return np.concatenate([pieces[block] for block in range(cut.blocks) for pieces in blocks], cut.dim)


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except UsageError as error:
        return str(error)
    return "no error"


# --- one layer against its twin -----------------------------------------------------------------------------------


def plain_dense(inputs: Any, kernel: Any, bias: Any) -> Any:
    return tf.nn.relu(tf.matmul(inputs, kernel) + bias)


def plain_embedding(words: Any, table: Any) -> Any:
    return tf.gather(table, tf.cast(words, tf.int32))


def plain_mlp(inputs: Any, kernel: Any, bias: Any, kernel_2: Any, bias_2: Any) -> Any:
    return tf.matmul(tf.nn.gelu(tf.matmul(inputs, kernel) + bias), kernel_2) + bias_2


def plain_attention(inputs: Any, kernel: Any, bias: Any, kernel_2: Any, bias_2: Any, causal: bool = False) -> Any:
    """Head by head, position by position."""
    size = WIDTH // HEADS
    query, key, value = tf.split(tf.matmul(inputs, kernel) + bias, 3, -1)
    heads = []
    for head in range(HEADS):
        q, k, v = (part[..., head * size : (head + 1) * size] for part in (query, key, value))
        rows = []
        for place in range(LENGTH):
            end = place + 1 if causal else LENGTH
            scores = tf.reduce_sum(q[:, place, None] * k[:, :end], -1) / size**0.5
            rows.append(tf.reduce_sum(tf.nn.softmax(scores)[..., None] * v[:, :end], 1))
        heads.append(tf.stack(rows, 1))
    return tf.matmul(tf.concat(heads, -1), kernel_2) + bias_2


def random_bias() -> Any:
    """Not Keras's zeros, of which all parts are alike."""
    return keras.initializers.RandomNormal(seed=11)


def layers(group: Group) -> dict[str, tuple[Callable[[], Any], Callable[..., Any], list[tuple[int, ...]], np.ndarray]]:
    """A layer, what it computes in plain TensorFlow from whole variables, their shapes, and its input."""
    options: dict[str, Any] = {"dtype": "float64", "bias_initializer": random_bias()}
    vectors, sequences = numbers(3, WIDTH), numbers(3, LENGTH, WIDTH)
    words = np.random.default_rng(0).integers(0, WORDS - 1, (3, LENGTH))
    dense = [(WIDTH, 24), (24,)]
    mlp = [(WIDTH, 16), (16,), (16, WIDTH), (WIDTH,)]
    attention = [(WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]

    def column(blocks: int) -> Callable[[], Any]:
        return lambda: ColumnParallelDense(24, group, blocks=blocks, activation="relu", gather_output=True, **options)

    return {
        "column": (column(1), plain_dense, dense, vectors),
        "column in 3 blocks": (column(3), plain_dense, dense, sequences),
        "row": (
            lambda: RowParallelDense(24, group, activation="relu", scatter_input=True, **options),
            plain_dense,
            dense,
            vectors,
        ),
        # 23 words: the last rank of a group has one less.
        "embedding": (
            lambda: VocabularyParallelEmbedding(WORDS - 1, WIDTH, group, dtype="float64"),
            plain_embedding,
            [(WORDS - 1, WIDTH)],
            words,
        ),
        "mlp": (lambda: ParallelMLP(WIDTH, 16, group, **options), plain_mlp, mlp, sequences),
        "attention": (lambda: ParallelAttention(WIDTH, HEADS, group, **options), plain_attention, attention, sequences),
        "causal attention": (
            lambda: ParallelAttention(WIDTH, HEADS, group, causal=True, **options),
            lambda *arguments: plain_attention(*arguments, causal=True),
            attention,
            sequences,
        ),
    }


def forward_and_backward(call: Callable[..., Any], inputs: Any, variables: list[Any], in_graph: bool) -> list[Any]:
    """The output, and the gradients of a loss with other coefficients everywhere."""

    def run(inputs: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([inputs, *variables])
            outputs = call(inputs)
            loss = tf.reduce_sum(outputs * tf.constant(numbers(*outputs.shape, seed=3)) + outputs**2)
        wanted = variables if inputs.dtype.is_integer else [inputs, *variables]
        return [outputs, *map(tf.convert_to_tensor, tape.gradient(loss, wanted))]

    return list((tf.function(run) if in_graph else run)(tf.convert_to_tensor(inputs)))


def layer_case(name: str, group: Group, in_graph: bool) -> dict[str, float]:
    make, plain, shapes, inputs = layers(group)[name]
    keras.utils.set_random_seed(SEED)
    layer = make()
    layer.build(inputs.shape)
    # Keras's own initializers draw a seed each when they are made: the kernels', for the bias's is given.
    keras.utils.set_random_seed(SEED)
    make_kernel = keras.initializers.RandomUniform if "embedding" in name else keras.initializers.GlorotUniform
    twin = [
        tf.Variable(make_kernel()(shape, dtype="float64") if len(shape) == 2 else random_bias()(shape, dtype="float64"))
        for shape in shapes
    ]
    cuts = [cut_of(variable) for variable in layer.variables]
    kept = [variable.value for variable in layer.variables]
    ours = forward_and_backward(layer, inputs, kept, in_graph)
    expected = forward_and_backward(lambda given: plain(given, *twin), inputs, twin, in_graph=False)
    start = len(ours) - len(cuts)
    put_together = ours[:start] + [whole(one, cut, group) for one, cut in zip(ours[start:], cuts, strict=True)]
    initial = [whole(one, cut, group) for one, cut in zip(kept, cuts, strict=True)]
    return {
        "initial": max(map(apart, initial, twin)),
        "output": apart(ours[0], expected[0]),
        "gradients": max(map(apart, put_together[1:], expected[1:])),
        "greatest": min(float(np.abs(one).max()) for one in expected[1:]),
        "cut": sum(cut is not None for cut in cuts),
    }


def cross_entropy_case(group: Group, in_graph: bool) -> dict[str, float]:
    logits, targets = 30 * numbers(3, LENGTH, WORDS), np.random.default_rng(1).integers(0, WORDS, (3, LENGTH))
    first, end = bounds(WORDS, group.size, group.rank)

    def plain(given: Any) -> Any:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, given)

    def ours(given: Any) -> Any:
        return vocabulary_parallel_cross_entropy(given, targets, group)

    found = forward_and_backward(ours, logits[..., first:end], [], in_graph)
    expected = forward_and_backward(plain, logits, [], in_graph=False)
    return {
        "initial": 0,
        "output": apart(found[0], expected[0]),
        "gradients": apart(whole(found[1], Cut("tensor", 2), group), expected[1]),
        "greatest": float(np.abs(expected[1]).max()),
    }


def collective_cases(group: Group) -> dict[str, Any]:
    """Each rank's loss is the sum of its results times its coefficients."""
    mine, theirs = ([numbers(2, 4 * group.size, seed=seed + rank) for rank in range(group.size)] for seed in (20, 40))
    part = 4

    def run(step: Callable[..., Any], given: np.ndarray, coefficients: np.ndarray) -> list[np.ndarray]:
        @tf.function
        def graph(given: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                tape.watch(given)
                result = step(given, group, f"case_{step.__name__}")
                loss = tf.reduce_sum(result * coefficients)
            return [result, tape.gradient(loss, given)]

        return [one.numpy() for one in graph(tf.constant(given))]

    rank = group.rank
    own = slice(part * rank, part * (rank + 1))
    expected = {
        enter: (mine[rank], mine[rank], sum(theirs)),
        leave: (mine[rank], sum(mine), theirs[rank]),
        gather: (mine[rank][:, :part], np.concatenate([one[:, :part] for one in mine], 1), theirs[rank][:, own]),
        scatter: (mine[0], mine[0][:, own], np.concatenate([one[:, :part] for one in theirs], 1)),
    }
    worst = 0.0
    for step, (given, result, gradient) in expected.items():
        coefficients = theirs[rank][:, :part] if step is scatter else theirs[rank]
        worst = max(worst, *map(apart, run(step, given, coefficients), (result, gradient)))
    return {"worst": worst}


def same_layer_twice() -> dict[str, float]:
    """Two calls that wait for nothing of each other, in one graph: they need two names."""
    layer = RowParallelDense(3, GROUPS.tensor, scatter_input=True, dtype="float64")
    layer.build((None, WIDTH))
    kernel = whole(layer.kernel.value, Cut("tensor", 0), GROUPS.tensor)
    one, two = numbers(2, WIDTH, seed=1), numbers(2, WIDTH, seed=2)
    graph = tf.function(lambda one, two: (layer(one), layer(two)))
    worst = 0.0
    for _ in range(20):
        for given, found in zip((one, two), graph(tf.constant(one), tf.constant(two)), strict=True):
            worst = max(worst, apart(found, given @ kernel + layer.bias.numpy()))
    return {"worst": worst}


def constants_in_a_graph() -> dict[str, float]:
    """Rank 0's input is known when the graph is made; it must take part each time all the same."""
    ones = tf.ones((3,), tf.float64)

    @tf.function
    def graph(given: Any) -> Any:
        return all_reduce(tf.ones((3,), tf.float64) if GROUPS.rank == 0 else given, ALL.tensor, "constant")

    return {"worst": max(apart(graph(ones), np.full(3, RANKS)) for _ in range(5))}


def bfloat16_layer() -> dict[str, Any]:
    keras.utils.set_random_seed(SEED)
    layer = ParallelMLP(WIDTH, 16, GROUPS.tensor, dtype="mixed_bfloat16")
    inputs = tf.constant(numbers(3, WIDTH), tf.float32)
    with tf.GradientTape() as tape:
        outputs = layer(inputs)
        loss = tf.reduce_sum(tf.cast(outputs, tf.float32))
    gradients = tape.gradient(loss, layer.trainable_variables)
    return {"dtype": outputs.dtype.name, "gradients": sorted({gradient.dtype.name for gradient in gradients})}


def dropout_case() -> dict[str, Any]:
    keras.utils.set_random_seed(SEED)
    together, cut = ParallelDropout(0.5, GROUPS.tensor), ParallelDropout(0.5, GROUPS.tensor, cut=True)
    masks = [layer(tf.ones((64,)), training=True).numpy().tolist() for layer in (together, cut)]
    return dict(zip(("together", "cut"), masks, strict=True))


def refusals() -> dict[str, str]:
    two = GROUPS.tensor
    on_grid, built = {"parallel": GROUPS}, keras.optimizers.SGD()
    built.build([keras.Variable(np.zeros(2))])
    return {
        "units": error_of(lambda: ColumnParallelDense(9, two)),
        "blocks": error_of(lambda: ColumnParallelDense(8, two, blocks=3)),
        "features": error_of(lambda: RowParallelDense(4, two, scatter_input=True).build((None, 7))),
        "heads": error_of(lambda: ParallelAttention(9, 3, two)),
        "width": error_of(lambda: ParallelAttention(10, 4, two)),
        "clipnorm": error_of(lambda: DistributedOptimizer(keras.optimizers.SGD(clipnorm=1.0), **on_grid)),
        "lamb": error_of(lambda: DistributedOptimizer(keras.optimizers.Lamb(), **on_grid)),
        "built": error_of(lambda: DistributedOptimizer(built, **on_grid)),
        "both": error_of(lambda: DistributedOptimizer(keras.optimizers.SGD(), process_set=two.process_set, **on_grid)),
        "ratio": error_of(lambda: Compression.topk(ratio=0)),
        "allreduce": error_of(lambda: hvd.allreduce(tf.ones(3), compression=Compression.bf16)),
    }


# --- model.fit against one process --------------------------------------------------------------------------------

STEPS = 4
_RNG = np.random.default_rng(9)
TOKENS = _RNG.integers(0, WORDS, (STEPS * BATCH, LENGTH))
TARGETS = _RNG.integers(0, WORDS, (STEPS * BATCH, LENGTH))


def language_model(group: Group) -> keras.Model:
    keras.utils.set_random_seed(SEED)
    words = keras.Input((LENGTH,), dtype="int32")
    hidden = VocabularyParallelEmbedding(WORDS, WIDTH, group)(words)
    attention = ParallelAttention(WIDTH, HEADS, group, causal=True)
    for _ in range(2):  # One layer in two places.
        hidden = hidden + attention(keras.layers.LayerNormalization()(hidden))
    hidden = hidden + ParallelMLP(WIDTH, 16, group)(keras.layers.LayerNormalization()(hidden))
    return keras.Model(words, ColumnParallelDense(WORDS, group, use_bias=False)(hidden))


def samples_of(data: np.ndarray, groups: Groups | None) -> np.ndarray:
    if groups is None:
        return data
    each = BATCH // groups.replicas.size
    shared = data.reshape(STEPS, groups.replicas.size, each, *data.shape[1:])
    return shared[:, groups.replicas.rank].reshape(STEPS * each, *data.shape[1:])


ALONE = Group("tensor", (GROUPS.rank,), 0, None)


def fit(groups: Groups | None, make_optimizer: Callable[[], Any], **options: Any) -> keras.Model:
    group = groups.tensor if groups else ALONE
    model = language_model(group)
    optimizer = make_optimizer()
    if groups:
        DistributedOptimizer(optimizer, parallel=groups)
    model.compile(optimizer, lambda y, logits: vocabulary_parallel_cross_entropy(logits, y, group), **options)
    batch = BATCH // groups.replicas.size if groups else BATCH
    inputs, targets = samples_of(TOKENS, groups), samples_of(TARGETS, groups)
    model.fit(inputs, targets, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return model


# The norms are so low that every step is clipped.
OPTIMIZERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "clipped": (lambda: keras.optimizers.SGD(5.0, momentum=0.5, global_clipnorm=0.05), {}),
    "accumulated": (lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.1, gradient_accumulation_steps=2), {}),
    "scaled": (
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
        {"steps_per_execution": 2},
    ),
    "eagerly": (lambda: keras.optimizers.SGD(0.5), {"run_eagerly": True}),
}


@functools.cache
def trained_alone(optimizer: str) -> tuple[np.ndarray, ...]:
    make, options = OPTIMIZERS[optimizer]
    return tuple(fit(None, make, **options).get_weights())


def fit_case(groups: Groups, optimizer: str) -> dict[str, Any]:
    make, options = OPTIMIZERS[optimizer]
    model = fit(groups, make, **options)
    weights = [whole(v.value, cut_of(v), groups.tensor) for v in model.weights]
    return {
        "moved": max(map(apart, trained_alone(optimizer), language_model(ALONE).get_weights())),
        "from_one_process": max(map(apart, weights, trained_alone(optimizer))),
        "same_everywhere": across_ranks(weights),
    }


def tables_case() -> dict[str, float]:
    """Variables of each kind on a grid of embedding 2 x data 2, and what the optimizer makes of their gradients."""
    table = mark(keras.Variable(np.zeros((3, 2), "float32")), Cut("embedding", 0))
    rows = mark(keras.Variable(np.zeros((3, 2), "float32")), Cut("embedding", 0))
    dense = keras.Variable(np.zeros((4,), "float32"))
    mine = [numbers(3, 2, seed=rank).astype("float32") for rank in range(RANKS)]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), parallel=EMBEDDING)
    sparse = tf.IndexedSlices(tf.constant(mine[GROUPS.rank][:2]), tf.constant([2, 2]), tf.constant([3, 2]))
    whole_gradient = tf.fill((4,), float(GROUPS.rank))
    optimizer.apply([tf.constant(mine[GROUPS.rank]), sparse, whole_gradient], [table, rows, dense])
    pair = [mine[rank] for rank in EMBEDDING.data.ranks]
    row = sum(one[:2].sum(0) for one in pair) / RANKS
    return {
        "table": apart(-table.numpy(), sum(pair) / RANKS),
        "rows": apart(-rows.numpy(), [np.zeros(2), np.zeros(2), row]),
        "dense": apart(-dense.numpy(), np.full(4, 1.5)),
    }


# --- compression --------------------------------------------------------------------------------------------------


def gradients_of(rank: int) -> list[np.ndarray]:
    return [numbers(7, 3, seed=rank).astype("float32"), 1e30 * numbers(5, seed=10 + rank).astype("float32")]


def compression_case(kind: str, in_graph: bool) -> dict[str, Any]:
    """Averages of float32 gradients of all magnitudes (the second is beyond half precision's range)."""
    exchange = GradientExchange(
        f"case_{kind}_{in_graph}", compression_of(getattr(Compression, kind)), hvd.Average, 1, hvd.global_process_set
    )
    reduce = tf.function(exchange.reduce) if in_graph else exchange.reduce
    results = [one.numpy() for one in reduce([tf.constant(one) for one in gradients_of(GROUPS.rank)])]
    expected = [sum(given) / RANKS for given in zip(*map(gradients_of, range(RANKS)), strict=True)]
    largest = [
        np.max([np.abs(one) for one in given], 0) for given in zip(*map(gradients_of, range(RANKS)), strict=True)
    ]
    return {
        "off": max(float((np.abs(a - b) / c).max()) for a, b, c in zip(results, expected, largest, strict=True)),
        "same_everywhere": across_ranks(results),
    }


def topk_feeds_back() -> dict[str, Any]:
    """Two of eight values go each time: what ranks sent and what they keep is, together, all they were given."""
    compression = Compression.topk(ratio=0.25)
    wire = Wire("case_feedback", hvd.global_process_set, hvd.Sum)
    given = numbers(8, seed=GROUPS.rank).astype("float32")
    step = tf.function(lambda flat: compression.reduce(flat, wire))
    sent, total = np.zeros(8), RANKS * 6 * np.mean(hvd.allgather_object(given), 0)
    first = step(tf.constant(given)).numpy()
    expected = np.zeros(8)
    for one in hvd.allgather_object(given):
        places = np.argsort(-np.abs(one))[:2]
        expected[places] += one[places]
    sent += first
    for _ in range(5):
        sent += step(tf.constant(given)).numpy()
    (kept,) = compression._kept.values()
    return {
        "first": apart(first, expected),
        "lost": apart(sent + np.sum(hvd.allgather_object(kept.numpy()), 0), total),
        "kept": float(np.abs(kept.numpy()).max()),
    }


def sparse_rows(kind: str) -> dict[str, Any]:
    exchange = GradientExchange(
        f"case_rows_{kind}", compression_of(getattr(Compression, kind)), hvd.Sum, 1, hvd.global_process_set
    )
    values = numbers(1, 4, seed=GROUPS.rank).astype("float32")
    (found,) = exchange.reduce([tf.IndexedSlices(tf.constant(values), tf.constant([GROUPS.rank]), tf.constant([4, 4]))])
    expected = np.concatenate([numbers(1, 4, seed=rank) for rank in range(RANKS)])
    return {"off": apart(tf.convert_to_tensor(found), expected), "values": found.values.dtype.name}


def compressed_fit(kind: str) -> dict[str, Any]:
    """A model that learns a linear map, each rank from samples of its own."""
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16), keras.layers.Dense(3)])
    given = getattr(Compression, kind)
    compression = given(ratio=0.2) if kind == "topk" else given
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression, groups=2)
    inputs = numbers(64, 6, seed=100 + GROUPS.rank).astype("float32")
    model.compile(optimizer, "mse")
    history = model.fit(inputs, inputs @ numbers(6, 3, seed=99).astype("float32"), epochs=20, batch_size=16, verbose=0)
    losses = history.history["loss"]
    return {"share": losses[-1] / losses[0], "same_everywhere": across_ranks(model.get_weights())}


def auto_case() -> dict[str, Any]:
    """What all ranks choose when one rank takes long over either way, and that they choose once."""
    wire = Wire("case_auto", hvd.global_process_set, hvd.Sum)

    def choice(slow: Any, name: str) -> Any:
        quick = getattr(slow, name)

        def late(*arguments: Any, **options: Any) -> Any:
            time.sleep(0.1 if GROUPS.rank == 2 else 0)
            return quick(*arguments, **options)

        setattr(slow, name, late)
        auto = Auto()
        chosen = auto.choose(10_000, wire)
        setattr(slow, name, quick)
        return chosen if auto.choose(1, wire) is chosen else "another"

    return {
        "slow none": isinstance(choice(hvd, "allreduce"), BFloat16),
        "slow bf16": choice(BFloat16, "reduce") is Compression.none,
    }


def cases() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for grid, groups in GRIDS.items():
        group = groups.tensor
        for in_graph in (False, True):
            if groups is ALL and not in_graph:
                continue
            mode = "in a graph" if in_graph else "eagerly"
            for name in layers(group):
                found[f"layer: {name}, {grid}, {mode}"] = lambda n=name, g=group, i=in_graph: layer_case(n, g, i)
            found[f"layer: cross-entropy, {grid}, {mode}"] = lambda g=group, i=in_graph: cross_entropy_case(g, i)
        found[f"collectives: {grid}"] = lambda g=group: collective_cases(g)
        # All four ranks' layers are trained by test_parallel_keras_layouts.
        for name in () if groups is ALL else OPTIMIZERS:
            found[f"fit: {name}, {grid}"] = lambda n=name, g=groups: fit_case(g, n)
    for kind in ("none", "bf16", "topk", "auto"):
        for in_graph in (False, True):
            found[f"compression: {kind}, {in_graph}"] = lambda k=kind, i=in_graph: compression_case(k, i)
        found[f"rows: {kind}"] = lambda k=kind: sparse_rows(k)
    for kind in ("none", "fp16", "bf16", "topk", "auto"):
        found[f"learning: {kind}"] = lambda k=kind: compressed_fit(k)
    for case in (
        same_layer_twice, constants_in_a_graph, bfloat16_layer, dropout_case, refusals, tables_case, topk_feeds_back,
        auto_case,
    ):  # fmt: skip
        found[case.__name__] = case
    return found


if __name__ == "__main__":
    wanted = sys.argv[2:]
    results = {}
    for name, case in cases().items():
        if not wanted or any(part in name for part in wanted):
            started = time.perf_counter()
            results[name] = case()
            if GROUPS.rank == 0:  # For whoever waits for a test that hangs.
                print(f"{time.perf_counter() - started:6.2f} s  {name}", flush=True)
    Path(sys.argv[1], f"rank-{GROUPS.rank}.json").write_text(json.dumps(results))
    hvd.allgather_object(None)  # None leaves while another still communicates.
