"""A Keras model whose ranks are laid out in every way ends with the weights that one process gives it."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_processes import CROWDED, horovodrun

from hvdtrain import contract
from hvdtrain.parallel.grid import Grid

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
GLOBAL_BATCH = 8
STEPS = 20
TOLERANCE = 1e-4
Arrays = dict[str, np.ndarray]


def train(run: Path, grid: Grid, controller: str = "gloo") -> str:
    """What is left of 20 steps; returns the output."""
    command = [sys.executable, "-m", "hvdtrain.train"]
    done = subprocess.run(
        command if grid.size == 1 else [*horovodrun(controller, grid.size), *command],
        cwd=run,
        env={
            **CROWDED,
            "PYTHONPATH": f"{HERE}:{HERE.parent}",
            contract.TASK: "parallel_keras_tasks:Everything",
            contract.OPTIONS: json.dumps({"epochs": 1, "lr": 0.02, "batch_size": GLOBAL_BATCH // grid.replicas}),
            contract.SETTINGS: json.dumps({"checkpoint": {"every_steps": 6, "keep": 10}}),
            contract.RUN_DIRECTORY: str(run),
            contract.GRID: grid.to_text(),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def last_model(run: Path) -> Path:
    return next((run / "checkpoints").glob(f"step-*{STEPS}")) / "model.keras"


def arrays(path: Path) -> Arrays:
    """Every variable in a saved model, the optimizer's too."""
    h5py = pytest.importorskip("h5py")
    found: Arrays = {}
    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def difference(one: Arrays, other: Arrays) -> float:
    assert one.keys() == other.keys()
    assert sum(name.startswith("optimizer") for name in one) > 20
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def final_loss(output: str) -> float:
    found = re.search(rf"{STEPS} steps and .* s: eval_loss ([\d.]+)", output)
    assert found, output
    return float(found[1])


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Arrays, float]:
    """Variables and loss after training in one process."""
    run = tmp_path_factory.mktemp("single")
    output = train(run, Grid())
    return arrays(last_model(run)), final_loss(output)


LAYOUTS = {
    "embedding 4": Grid(embedding=4),
    "tensor 2 x data 2": Grid(tensor=2, data=2),
    "tensor 4": Grid(tensor=4),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, str]]:
    """Gives folder and output of a layout that was trained under a controller."""

    @functools.cache
    def trained(layout: str, controller: str) -> tuple[Path, str]:
        run = tmp_path_factory.mktemp("grid")
        return run, train(run, LAYOUTS[layout], controller)

    return trained


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_to_the_weights_of_one_process(
    layout: str, controller: str, runs: Callable[[str, str], tuple[Path, str]], single: tuple[Arrays, float]
) -> None:
    """The last step's only sample is one replica's, and Adam's moments come back whole too."""
    run, output = runs(layout, controller)
    expected, loss = single
    assert difference(arrays(last_model(run)), expected) < TOLERANCE
    assert "no layer of the model is cut" not in output
    assert final_loss(output) == pytest.approx(loss, abs=1e-3)


@pytest.mark.parametrize(
    ("layout", "other"), [("embedding 4", Grid(tensor=2, embedding=2)), ("tensor 2 x data 2", Grid())]
)
def test_a_checkpoint_of_one_grid_is_gone_on_with_on_another(
    layout: str,
    other: Grid,
    runs: Callable[[str, str], tuple[Path, str]],
    single: tuple[Arrays, float],
    tmp_path: Path,
) -> None:
    shutil.copytree(runs(layout, "gloo")[0] / "checkpoints", tmp_path / "checkpoints")
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > 12:
            shutil.rmtree(checkpoint)
    assert "resumed from step 12" in train(tmp_path, other)
    assert difference(arrays(last_model(tmp_path)), single[0]) < TOLERANCE


LOAD = """
import json
import sys
import keras
import numpy as np
from hvdtrain.parallel.keras import embedding, tensor  # whose layers Keras then knows by their registered names

model = keras.saving.load_model(sys.argv[1])
print(json.dumps([model.count_params(), model(np.array([[22, 6]])).numpy().tolist(), type(model.optimizer).__name__]))
"""


def test_the_file_is_an_ordinary_model(runs: Callable[[str, str], tuple[Path, str]]) -> None:
    """Whole layers and tables, which Keras makes and runs where no rank meets another."""
    outputs = []
    for run, _ in (runs(layout, "gloo") for layout in LAYOUTS):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(HERE.parent)}
        done = subprocess.run(
            [sys.executable, "-c", LOAD, str(last_model(run))],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        outputs.append(json.loads(done.stdout.splitlines()[-1]))
    parameters, _, optimizer = outputs[0]
    assert optimizer == "Adam"
    assert parameters == 23 * 8 + 7 * 8 + 23 * 8 + (8 * 24 + 24 + 8 * 8 + 8) + 16 + (8 * 16 + 16 + 16 * 8 + 8) + 17
    for values in outputs:
        np.testing.assert_allclose(values[1], outputs[0][1], atol=1e-3)


def test_cut_dropout_is_seeded_by_rank_and_the_rest_alike() -> None:
    from hvdtrain.parallel.groups import ProcessSets
    from hvdtrain.parallel.keras.shared import ParallelDropout
    from hvdtrain.train.keras.backend import KerasBackend

    def seeds(rank: int) -> list[Any]:
        backend = object.__new__(KerasBackend)
        backend.groups = ProcessSets(Grid(tensor=2)).groups(rank)
        layers = [ParallelDropout(0.5, backend.groups.tensor, cut=cut) for cut in (False, True)]
        backend._seed_states = [layer.seed_generator.state for layer in layers]
        backend.seed(7)
        return [state.numpy().tolist() for state in backend._seed_states]

    (common, own), (common_too, other) = seeds(0), seeds(1)
    assert common == common_too
    assert own != other
