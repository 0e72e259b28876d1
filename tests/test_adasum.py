"""Adasum of gradients on two and four real ranks, and as a job's choice. adasum_cases.py is what the ranks do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adasum_cases import SIZES, gradients, parameters_of
from planning import plan_on
from real_processes import CROWDED, python_on_ranks

from hvdtrain import contract
from hvdtrain.errors import StartError, UsageError
from hvdtrain.parallel.adasum import require_size
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.spec.models import HorovodSettings, JobSpec
from hvdtrain.train.sharding import epoch_order, shares

CASES = Path(__file__).parent / "adasum_cases.py"
PATIENCE_S = 300
# Of the combined gradient's largest value: float32, rounded once at each level.
ROUNDING = 1e-6
ROUNDING_OF = {"float64": 1e-12, "float16": 2**-10, "bfloat16": 2**-7}

Results = list[dict[str, Any]]


def adasum(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The paper's formula: ranks in pairs, then pairs of pairs. float64, of the gradients' shape."""
    if len(parts) == 1:
        return np.asarray(parts[0], np.float64)
    combined = []
    for left, right in zip(parts[::2], parts[1::2], strict=True):
        a, b = np.asarray(left, np.float64), np.asarray(right, np.float64)
        dot, of_a, of_b = ((one * other).sum() for one, other in ((a, b), (a, a), (b, b)))
        combined.append((1 - dot / (2 * of_a or 1)) * a + (1 - dot / (2 * of_b or 1)) * b)
    return adasum(combined)


def is_close(found: np.ndarray, due: np.ndarray, rounding: float = ROUNDING) -> bool:
    return bool((np.abs(found - due) <= rounding * np.abs(due).max(initial=0)).all())


def results_of(case: str, ranks: int, folder: Path, controller: str = "mpi") -> Results:
    environment = {**CROWDED, "RANKS": str(ranks)}
    python_on_ranks(controller, ranks, folder, str(CASES), str(folder), case, env=environment, timeout=PATIENCE_S)
    return [dict(np.load(folder / f"rank-{rank}.npz")) for rank in range(ranks)]


def assert_all_have(results: Results, name: str, due: np.ndarray, rounding: float = ROUNDING) -> None:
    for result in results:
        assert is_close(result[name], due, rounding), name
        assert np.array_equal(result[name], results[0][name]), name


def assert_combined(results: Results, ending: str = "") -> None:
    """Orthogonal gradients are added, parallel ones averaged, others combined by the formula."""
    given = [gradients(rank) for rank in range(len(results))]
    of_kind = {name: [one[name] for one in given] for name in given[0]}
    common = of_kind["of rank 0"][0]
    dues = {
        "orthogonal": np.sum(of_kind["orthogonal"], 0),
        "parallel": np.mean(of_kind["parallel"], 0),
        "opposite": 0 * common,
        "of rank 0": common,
        "of nobody": 0 * common,
        **{name: adasum(of_kind[name]) for name in ("tiny", "huge", *(f"random {size}" for size in SIZES))},
    }
    for name, due in dues.items():
        assert_all_have(results, name + ending, due)
    random = of_kind["random 1000"]
    for other in (np.mean(random, 0), np.sum(random, 0)):
        assert not is_close(dues["random 1000"], other, 0.05)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_pytorch_are_combined_by_the_formula(ranks: int, tmp_path: Path) -> None:
    results = results_of("torch_gradients", ranks, tmp_path)
    assert_combined(results)
    due = adasum([gradients(rank)["random 1000"] for rank in range(ranks)])
    # What a rank has is rounded to the type as well.
    for dtype, rounding in {**ROUNDING_OF, "float64": ROUNDING}.items():
        assert_all_have(results, f"torch.{dtype}", due, rounding)
    assert results[0]["empty"].size == 0


@pytest.mark.processes
def test_each_parameter_is_combined_for_itself(tmp_path: Path) -> None:
    results = results_of("torch_exchange", 4, tmp_path)
    given = [parameters_of(rank) for rank in range(4)]
    assert results[0].keys() == {"first", "second", "of_one_rank"}
    for name in ("first", "second"):
        assert_all_have(results, name, adasum([one[name] for one in given]))  # type: ignore[misc]
    assert_all_have(results, "of_one_rank", given[1]["of_one_rank"])  # type: ignore[arg-type]
    together = adasum([np.concatenate([one["first"].ravel(), one["second"]]) for one in given])  # type: ignore[union-attr, list-item]
    assert not is_close(results[0]["second"], together[12:], 0.01)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_keras_are_combined_by_the_formula(ranks: int, tmp_path: Path) -> None:
    results = results_of("keras_gradients", ranks, tmp_path)
    for mode in ("in a graph", "eagerly"):
        assert_combined(results, f", {mode}")
    given = [gradients(rank) for rank in range(ranks)]
    random = [one["random 1000"] for one in given]
    for dtype, rounding in {**ROUNDING_OF, "float64": ROUNDING}.items():
        assert_all_have(results, dtype, adasum(random), rounding)
    dense = np.zeros((ranks, 6, 2))
    for rank, one in enumerate(random):
        dense[rank, [rank, 5]] = one.reshape(500, 2)[:2]
    assert_all_have(results, "sparse", adasum(list(dense)))
    assert_all_have(results, "applied", np.mean([one["parallel"] for one in given], 0))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "controller", "ranks", "message"),
    [
        ("torch_refusals", "gloo", 2, "UsageError: Horovod's Adasum needs MPI, and these ranks run under Gloo"),
        ("keras_refusals", "gloo", 2, "UsageError: Horovod's Adasum needs MPI, and these ranks run under Gloo"),
        ("torch_refusals", "mpi", 3, "NotImplementedError: Running Adasum with non-power of 2 ranks"),
        ("keras_refusals", "mpi", 3, "UsageError: Adasum combines gradients in pairs, and 3 ranks aren't"),
    ],
)
def test_ranks_that_it_cannot_combine(case: str, controller: str, ranks: int, message: str, tmp_path: Path) -> None:
    for result in results_of(case, ranks, tmp_path, controller):
        assert str(result["start"]).startswith(message)


@pytest.mark.processes
def test_options_of_a_keras_optimizer_that_do_not_go_with_it(tmp_path: Path) -> None:
    for result in results_of("keras_refusals", 4, tmp_path):
        assert result.pop("start") == "no error"
        for name, message in result.items():
            assert str(message).startswith(f"UsageError: {name} doesn't go with Adasum"), name


# --- a job --------------------------------------------------------------------------------------------------------

# Linear regression. Its weights are told as metrics.
TASKS = {
    "torch": """
import numpy as np
import torch
from torch.utils.data import TensorDataset
from hvdtrain.train.torch import Task

class Regression(Task):
    def model(self):
        model = torch.nn.Linear(5, 3)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        return model

    def optimizer(self, model, lr):
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9)

    def train_data(self):
        return TensorDataset(*map(torch.from_numpy, np.load("data.npz").values()))

    def eval_data(self):
        return TensorDataset(torch.zeros(4))

    def loss(self, model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).sum(1) / 2

    def metrics(self, model, batch):
        weights = torch.cat([model.weight.T.flatten(), model.bias])
        return {f"weight{number}": weight for number, weight in enumerate(weights)}
""",
    "keras": """
import keras
import numpy as np
import tensorflow as tf
from hvdtrain.train.keras import Task

class Regression(Task):
    def model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, kernel_initializer="zeros")])

    def optimizer(self, model, lr):
        return keras.optimizers.SGD(lr, momentum=0.9)

    def train_data(self):
        return tuple(np.load("data.npz").values())

    def eval_data(self):
        return (np.zeros((4, 1), "float32"),)

    def loss(self, model, batch, training=True):
        return tf.reduce_sum((model(batch[0], training=training) - batch[1]) ** 2, 1) / 2

    def metrics(self, model, batch):
        kernel, bias = model.trainable_variables
        weights = tf.concat([tf.reshape(kernel, [-1]), bias], 0)
        return {f"weight{number}": weights[number] for number in range(18)}
""",
}
EPOCHS, BATCH, LR = 3, 3, 0.02


def data_of(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and targets, float32, shapes (samples, 5) and (samples, 3)."""
    draw = np.random.default_rng(3)
    features = draw.normal(size=(samples, 5))
    targets = features @ draw.normal(size=(5, 3)) + draw.normal(size=(samples, 3))
    return features.astype(np.float32), targets.astype(np.float32)


def trained_by_one_process(samples: int, ranks: int, *, mean: bool = False) -> np.ndarray:
    """The weights, kernel before bias, after training with what all ranks would compute."""
    features, targets = data_of(samples)
    inputs = np.concatenate([features, np.ones((samples, 1))], 1).astype(np.float64)
    weights, momentum = np.zeros((6, 3)), np.zeros((6, 3))
    for epoch in range(EPOCHS):
        order = epoch_order(samples, 0, epoch)
        for step in zip(*(shares(order, BATCH * ranks, rank, ranks) for rank in range(ranks)), strict=True):
            busy = [share for share in step if len(share.indices)]
            parts = []
            for share in step:
                rows = inputs[share.indices]
                wrong = rows @ weights - targets[share.indices]
                # A rank's sum, over the number of samples of a rank, on average, that has some.
                parts.append(rows.T @ wrong * (len(step) if mean else len(busy)) / share.total)
            kernel, bias = [part[:5] for part in parts], [part[5:] for part in parts]
            combined = np.mean(parts, 0) if mean else np.concatenate([adasum(kernel), adasum(bias)])
            momentum = 0.9 * momentum + combined
            weights = weights - LR * momentum
    return weights.ravel()


def launch(folder: Path, framework: str, samples: int, ranks: int) -> tuple[np.ndarray, str]:
    """The weights at the end, and the output."""
    (folder / "cases.py").write_text(TASKS[framework])
    features, targets = data_of(samples)
    np.savez(folder / "data.npz", features=features, targets=targets)
    spec = {
        "task": "cases:Regression",
        "options": {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR},
        "processes": ranks,
        "hosts": {"list": [f"localhost:{ranks}"]},
        "horovod": {"adasum": True},
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "job.yaml"],
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    (run,) = (folder / "runs").glob("*/latest")
    return weights_of(run), done.stdout


def weights_of(run: Path) -> np.ndarray:
    """Those at the run's end."""
    records = [json.loads(line) for line in (run / contract.METRICS_FILE).read_text().splitlines()]
    last = next(record for record in reversed(records) if "eval_weight0" in record)
    return np.array([last[f"eval_weight{number}"] for number in range(18)])


@pytest.mark.processes
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    ("framework", "ranks", "samples"),
    [
        ("torch", 4, 38),  # two ranks have no sample in an epoch's last step
        ("torch", 2, 23),  # 3 and 2 samples in the last step
        ("keras", 2, 37),  # one sample for two ranks
    ],
)
def test_a_job_trains_as_the_formula_says(framework: str, ranks: int, samples: int, tmp_path: Path) -> None:
    weights, output = launch(tmp_path, framework, samples, ranks)
    assert "controller mpi: horovod.adasum needs it" in output
    due = trained_by_one_process(samples, ranks)
    np.testing.assert_allclose(weights, due, rtol=0, atol=1e-4)
    assert np.abs(due - trained_by_one_process(samples, ranks, mean=True)).max() > 0.01


@pytest.mark.processes
@pytest.mark.timeout(PATIENCE_S)
def test_a_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """With its momentum, which is of the combined gradients and so the same on all ranks."""
    (tmp_path / "cases.py").write_text(TASKS["torch"])
    features, targets = data_of(23)
    np.savez(tmp_path / "data.npz", features=features, targets=targets)
    for attempt, epochs in enumerate((1, EPOCHS)):
        environment = {
            **CROWDED,
            contract.TASK: "cases:Regression",
            contract.OPTIONS: json.dumps({"epochs": epochs, "batch_size": BATCH, "lr": LR}),
            contract.SETTINGS: json.dumps({"adasum": True}),
            contract.RUN_DIRECTORY: str(tmp_path / "run"),
            contract.ATTEMPT: str(attempt),
        }
        output = python_on_ranks("mpi", 2, tmp_path, "-m", "hvdtrain.train", env=environment, timeout=PATIENCE_S)
    assert "resumed" in output
    np.testing.assert_allclose(weights_of(tmp_path / "run"), trained_by_one_process(23, 2), rtol=0, atol=1e-4)


# --- plans --------------------------------------------------------------------------------------------------------


def plan(*slots: int, controller: str = "auto", processes: int | None = None, **facts: Any) -> LaunchPlan:
    job = JobSpec(
        name="job",
        task="a:B",
        directory=Path("/jobs"),
        controller=controller,  # type: ignore[arg-type]
        processes=processes,
        horovod=HorovodSettings(adasum=True, hierarchical_allreduce=facts.pop("hierarchical", None)),
    )
    return plan_on(job, *slots, **facts)


def test_a_plan_takes_mpi_for_it_and_tells_the_task() -> None:
    made = plan(2, 2)
    assert made.controller == "mpi"
    assert made.reasons[0] == "controller mpi: horovod.adasum needs it"
    assert made.reasons[-1] == "adasum: gradients of 4 processes are combined, not averaged"
    assert json.loads(made.environment[contract.SETTINGS])["adasum"] is True
    assert plan(2, controller="mpi").reasons[0] == "controller mpi: as the job spec says"


@pytest.mark.parametrize(
    ("slots", "facts", "reason"),
    [
        ((1,), {}, "adasum has no effect: there is one process"),
        ((4,), {"nccl": True}, "adasum: GPU tensors are averaged all the same, as all processes are on one host"),
        ((4, 4), {"nccl": True}, "adasum: GPU tensors are averaged in each host by NCCL, then combined over 2 hosts"),
    ],
)
def test_a_plan_says_whose_gradients_are_combined(slots: tuple[int, ...], facts: dict[str, Any], reason: str) -> None:
    assert plan(*slots, **facts).reasons[-1] == reason


def test_hierarchical_allreduce_does_nothing_to_them() -> None:
    why = "hierarchical_allreduce has no effect: gradients are combined by Adasum, in steps of its own"
    assert why in plan(2, 2, hierarchical=True, nccl=True).reasons


@pytest.mark.parametrize(
    ("slots", "facts", "message"),
    [
        ((3, 3), {}, "horovod.adasum combines gradients in pairs, and 6 processes aren't a power of two"),
        ((3, 1), {"nccl": True}, "horovod.adasum on GPUs needs equally many processes on each host.*3, 1"),
    ],
)
def test_placements_that_it_cannot_combine(slots: tuple[int, ...], facts: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*slots, **facts)


@pytest.mark.parametrize("facts", [{"controllers": ("gloo",)}, {"mpirun": None}])
def test_a_horovod_without_mpi(facts: dict[str, Any]) -> None:
    with pytest.raises(StartError, match="adasum needs MPI, which can't be used: "):
        plan(2, **facts)


def test_a_gradient_that_is_too_large_for_horovods_buffer() -> None:
    require_size(2**31 - 4)
    with pytest.raises(UsageError, match="of 2 GiB at most"):
        require_size(2**31)
