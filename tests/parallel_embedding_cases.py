"""What test_parallel_embedding.py checks on four ranks: `python parallel_embedding_cases.py FRAMEWORK FOLDER`.

Each rank writes what its cases return to FOLDER/rank-N.json. Twins are a table of all rows on one process, in float64.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.groups import Group, ProcessSets

# 31 rows: over four ranks 8, 8, 8 and 7, and a table of one row. Most parts have rows of several tables.
TABLES = (3, 17, 1, 10)
WIDTH = 5
RANKS = 4
STARTS = np.cumsum([0, *TABLES[:-1]])
GRIDS = {"embedding 4": Grid(embedding=4), "embedding 2 x data 2": Grid(embedding=2, data=2)}
# Samples of each rank: different numbers of them, and ranks without any.
SAMPLES = {"all": (6, 2, 5, 3), "none on 1": (6, 0, 5, 3), "none but on 3": (0, 0, 0, 4), "none at all": (0, 0, 0, 0)}


def ids_of(rank: int, samples: int, items: int = 0) -> np.ndarray:
    """A rank's ids ``[samples, fields]``, or ``[samples, fields, items]`` with padding; many are the same."""
    rng = np.random.default_rng(rank)
    if not items:
        return np.stack([rng.integers(0, rows, samples) for rows in TABLES], 1)
    drawn = np.stack([rng.integers(-1, rows, (samples, items)) for rows in TABLES], 1)
    drawn[:1, 0] = -1  # a bag without items
    return drawn


def coefficients_of(rank: int, samples: int) -> np.ndarray:
    """A rank's loss is the sum of its vectors times these, plus their squares' sum."""
    return np.random.default_rng(100 + rank).normal(size=(samples, len(TABLES), WIDTH))


def expected(
    table: np.ndarray, samples: tuple[int, ...], ranks: tuple[int, ...], mode: str | None
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """The vectors of each rank, and the sum of the gradients of their own losses, by a table of all rows."""
    vectors, gradient = {}, np.zeros_like(table)
    for rank in ranks:
        ids = ids_of(rank, samples[rank], 4 if mode else 0)
        bags = ids if mode else ids[..., None]
        weights = (bags >= 0).astype(float)
        if mode == "mean":
            weights /= np.maximum(weights.sum(-1, keepdims=True), 1)
        rows = np.maximum(bags, 0) + STARTS[:, None]
        vectors[rank] = (table[rows] * weights[..., None]).sum(-2)
        upstream = coefficients_of(rank, samples[rank]) + 2 * vectors[rank]
        np.add.at(gradient, rows, upstream[..., None, :] * weights[..., None])
    return vectors, gradient


def apart(left: Any, right: Any) -> float:
    """The greatest difference, infinite if the shapes differ."""
    left, right = np.asarray(left), np.asarray(right)
    if left.shape != right.shape:
        return float("inf")
    return float(np.abs(left - right).max(initial=0))


def error_of(call: Callable[[], Any], kind: type[Exception] = UsageError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def each_case(rank: int, sets: ProcessSets) -> Iterator[tuple[str, Group, tuple[int, ...], str | None]]:
    """A name, the embedding group of this rank, all ranks' numbers of samples and the mode."""
    for grid_name, grid in GRIDS.items():
        group = (sets if grid.data > 1 else ProcessSets(grid)).groups(rank).embedding
        for samples_name, samples in SAMPLES.items():
            yield f"{grid_name}, samples: {samples_name}", group, samples, None
        for mode in ("sum", "mean"):
            yield f"{grid_name}, {mode}", group, SAMPLES["none on 1"], mode


def torch_cases(sets: ProcessSets) -> dict[str, Any]:
    """PyTorch."""
    import horovod.torch as hvd
    import torch

    from hvdtrain.parallel.torch.cuts import Cut, cut_of, part_of
    from hvdtrain.parallel.torch.embedding import ParallelEmbedding

    hvd.init(process_sets=sets.sets)
    torch.set_default_dtype(torch.float64)
    rank = hvd.rank()
    results: dict[str, dict[str, Any]] = {}
    all_ranks = ProcessSets(GRIDS["embedding 4"]).groups(rank).embedding

    def layer_of(group: Group, **options: Any) -> tuple[ParallelEmbedding, torch.Tensor]:
        torch.manual_seed(1)
        whole = torch.nn.Embedding(sum(TABLES), WIDTH).weight.detach()
        torch.manual_seed(1)
        return ParallelEmbedding(TABLES, WIDTH, group, **options), whole

    for name, group, samples, mode in each_case(rank, sets):
        for sparse in (False, True):
            layer, table = layer_of(group, mode=mode, sparse=sparse)
            cut = cut_of(layer.weight)
            assert cut is not None
            vectors, gradient = expected(table.numpy(), samples, group.ranks, mode)
            out = layer(torch.from_numpy(ids_of(rank, samples[rank], 4 if mode else 0)))
            (out * torch.from_numpy(coefficients_of(rank, samples[rank])) + out**2).sum().backward()
            found = layer.weight.grad
            wanted = part_of(torch.from_numpy(gradient), cut, group.size, group.rank)
            results[name + (", sparse" if sparse else "")] = {
                "initial": apart(layer.weight.detach(), part_of(table, cut, group.size, group.rank)),
                "forward": apart(out.detach(), vectors[rank]),
                "backward": apart(found.to_dense(), wanted),
                "is_sparse": found.is_sparse,
                "marked": cut == Cut("embedding", 0),
            }

    layer, table = layer_of(all_ranks)
    ids = torch.from_numpy(ids_of(rank, 3))
    half = layer.bfloat16()(ids)
    half.sum().backward()
    with torch.no_grad():
        whole = table.bfloat16()[ids + torch.from_numpy(STARTS)]
    results["bfloat16"] = {
        "forward": apart(half.detach().double(), whole.double()),
        "dtype": f"{half.dtype} {layer.weight.grad.dtype}",
    }
    # More rows than are drawn at once, and no multiple of 16 numbers.
    tables, drawn = (200_000, 11), []
    for make in (lambda: ParallelEmbedding(tables, 3, all_ranks), lambda: torch.nn.Embedding(sum(tables), 3)):
        torch.manual_seed(2)
        drawn.append((make().weight.detach(), torch.rand(3)))
    (mine, after), (every, after_every) = drawn
    results["long"] = {
        "rows": apart(mine, part_of(every, Cut("embedding", 0), RANKS, rank)),
        "next": apart(after, after_every),
    }
    bad = ids_of(rank, 3)
    bad[2, 1] = 17
    results["errors"] = {
        "range": error_of(lambda: layer(torch.from_numpy(bad))),
        "negative": error_of(lambda: layer(torch.from_numpy(-1 - ids_of(rank, 3)))),
        "fields": error_of(lambda: layer(torch.from_numpy(bad[:, :3]))),
        "type": error_of(lambda: layer(torch.from_numpy(bad).double())),
    }
    return results


def keras_cases(sets: ProcessSets) -> dict[str, Any]:
    """Keras 3."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvdtrain.parallel.cut import Cut, cut_of
    from hvdtrain.parallel.keras import embedding
    from hvdtrain.parallel.keras.embedding import ParallelEmbedding

    hvd.init(process_sets=sets.sets)
    keras.config.set_floatx("float64")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rank = hvd.rank()
    results: dict[str, dict[str, Any]] = {}
    all_ranks = ProcessSets(GRIDS["embedding 4"]).groups(rank).embedding

    def layer_of(group: Group | None, **options: Any) -> Any:
        keras.utils.set_random_seed(3)
        return ParallelEmbedding(TABLES, WIDTH, group, **{"dtype": "float64", **options})

    def part(whole: Any, group: Group) -> np.ndarray:
        return np.array_split(np.asarray(whole), group.size)[group.rank]

    def loss_and_gradient(layer: Any, ids: Any, coefficients: Any) -> Any:
        with tf.GradientTape() as tape:
            out = layer(ids)
            loss = tf.reduce_sum(out * coefficients + out**2)
        return out, tf.convert_to_tensor(tape.gradient(loss, layer.trainable_variables[0]))

    def in_all_ways(layer: Any, data: list[Any], some_without: bool) -> dict[str, Any]:
        signature = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in data]
        compiled = tf.function(functools.partial(loss_and_gradient, layer), input_signature=signature)
        eager = loss_and_gradient(layer, *map(tf.constant, data))
        results = {"": eager, ", in a graph": compiled(*data), ", again": compiled(*data)}
        if some_without:
            # The samples that a rank hasn't are constants there alone; what TensorFlow keeps of them shows at once or
            # in the second run, in which that rank would be missing.
            constants = tf.function(lambda: loss_and_gradient(layer, *map(tf.constant, data)))
            for _ in range(2):
                results[", constants"] = compiled(*data) if len(data[0]) else constants()
        return results

    keras.utils.set_random_seed(3)
    plain = keras.layers.Embedding(sum(TABLES), WIDTH, dtype="float64")
    plain.build()
    table = plain.embeddings.numpy()
    for name, group, samples, mode in each_case(rank, sets):
        vectors, gradient = expected(table, samples, group.ranks, mode)
        layer = layer_of(group, mode=mode)
        data = [ids_of(rank, samples[rank], 4 if mode else 0), coefficients_of(rank, samples[rank])]
        layer.build(data[0].shape)
        for how, (out, found) in in_all_ways(layer, data, samples == SAMPLES["none on 1"]).items():
            results[name + how] = {
                "initial": apart(layer.embeddings.numpy(), part(table, group)),
                "forward": apart(out, vectors[rank]),
                "backward": apart(found, part(gradient, group)),
                "marked": cut_of(layer.embeddings) == Cut("embedding", 0),
            }

    results["two layers in a graph"] = {"apart": apart(*_two_layers(layer_of, all_ranks, rank))}
    results["fit"] = _fit(layer_of, all_ranks, rank)

    embedding.ROWS_PER_SEED = 8
    whole, mine = layer_of(None), layer_of(all_ranks)
    for layer in (whole, mine):
        layer.build((None, len(TABLES)))
    blocks = whole.embeddings.numpy()
    results["blocks"] = {
        "apart": apart(mine.embeddings.numpy(), part(blocks, all_ranks)),
        "differ": len(np.unique(blocks)) == blocks.size,
    }

    mixed = layer_of(all_ranks, dtype="mixed_bfloat16")
    ids = ids_of(rank, 3)
    out, gradient = loss_and_gradient(mixed, tf.constant(ids), tf.zeros((), tf.bfloat16))
    exact = keras.ops.convert_to_numpy(hvd.allgather(mixed.embeddings.value, name="whole"))
    exact = tf.cast(exact[ids + STARTS], tf.bfloat16)
    results["bfloat16"] = {
        "forward": apart(tf.cast(out, tf.float64), tf.cast(exact, tf.float64)),
        "dtype": f"{out.dtype.name} {gradient.dtype.name}",
    }

    bad = ids_of(rank, 3)
    bad[2, 1] = 17
    layer = layer_of(all_ranks)
    results["errors"] = {
        "range": error_of(lambda: layer(tf.constant(bad))),
        "negative": error_of(lambda: layer(tf.constant(-1 - ids_of(rank, 3)))),
        "fields": error_of(lambda: layer_of(all_ranks)(tf.constant(bad[:, :3]))),
        "graph": error_of(lambda: tf.function(layer)(tf.constant(bad)), tf.errors.InvalidArgumentError),
    }
    return results


def _two_layers(layer_of: Any, group: Group, rank: int) -> tuple[Any, Any]:
    """One layer twice and another once, all at once as TensorFlow likes it; the same by a table of all rows."""
    import tensorflow as tf

    def run(first: Any, second: Any) -> Any:
        return tf.stack([first(ids_of(rank, 3)), second(ids_of(rank, 3)), first(ids_of(rank + 1, 3))])

    return tf.function(run)(layer_of(group), layer_of(group)), run(*[layer_of(None)] * 2)


def _fit(layer_of: Any, group: Group, rank: int) -> dict[str, Any]:
    """Keras's own loop, and what a table of all rows is after the same steps."""
    import keras
    import tensorflow as tf

    def model_of(group: Group | None) -> Any:
        inputs = keras.Input((len(TABLES),), dtype="int64")
        return keras.Model(inputs, layer_of(group)(inputs))

    data = {number: (ids_of(number, 12), coefficients_of(number, 12)) for number in group.ranks}
    model, whole = model_of(group), model_of(None)
    initial = whole.weights[0].numpy()
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
    history = model.fit(
        *data[rank],
        batch_size=4,
        epochs=2,
        shuffle=False,
        validation_data=(ids_of(rank, 4), data[rank][1][:4]),
        verbose=0,
    )
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    for start in [0, 4, 8] * 2:
        with tf.GradientTape() as tape:
            losses = [
                tf.reduce_mean((whole(ids[start : start + 4]) - targets[start : start + 4]) ** 2)
                for ids, targets in data.values()
            ]
            loss = tf.add_n(losses)
        optimizer.apply(tape.gradient(loss, whole.trainable_variables), whole.trainable_variables)
    trained = whole.weights[0].numpy()
    again = keras.models.model_from_json(model.to_json())
    return {
        "apart": apart(model.weights[0].numpy(), np.array_split(trained, group.size)[group.rank]),
        "moved": apart(trained, initial),
        "validated": "val_loss" in history.history,
        "loaded": [list(weight.shape) for weight in again.weights],
    }


if __name__ == "__main__":
    framework, folder = sys.argv[1:]
    cases = {"torch": torch_cases, "keras": keras_cases}[framework]
    found = cases(ProcessSets(GRIDS["embedding 2 x data 2"]))
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
