"""The training loop in Keras on real ranks: exact steps, and the digits job from its config."""

from __future__ import annotations

import ast
import io
import json
import os
import random
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from real_processes import PLAIN, WITHOUT_HOROVOD, horovodrun, python_on_ranks

from hvdtrain import contract

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
ROOT = HERE.parent
CASES = HERE / "keras_backend_cases.py"
PATIENCE_S = 300
ENVIRONMENT = {
    **{name: value for name, value in PLAIN.items() if not name.endswith("_THREADS")},
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONPATH": str(ROOT),
}


def on_ranks(controller: str, processes: int, folder: Path, *command: str, **environment: str) -> str:
    env = {**ENVIRONMENT, **environment}
    return python_on_ranks(controller, processes, folder, *command, env=env, timeout=PATIENCE_S)


def train_digits(controller: str, processes: int, folder: Path, options: dict[str, Any]) -> Path:
    """Trains the built-in task and returns its last checkpoint."""
    on_ranks(
        controller,
        processes,
        folder,
        "-m",
        "hvdtrain.train",
        HVDTRAIN_TASK="hvdtrain.tasks.digits_keras:Digits",
        HVDTRAIN_OPTIONS=json.dumps(options),
        HVDTRAIN_SETTINGS=json.dumps({"checkpoint": {"every_steps": None, "keep": 1}}),
        HVDTRAIN_RUN_DIRECTORY=str(folder),
    )
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    return checkpoint / "model.keras"


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def results(controller: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every case gave, for each rank."""
    folder = tmp_path_factory.mktemp(f"keras-backend-{controller}")
    on_ranks(controller, 2, folder, str(CASES), str(folder))
    return [json.loads((folder / f"backend-{rank}.json").read_text()) for rank in range(2)]


def case_names() -> list[str]:
    functions = [node.name for node in ast.parse(CASES.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("equal_")]


@pytest.mark.parametrize("case", case_names())
def test_steps_are_exact_and_traced_once(results: list[dict[str, Any]], case: str) -> None:
    for result in results:
        assert result[case]["moved"] > 0.1
        assert result[case]["from_one_process"] <= 1e-5
        assert result[case]["across_ranks"] == 0
        assert result[case]["traces"] == 1


def test_mixed_precision_learns_with_a_rank_without_samples(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["mixed_precision"]["is_scaled"]
        assert result["mixed_precision"]["across_ranks"] == 0
        assert result["mixed_precision"]["gain"] > 1.5


def test_dropout_differs_by_rank_and_repeats_by_seed(results: list[dict[str, Any]]) -> None:
    case = {"differs": True, "repeats": True}
    assert [result["dropout_differs_by_rank_and_repeats"] for result in results] == [case, case]


def test_evaluation_is_of_the_model_that_is_saved(results: list[dict[str, Any]]) -> None:
    assert results[1]["evaluation_measures_what_is_saved"]["before"] > 0.001
    for result in results:
        case = result["evaluation_measures_what_is_saved"]
        assert case["after"] == 0
        assert case["mean_from_whole"] < 1e-5
        assert case["without_samples"] == 0


@pytest.mark.parametrize("kind", ["none", "bf16", "topk", "auto"])
def test_a_job_s_compression_is_what_trains(results: list[dict[str, Any]], kind: str) -> None:
    for result in results:
        case = result["compressed"][kind]
        assert case["moved"] > 0.1
        assert case["across_ranks"] == 0
        assert (case["from_none"] > 1e-6) or kind in ("none", "auto")  # It did travel so.
        assert case["from_none"] < 0.05 or kind == "topk"
        told = [line.partition(";")[0] for line in case["findings"][0]]
        assert told in ([["compression: none"], ["compression: bf16"]] if kind == "auto" else [[]])
        assert case["findings"][1] == []


@pytest.mark.parametrize("case", ["restored", "restored_where_keras_can_not_make_the_model_again"])
def test_a_checkpoint_restores_model_and_optimizer_on_all_ranks(results: list[dict[str, Any]], case: str) -> None:
    for result in results:
        assert result[case]["since"] > 0.01
        assert result[case]["before"] > 0.1
        assert result[case]["after"] == 0
        assert result[case]["digests"] == 1
        assert result[case]["differing_digests"] == 2


def test_data_by_numbers_trains_as_arrays_do(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["data_by_numbers"]["from_arrays"] == 0
        assert result["data_by_numbers"]["loss_apart"] < 1e-6


def test_several_learning_rates_keep_their_ratio(results: list[dict[str, Any]]) -> None:
    assert [result["learning_rates"]["rates"] for result in results] == [[0.2, 2.0], [0.2, 2.0]]


def test_ranks_share_the_cores(results: list[dict[str, Any]]) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [result["threads"]["intra_op"] for result in results] == [share, share]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loss", "the task's loss() has shape (None, 3)\n  fix: return the mean of the batch (a scalar) or"),
        ("metric", "the task's metrics()['error'] has shape (None, 3)\n"),
        ("lengths", "train_data() gave arrays with 41, 7 samples\n"),
        ("empty", "train_data() gave arrays with no samples\n"),
        ("iterator", "train_data() gave a list_iterator, whose samples can't be counted and numbered\n"),
        ("shards", "Regression: parallelism.shard_optimizer is for PyTorch's tasks, and this is one of Keras: a Keras"),
        ("parts", "Regression: parallelism.micro_batches: 2 is for PyTorch's tasks, and this is one of Keras: a Keras"),
        ("schedule", "optimizer() gave one whose learning rate can't be set\n  fix: make it with learning_rate=lr"),
    ],
)
def test_a_task_that_can_not_work_says_why(results: list[dict[str, Any]], fault: str, message: str) -> None:
    for result in results:
        assert result["errors"][fault].startswith(message)


def test_a_model_that_keras_can_not_save_is_told_before_the_training(results: list[dict[str, Any]]) -> None:
    message = results[0]["errors"]["config"]
    assert message.startswith("Keras can't save the model: \nObject NoConfig was created by passing")
    assert message.endswith("fix: give the class that is named a get_config()")


def test_the_users_number_of_threads_counts(tmp_path: Path) -> None:
    on_ranks("gloo", 1, tmp_path, str(CASES), str(tmp_path), "threads", OMP_NUM_THREADS="3")
    assert json.loads((tmp_path / "backend-0.json").read_text())["threads"]["intra_op"] == 3


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Every variable in a saved model, the optimizer's too."""
    h5py = pytest.importorskip("h5py")
    found: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    options = {"epochs": 2, "batch_size": 718, "lr": 0.05}
    return arrays(train_digits("gloo", 1, tmp_path_factory.mktemp("one"), options))


def test_two_ranks_train_the_digits_as_one_process_does(
    controller: str, tmp_path: Path, one_process: dict[str, np.ndarray]
) -> None:
    """1,437 images are two steps of 718 and one of 1, in which rank 1 has none."""
    two = arrays(train_digits(controller, 2, tmp_path, {"epochs": 2, "batch_size": 359, "lr": 0.05}))
    assert two.keys() == one_process.keys()
    assert sum(name.startswith("optimizer") for name in two) == 10
    for name, values in two.items():
        np.testing.assert_allclose(values, one_process[name], rtol=0, atol=1e-5, err_msg=name)


# Dropout, batch normalisation, and noise from the generators of numpy and Python. In the batch that INTERRUPT names
# ("number signal") the last rank sends itself the signal.
INTERRUPTED = """
import os, random
import keras
import numpy as np
from hvdtrain.train.keras import Task

STEP, NUMBER = map(int, os.environ.get("INTERRUPT", "-1 0").split())
LAST = os.environ.get("HOROVOD_RANK", "0") == os.environ["LAST"]


class Noisy:
    def __init__(self):
        rng = np.random.default_rng(5)
        self.features = rng.normal(size=(41, 5)).astype("float32")
        self.targets = rng.normal(size=(41, 3)).astype("float32")
        self.batches = -1  # the backend asks for one to see its shape

    def __len__(self):
        return len(self.features)

    def __getitem__(self, numbers):
        self.batches += 1
        if self.batches == STEP and LAST:
            os.kill(os.getpid(), NUMBER)
        noise = np.random.normal(size=(len(numbers), 5)) * random.random()
        return self.features[numbers] + noise.astype("float32"), self.targets[numbers]


class Case(Task):
    def model(self):
        layers = keras.layers
        return keras.Sequential([
            keras.Input((5,)), layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.4), layers.Dense(3),
        ])

    def optimizer(self, model, lr):
        return keras.optimizers.Adam(lr)

    def train_data(self):
        return Noisy()

    def loss(self, model, batch, training=True):
        return keras.losses.mean_squared_error(batch[1], model(batch[0], training=training))
"""


def train_case(run: Path, size: int, interrupt: tuple[int, int] | None = None) -> tuple[int, str]:
    """An attempt of the run: 3 epochs of 11 or 6 steps, saved every 3. Its exit status and output."""
    (run / "cases.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "hvdtrain.train"]
    done = subprocess.run(
        command if size == 1 else [*horovodrun("gloo", size), *command],
        cwd=run,
        env={
            **ENVIRONMENT,
            "OMP_NUM_THREADS": "1",
            "LAST": str(size - 1),
            **({"INTERRUPT": f"{interrupt[0]} {interrupt[1]}"} if interrupt else {}),
            contract.TASK: "cases:Case",
            contract.OPTIONS: json.dumps({"epochs": 3, "batch_size": 4, "lr_decay": "cosine"}),
            contract.SETTINGS: json.dumps({"checkpoint": {"every_steps": 3}}),
            contract.RUN_DIRECTORY: str(run),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("size", "numbers"), [(1, [signal.SIGKILL, signal.SIGTERM]), (2, [signal.SIGTERM])])
def test_an_interrupted_training_ends_bit_identical(tmp_path: Path, size: int, numbers: list[signal.Signals]) -> None:
    chance = random.Random(size)  # noqa: S311
    undisturbed, interrupted = tmp_path / "undisturbed", tmp_path / "interrupted"
    for folder in (undisturbed, interrupted):
        folder.mkdir()
    status, output = train_case(undisturbed, size)
    assert status == 0, output
    for number in numbers:
        status, output = train_case(interrupted, size, (chance.randrange(4, 9), number))
        assert status == (0 if number == signal.SIGTERM else -number), output
        assert ("checkpoint saved" in output) == (number == signal.SIGTERM)
    status, output = train_case(interrupted, size)
    assert status == 0, output
    assert "resumed from step" in output
    last = [sorted((folder / "checkpoints").glob("step-*"))[-1] for folder in (undisturbed, interrupted)]
    assert last[0].name == last[1].name
    expected, found = (arrays(checkpoint / "model.keras") for checkpoint in last)
    assert sum(name.startswith("optimizer") for name in found) > 8
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


MEASURE = (
    WITHOUT_HOROVOD
    + """
import keras
from sklearn.datasets import load_digits

model = keras.saving.load_model(sys.argv[1])
digits = load_digits()
right = model.predict(digits.images[..., None] / 16, verbose=0).argmax(1) == digits.target
print(right.mean(), int(model.optimizer.iterations))
"""
)


def test_the_digits_config_reaches_its_accuracy_and_saves_a_model_for_anyone(controller: str, tmp_path: Path) -> None:
    job = yaml.safe_load((ROOT / "configs" / "digits-keras.yaml").read_text())
    assert job["task"] == "hvdtrain.tasks.digits_keras:Digits"
    model = train_digits(controller, 2, tmp_path, job["options"])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["eval_accuracy"] >= 0.97
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model)], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    accuracy, steps = done.stdout.split()
    assert float(accuracy) > 0.97
    assert int(steps) == records[-1]["step"] == int(model.parent.name.removeprefix("step-"))
