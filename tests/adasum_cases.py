"""What test_adasum.py looks at, on each rank: `python adasum_cases.py FOLDER CASE`.

Each rank writes what its case returns, arrays and words, to FOLDER/rank-N.npz. Twins are made by the test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1, 2, 3, 7, 1000, 70_001)
# Of the twin's gradients, in which a rank has some of the parameters' alone.
SHAPES = {"first": (4, 3), "second": (5,), "of_one_rank": (3, 2), "of_nobody": (2,)}


def gradients(rank: int) -> dict[str, np.ndarray]:
    """A rank's gradients, float32 of one dimension, which the test makes again."""
    draw = np.random.default_rng(rank)
    common = np.random.default_rng(100).normal(size=50)
    orthogonal = np.zeros(40)
    orthogonal[10 * rank : 10 * rank + 10] = draw.normal(size=10)
    found = {
        "orthogonal": orthogonal,
        "parallel": (rank + 1) * common,
        "opposite": (-1) ** rank * common,
        "of rank 0": common if rank == 0 else 0 * common,
        "of nobody": 0 * common,
        "tiny": 1e-30 * draw.normal(size=30),
        "huge": 1e30 * draw.normal(size=30),
        **{f"random {size}": draw.normal(size=size) + 0.5 for size in SIZES},
    }
    return {name: value.astype(np.float32) for name, value in found.items()}


def parameters_of(rank: int) -> dict[str, np.ndarray | None]:
    """A rank's gradient of each parameter in `SHAPES`; None: it hasn't used it."""
    draw = np.random.default_rng(10 + rank)
    found: dict[str, Any] = {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return found | ({} if rank == 1 else {"of_one_rank": None}) | {"of_nobody": None}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def torch_gradients() -> dict[str, Any]:
    """All on their way at once, so that Horovod puts them into one buffer; and other types."""
    import torch

    from hvdtrain.parallel.groups import init
    from hvdtrain.parallel.torch.adasum import Adasum

    group = init(hvd).replicas
    buckets = {name: torch.from_numpy(value) for name, value in gradients(group.rank).items()}
    random = buckets["random 1000"]
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        buckets[f"{dtype}"] = random.to(dtype)
    buckets["empty"] = random[:0].clone()
    reducer = Adasum()
    reductions = [reducer.start(bucket, group, name) for name, bucket in buckets.items()]
    for reduction in reductions:
        reduction.proceed()
    for reduction in reductions:
        reduction.finish()
    return {name: bucket.double().numpy() for name, bucket in buckets.items()}


def torch_exchange() -> dict[str, Any]:
    """As the training loop does it, in two steps: gradients of parameters that some ranks haven't used."""
    import torch

    from hvdtrain.parallel.groups import init
    from hvdtrain.parallel.torch.adasum import Adasum
    from hvdtrain.parallel.torch.exchange import GradientExchange

    group = init(hvd).replicas
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})
    exchange = GradientExchange(model.items(), lambda _: (group, 1), Adasum(), bucket_mb=0)
    for _ in range(2):
        exchange.begin()
        given = parameters_of(group.rank).items()
        sum((model[name] * torch.from_numpy(value)).sum() for name, value in given if value is not None).backward()
        exchange.finish()
    return {name: one.grad.numpy() for name, one in model.items() if one.grad is not None}


def torch_refusals() -> dict[str, Any]:
    import torch

    from hvdtrain.parallel.groups import init
    from hvdtrain.parallel.torch.adasum import Adasum

    group = init(hvd).replicas
    return {"start": error_of(lambda: Adasum().start(torch.ones(2), group, "refused"))}


def keras_gradients() -> dict[str, Any]:
    """In a graph, where each is a constant, and eagerly; what isn't float32; sparse ones; and the optimizer's steps."""
    import keras
    import tensorflow as tf

    from hvdtrain.keras.exchange import AdasumExchange

    hvd.init()
    mine = gradients(hvd.rank())
    found = {}
    for mode in ("in a graph", "eagerly"):
        exchange = AdasumExchange(f"case_{mode.replace(' ', '_')}")

        def reduce(exchange: AdasumExchange = exchange) -> list[Any]:
            return exchange.reduce([None, *map(tf.constant, mine.values())])

        none, *results = (tf.function(reduce) if mode == "in a graph" else reduce)()
        assert none is None
        found |= {f"{name}, {mode}": one.numpy() for name, one in zip(mine, results, strict=True)}
    rows = tf.constant(mine["random 1000"].reshape(500, 2)[:2])
    sparse = tf.IndexedSlices(rows, tf.constant([hvd.rank(), 5]), tf.constant([6, 2]))
    others = {
        "sparse": sparse,
        **{dtype: tf.cast(mine["random 1000"], dtype) for dtype in ("float64", "float16", "bfloat16")},
    }
    results = AdasumExchange("case_others").reduce(list(others.values()))
    assert [one.dtype for one in results] == [one.dtype for one in others.values()]
    found |= {name: tf.cast(one, tf.float64).numpy() for name, one in zip(others, results, strict=True)}

    variable = keras.Variable(np.zeros(50, "float32"))
    optimizer = keras_layer.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=keras_layer.Adasum, backward_passes_per_step=2
    )
    for part in (0.5, 1.5):  # of which the optimizer takes the mean
        optimizer.apply([tf.constant(part * mine["parallel"])], [variable])
    return found | {"applied": -variable.numpy()}


def keras_refusals() -> dict[str, Any]:
    import keras

    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair] if int(os.environ["RANKS"]) > 2 else [])

    def refusal(**options: Any) -> str:
        make = keras_layer.DistributedOptimizer
        return error_of(lambda: make(keras.optimizers.SGD(0.1), op=keras_layer.Adasum, **options))

    return {
        "start": refusal(),
        "compression": refusal(compression=keras_layer.Compression.bf16),
        "groups": refusal(groups=2),
        "process_set": refusal(process_set=pair),
    }


if __name__ == "__main__":
    folder, case = sys.argv[1:]
    if case.startswith("torch"):
        import horovod.torch as hvd
    else:
        import horovod.tensorflow as hvd

        import hvdtrain.keras as keras_layer
    results = globals()[case]()
    np.savez(Path(folder, f"rank-{hvd.rank()}.npz"), **results)
    hvd.shutdown()
