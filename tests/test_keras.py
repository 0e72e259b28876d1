"""`hvdtrain.keras` on two real ranks, under Gloo and MPI. keras_cases.py holds what the ranks do."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_processes import PLAIN, WITHOUT_HOROVOD, python_on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
CASES = HERE / "keras_cases.py"
PATIENCE_S = 500
ENVIRONMENT = {**PLAIN, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(HERE.parent)}

Results = list[dict[str, Any]]


def case_names(prefix: str) -> list[str]:
    """The cases, read from the source: to import them would load TensorFlow."""
    functions = [node.name for node in ast.parse(CASES.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith(prefix)]


def on_two_ranks(controller: str, folder: Path, *command: str) -> str:
    """Runs a command on two ranks and returns its output; fails with it if a rank does."""
    environment = {**ENVIRONMENT, "HOROVOD_TIMELINE": "DYNAMIC"}
    return python_on_ranks(controller, 2, folder, *command, env=environment, timeout=PATIENCE_S)


# Under MPI what differs by controller: each kind of collective, in graphs and eagerly.
MPI_CASES = [
    "equal_sgd",
    "equal_accumulation_of_keras",
    "equal_embedding",
    "equal_loop_eagerly",
    "collectives",
    "constant_gradients",
    "process_set",
    "scaled_by_compile",
    "broadcast_of_model",
    "broadcast_of_every_dtype",
    "callback_broadcast",
    "callback_broadcast_to_unbuilt",
    "callback_metrics",
]
GLOO_ONLY = pytest.mark.parametrize("controller", ["gloo"], indirect=True)


def both_controllers(prefix: str) -> pytest.MarkDecorator:
    """All cases with the prefix under Gloo, and those of `MPI_CASES` under MPI."""
    cases = case_names(prefix)
    pairs = [("gloo", case) for case in cases] + [("mpi", case) for case in cases if case in MPI_CASES]
    return pytest.mark.parametrize(("controller", "case"), pairs, indirect=["controller"])


@pytest.fixture(params=["gloo", "mpi"])
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where both ranks have run a controller's cases: once, in whatever order pytest puts the tests."""

    @functools.cache
    def run(controller: str) -> Path:
        path = tmp_path_factory.mktemp(f"keras-{controller}")
        on_two_ranks(controller, path, str(CASES), str(path), *(MPI_CASES if controller == "mpi" else []))
        return path

    return run


@pytest.fixture
def folder(folder_of: Callable[[str], Path], controller: str) -> Path:
    return folder_of(controller)


@pytest.fixture
def results(folder: Path) -> Results:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


# Half precision rounds: a bfloat16 has 8 bits.
TOLERANCE = {"equal_bfloat16": 2**-7}


@both_controllers("equal_")
def test_two_ranks_are_one_process_with_twice_the_batch(results: Results, case: str) -> None:
    for result in results:
        assert result[case]["moved"] > 1e-3
        assert result[case]["from_one_process"] <= TOLERANCE.get(case, 1e-5)
        assert result[case]["across_ranks"] == 0


@GLOO_ONLY
def test_fp16_on_the_wire_changes_little_and_the_same_everywhere(results: Results) -> None:
    for result in results:
        assert 0 < result["compression"]["from_one_process"] < 1e-3
        assert result["compression"]["across_ranks"] == 0


def test_gradients_travel_once_for_each_update(results: Results) -> None:
    assert results[0]["collectives"] == {"plain": 6, "accumulated": 2}


def test_a_rank_with_constant_gradients_takes_part_in_every_step(results: Results) -> None:
    """Averages of (0, 2, 4) with (2, 4) and, for the rows of an embedding, of each rank's own row."""
    seen = [[-1, -2, 0, -3], [-3, -5, -1, -6], [-6, -9, -3, -9]]
    assert [result["constant_gradients"]["seen"] for result in results] == [seen, seen]


def test_a_process_set_averages_over_its_own_ranks(results: Results) -> None:
    for result in results:
        assert result["process_set"]["from_one_process"] <= 1e-5
        assert result["process_set"]["ranks_apart"] > 1e-3


@both_controllers("scaled_")
def test_an_overflow_on_one_rank_is_left_out_on_all(results: Results, case: str) -> None:
    for result in results:
        assert result[case]["is_scaled"]
        assert result[case]["halvings"] == result[case]["steps_left_out"] == 1
        assert result[case]["across_ranks"] == 0
        assert result[case]["finite"]
    assert [result[case]["own_overflows"] for result in results] == [0, 1]


def test_broadcast_copies_weights_and_optimizer_but_no_seeds(results: Results) -> None:
    for result in results:
        case = result["broadcast_of_model"]
        assert case["before"] > 0.1
        assert (case["across_ranks"], case["from_root"]) == (0, 0)
        assert case["steps"] == 12
        assert case["learning_rate"] == pytest.approx(0.02)
        assert case["seed_states"] == case["seeds_differ"] == 1


def test_broadcast_copies_every_dtype_in_small_packets(results: Results) -> None:
    assert [result["broadcast_of_every_dtype"]["from_root"] for result in results] == [0, 0]


@GLOO_ONLY
def test_models_that_differ_are_an_error_on_every_rank(results: Results) -> None:
    for result in results:
        errors = result["broadcast_of_models_that_differ"]
        assert re.search(r"kernel is float32\[5, 3\] on rank 0, and \S+kernel is float32\[5, 4\] on", errors["shape"])
        assert "rank 0 has 2 variables to broadcast, and rank 1 has 4" in errors["count"]
        assert "has no variables yet to broadcast" in errors["unbuilt"]
        assert "variables of strings can't be broadcast" in errors["strings"]
        assert "is float32[1] on rank 0" in errors["strings_on_one"]


def test_fit_starts_from_the_root_ranks_model(results: Results) -> None:
    for result in results:
        assert result["callback_broadcast"]["before"] > 0.1
        assert result["callback_broadcast"]["across_ranks"] == 0
        assert result["callback_broadcast"]["from_one_process"] <= 1e-5
        assert result["callback_broadcast_to_unbuilt"]["across_ranks"] == 0


def test_averaged_metrics_are_those_of_all_samples(results: Results) -> None:
    for result in results:
        case = result["callback_metrics"]
        assert case["own_from_whole"] > 0.1
        assert case["from_whole"] < 1e-5
        assert case["across_ranks"] == 0
        assert case["logs"] == 4


@GLOO_ONLY
def test_early_stopping_stops_all_ranks_together(results: Results) -> None:
    """By the average, which counts 16 and 32 samples: 5, 4, (6 + 2 * 3) / 3."""
    for result in results:
        assert result["callback_early_stopping"] == {"epochs": 3, "third": 4}


@GLOO_ONLY
def test_warm_up_ends_at_the_full_rate_and_the_schedule_takes_over(results: Results) -> None:
    rates = [0.25, 0.3, 0.35, 0.4, 0.4, 0.4, 0.4, 0.4, 0.04, 0.04]
    assert [result["callback_warmup"]["rates"] for result in results] == [rates, rates]
    said = [result["callback_warmup"]["said"] for result in results]
    assert said == ["Epoch 2: learning rate warmed up to 0.4\n", ""]


@GLOO_ONLY
def test_warm_up_says_what_it_can_not_do(results: Results) -> None:
    for result in results:
        assert (
            "can't set a learning rate that the optimizer takes from its own" in result["callback_errors"]["schedule"]
        )
        assert "pass steps_per_epoch to the callback" in result["callback_errors"]["steps"]


REFUSALS = {
    "twice": "is distributed already: its gradients would be averaged twice",
    "twice_inside": "is distributed already",
    "no_optimizer": "DistributedOptimizer needs a Keras 3 optimizer, not 'sgd'",
    "op": "pass op=hvd.Average, hvd.Sum or hvd.Adasum",
    "passes": "backward_passes_per_step must be a whole number of at least 1, not 0",
    "groups": "groups must be a whole number of at least 1, not 0",
    "both_accumulate": "the optimizer already accumulates over 2 steps",
    "built": "make it with gradient_accumulation_steps=2",
    "built_goes": "no error",
    "own_step": "OwnStep has its own apply",
    "own_check": "OwnCheck has its own check_finite",
    "broadcast_in_graph": "variables can't be broadcast inside tf.function",
}


@GLOO_ONLY
@pytest.mark.parametrize("request_", REFUSALS)
def test_what_can_not_work_is_refused(results: Results, request_: str) -> None:
    for result in results:
        assert result["refusals"].keys() == REFUSALS.keys()
        assert REFUSALS[request_] in result["refusals"][request_]


@GLOO_ONLY
def test_xla_is_left_out_or_refused(results: Results) -> None:
    for result in results:
        case = result["xla"]
        assert (case["auto_plain"], case["auto_distributed"]) == (True, False)
        assert case["plain"] == "no error"
        assert "a training step that XLA compiles can't hold Horovod's operations" in case["distributed"]
        assert case["scaled"] == case["distributed"]


LOAD_WITHOUT_HOROVOD = (
    WITHOUT_HOROVOD
    + """
import json
import keras, numpy as np

@keras.saving.register_keras_serializable("mine")
class Registered(keras.optimizers.SGD):
    pass

found = {}
for name in sys.argv[1:]:
    model = keras.saving.load_model(f"{name}.keras")
    saved = np.load(f"{name}.npz")
    state = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    optimizer = type(model.optimizer)
    model.fit(np.ones((4, 5), "float32"), np.ones((4, 3), "float32"), verbose=0)
    found[name] = {
        "class": optimizer.__name__,
        "plain": optimizer.__module__.startswith("keras.") or optimizer is Registered,
        "equal": len(state) == len(saved) and all((a == b).all() for a, b in zip(state, saved.values())),
    }
print(json.dumps(found))
"""
)


@GLOO_ONLY
def test_saved_models_load_without_horovod(folder: Path, results: Results) -> None:
    names = results[0]["saving"]
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_HOROVOD, *names],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: {"class": kind, "plain": True, "equal": True} for name, kind in names.items()}


def test_the_documented_script_learns(controller: str, tmp_path: Path) -> None:
    text = (HERE.parent / "docs" / "keras.md").read_text()
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    output = on_two_ranks(controller, tmp_path, "train.py")
    accuracy = re.search(r"accuracy of all ranks: ([\d.]+)", output)
    assert accuracy, output[-4000:]
    assert float(accuracy[1]) > 0.95
    assert (tmp_path / "digits.keras").exists()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_another_backend_is_refused() -> None:
    done = python("import hvdtrain.keras", KERAS_BACKEND="torch")
    assert done.returncode != 0
    assert "hvdtrain.keras needs Keras on TensorFlow, it runs on torch here" in done.stderr
    assert "fix: set KERAS_BACKEND=tensorflow before Keras is imported" in done.stderr


def test_keras_2_is_refused() -> None:
    done = python(
        "from hvdtrain.keras import requirements\nrequirements.require_tensorflow_keras('2.15.0', 'tensorflow')"
    )
    assert "hvdtrain.keras needs Keras 3, this is Keras 2.15.0" in done.stderr
