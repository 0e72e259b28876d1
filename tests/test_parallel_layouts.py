"""Small models, divided in every way, end with the weights that one process gives them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import contract

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
GLOBAL_BATCH = 8
BYTES = {"bytes": 100_000, "context": 12, "layers": 3, "width": 16, "heads": 4, "clip_norm": 0.5}
# Classes of parallel_layout_cases, and options. The clipping matters at each step.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Layered", {"clip": 0.5}),
    "gpt": ("Bytes", BYTES),
    # Only where all samples go through the same random numbers as in one process is it to be compared with.
    "gpt with dropout": ("Bytes", {**BYTES, "dropout": 0.2}),
    "embeddings": ("Tables", {}),
    "gpt, interrupted": ("Interrupted", BYTES),
}
Single = Callable[[str], tuple[dict[str, Any], float]]


def launch(
    folder: Path, task: str, processes: int, parallelism: dict[str, Any], controller: str = "gloo", **more: Any
) -> str:
    """Train for 20 steps of 8 samples on so many processes; returns the output."""
    folder.mkdir(exist_ok=True)
    degrees, (name, options) = dict(parallelism), TASKS[task]
    batch_size = GLOBAL_BATCH // degrees.pop("replicas")
    spec = {
        "task": f"parallel_layout_cases:{name}",
        "options": {"epochs": 1, "lr": 0.02, "evaluate_every_epochs": None, "batch_size": batch_size, **options},
        "processes": processes,
        "oversubscribe": True,
        "hosts": {"list": ["localhost:4"]},
        "controller": controller,
        "checkpoint": {"every_steps": 4, "keep": 10},
        "env": {"set": {"OMP_NUM_THREADS": 1}},
        "directory": str(Path(__file__).parent),
        "parallelism": degrees,
        **more,
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    return hvdtrain(folder, "launch", "job.yaml")


def hvdtrain(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *arguments],
        cwd=folder, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(folder: Path) -> dict[str, Any]:
    """The whole model, from the parts of the last checkpoint."""
    from hvdtrain.train.torch.parts import Saved

    saved = Saved(next((folder / "runs" / "job" / "latest" / "checkpoints").glob("step-*20")))
    return {name: saved.model(name).clone() for name in saved.names}


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def final_loss(output: str) -> float:
    found = re.search(r"20 steps and .* s: eval_loss ([\d.]+)", output)
    assert found, output
    return float(found[1])


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Single:
    """A task's weights and loss after training in one process."""
    known: dict[str, tuple[dict[str, Any], float]] = {}

    def get(task: str) -> tuple[dict[str, Any], float]:
        if task not in known:
            folder = tmp_path_factory.mktemp("single")
            output = launch(folder, task, 1, {"replicas": 1})
            known[task] = weights(folder), final_loss(output)
        return known[task]

    return get


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data 4": ("dense", {"replicas": 4}),
    "tensor 2 x data 2": ("gpt", {"tensor": 2, "replicas": 2}),
    "tensor 4": ("gpt with dropout", {"tensor": 4, "replicas": 1}),
    "pipeline 2 x data 2": ("dense", {"pipeline": 2, "replicas": 2}),
    "pipeline 4": (
        "dense",
        {"pipeline": 4, "replicas": 1, "schedule": "gpipe", "recompute": True, "cut_by": "time"},
    ),
    "sharded 4": ("dense", {"shard_optimizer": True, "replicas": 4}),
    "embedding 4": ("embeddings", {"embedding": 4, "replicas": 4}),
}
UNDER_GLOO_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor 2 x pipeline 2": ("gpt", {"tensor": 2, "pipeline": 2, "replicas": 1, "cut_by": "time"}),
    "data 4 in parts": ("dense", {"replicas": 4, "micro_batches": 2}),
}


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_to_the_weights_of_one_process(
    layout: str, controller: str, tmp_path: Path, single: Single
) -> None:
    train_and_compare(*LAYOUTS[layout], controller, tmp_path, single)


@pytest.mark.parametrize("layout", UNDER_GLOO_ALONE)
def test_another_layout_trains_to_the_weights_of_one_process(layout: str, tmp_path: Path, single: Single) -> None:
    train_and_compare(*UNDER_GLOO_ALONE[layout], "gloo", tmp_path, single)


def train_and_compare(task: str, parallelism: dict[str, Any], controller: str, folder: Path, single: Single) -> None:
    output = launch(folder, task, 4, parallelism, controller)
    expected, loss = single(task)
    assert "warning" not in output
    # On one line: the rows of the grid's picture are --dry-run's.
    assert not re.search(r"^hvdtrain: job: .*;  ", output, re.M)
    assert difference(weights(folder), expected) < TOLERANCE
    assert final_loss(output) == pytest.approx(loss, abs=1e-3)


def test_everything_at_once_goes_on_after_a_lost_rank(tmp_path: Path, single: Single) -> None:
    """Tensor and data parallel, in parts, by bfloat16 on the ranks and between them; a restart from the parts."""
    output = launch(
        tmp_path,
        "gpt, interrupted",
        4,
        {"tensor": 2, "micro_batches": 2, "replicas": 2},
        horovod={"compression": "bf16"},
        restarts={"max": 1, "backoff_s": 0.1},
    )
    assert re.search(r"resumed from step [48]:", output)
    _, loss = single("gpt")
    assert final_loss(output) == pytest.approx(loss, abs=0.05)
    assert loss < 4


def test_a_model_that_no_layer_divides_is_told(tmp_path: Path) -> None:
    output = launch(tmp_path, "dense", 2, {"tensor": 2, "replicas": 1})
    assert output.count("warning: parallelism.tensor is 2, and no layer of the model is cut by it") == 1


def test_a_checkpoint_of_one_grid_is_gone_on_with_on_others(tmp_path: Path, single: Single) -> None:
    """One run, on another grid after 4, 8, 12 and 16 steps, at last on one process."""
    expected, _ = single("gpt")
    launch(tmp_path, "gpt", 4, {"pipeline": 2, "shard_optimizer": True, "replicas": 2, "micro_batches": 2})
    assert difference(weights(tmp_path), expected) < TOLERANCE
    run = next((tmp_path / "runs" / "job").glob("2*"))
    once = {"pipeline": 1, "micro_batches": 1}
    grids: list[tuple[int, int, dict[str, Any], str | None]] = [
        (4, 2, {**once, "tensor": 2}, "2,1,2,1"),
        (4, 2, {"shard_optimizer": False}, "2,1,2,1"),
        (4, 1, {"tensor": 4}, "4,1,1,1"),
        (1, 1, {"tensor": 1}, None),
    ]
    for step, (processes, replicas, degrees, grid) in zip((4, 8, 12, 16), grids, strict=True):
        end_at(run, step)
        changes = {f"parallelism.{key}": value for key, value in degrees.items()}
        changes["options.batch_size"] = GLOBAL_BATCH // replicas
        options = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        output = hvdtrain(tmp_path, "resume", str(run), "-n", str(processes), *options)
        assert f"resumed from step {step}" in output
        assert json.loads((run / "plan.json").read_text())["environment"].get(contract.GRID) == grid
        assert difference(weights(tmp_path), expected) < TOLERANCE


def end_at(run: Path, step: int) -> None:
    """Make a run that is done one that has failed behind that step."""
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "failed", "exit_status": 4}))
