"""`hvdtrain checkpoint`: a run's model as a file that loads without hvdtrain, and what checkpoints there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_processes import WITHOUT_HOROVOD
from test_train_checkpoints import full_disk

from hvdtrain.cli import main, options
from hvdtrain.train.checkpoints import Checkpoints, part_name

torch = pytest.importorskip("torch")
files = pytest.importorskip("hvdtrain.train.torch.files")

STATE = {"epoch": 1, "epoch_samples": 30, "train_samples": 40}
PATIENCE_S = 300


@pytest.fixture
def hvdtrain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs `hvdtrain checkpoint` in this process, in the test's folder; gives the exit status."""
    monkeypatch.chdir(tmp_path)
    # pytest's own signals stay as they are.
    monkeypatch.setattr(options, "end_tidily", lambda: None)

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["hvdtrain", "checkpoint", *map(str, arguments)])
        return main._run()

    return run


def run_with(folder: Path, *steps: int) -> Checkpoints:
    """A run of the job `digits`, with checkpoints of a small PyTorch model: all its numbers are the step's."""
    run = folder / "runs" / "digits" / "20260101T000000Z-abcdef"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    checkpoints = Checkpoints(run / "checkpoints", keep=9)
    for step in steps:
        checkpoints.write(step, STATE, lambda path, step=step: save(path, step))
    return checkpoints


def save(folder: Path, step: int) -> None:
    model = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(model.weight, step)
    files.save(model.state_dict(), folder / "model.pt")
    files.save(torch.optim.SGD(model.parameters()).state_dict(), folder / "optimizer.pt")


def step_of(file: Path) -> float:
    model = torch.nn.Linear(4, 2)
    model.load_state_dict(torch.load(file, weights_only=True))
    return float(model.weight.detach()[0, 0])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- export ----------------------------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_of_a_run_is_taken(
    hvdtrain: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run_with(tmp_path, 10, 20, 30)
    os.truncate(checkpoints.folder / "step-0000000030" / "model.pt", 5)
    assert hvdtrain("export", "digits", "--output", "model.pt") == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("warning: checkpoint step-0000000030 is passed over: model.pt has 5 bytes, not ")
    assert shown.out.startswith("model.pt: PyTorch state dict of 2 tensors, ")
    assert step_of(tmp_path / "model.pt") == 20
    assert names(tmp_path) == ["model.pt", "runs"]


def test_a_step_or_a_checkpoints_folder_is_taken(hvdtrain: Callable[..., int], tmp_path: Path) -> None:
    checkpoints = run_with(tmp_path, 10, 20)
    assert hvdtrain("export", "--output", "a.pt", "--step", 10) == 0
    assert step_of(tmp_path / "a.pt") == 10
    elsewhere = (checkpoints.folder / "step-0000000010").rename(tmp_path / "best")
    assert hvdtrain("export", elsewhere, "--output", "a.pt") == 2
    assert hvdtrain("export", checkpoints.folder / "step-0000000020", "--output", "a.pt", "--force") == 0
    assert step_of(tmp_path / "a.pt") == 20
    assert hvdtrain("export", elsewhere, "--output", "a.pt", "--force") == 0
    assert step_of(tmp_path / "a.pt") == 10


def lose_a_part(folder: Path) -> None:
    def write_all(path: Path) -> None:
        for rank in range(2):
            (path / part_name(rank)).mkdir()
            files.save({}, path / part_name(rank) / "part.pt")

    checkpoint = Checkpoints(folder / "runs/digits/20260101T000000Z-abcdef/checkpoints", 9).write(30, STATE, write_all)
    (checkpoint / "part-00001" / "part.pt").unlink()


def save_keras(folder: Path) -> None:
    checkpoints = Checkpoints(folder / "runs/digits/20260101T000000Z-abcdef/checkpoints", 9)
    checkpoints.write(40, STATE, lambda path: (path / "model.keras").write_bytes(b"weights" * 1000) and None)


@pytest.mark.parametrize(
    ("prepare", "arguments", "status", "words"),
    [
        (None, ["digit", "-o", "m.pt"], 2, "there is no run 'digit'"),
        (None, ["-o", "runs"], 2, "runs: this is a folder"),
        (None, ["-o", "there"], 2, "there: the file is there already\n  fix: name another one, or add --force"),
        (None, ["-o", "lost/m.pt"], 2, "lost: the folder of the output doesn't exist"),
        (None, ["-o", "m.pt", "--step", "7"], 2, "there is no checkpoint of step 7\n  fix: choose one of 10"),
        (None, ["-o", "m.keras"], 2, "m.keras: the checkpoint is of a PyTorch model, whose file doesn't end with"),
        (save_keras, ["-o", "m.pt"], 2, "m.pt: the checkpoint is of a Keras model, whose file ends with .keras"),
        (lose_a_part, ["-o", "m.pt", "--step", "30"], 1, "is damaged: part-00001/part.pt is missing\n"),
    ],
)
def test_what_can_not_be_exported_is_told(
    hvdtrain: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Path], None] | None,
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    run_with(tmp_path, 10)
    (tmp_path / "there").write_text("of the user")
    if prepare:
        prepare(tmp_path)
    assert hvdtrain("export", *arguments) == status
    assert words in capsys.readouterr().err
    assert names(tmp_path) == ["runs", "there"]
    assert (tmp_path / "there").read_text() == "of the user"


def test_a_run_without_a_whole_checkpoint_is_told(
    hvdtrain: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run_with(tmp_path)
    assert hvdtrain("export", "-o", "m.pt") == 2
    assert "the run has no checkpoint\n  fix: a task writes its first after" in capsys.readouterr().err
    checkpoint = checkpoints.write(1, STATE, lambda path: save(path, 1))
    (checkpoint / "manifest.json").unlink()
    assert hvdtrain("export", "-o", "m.pt") == 1
    assert "no checkpoint is whole" in capsys.readouterr().err
    assert hvdtrain("export", checkpoint, "-o", "m.pt") == 1
    assert "the checkpoint is damaged: it has no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["m.pt", "m.keras"])
def test_a_full_disk_is_told_and_leaves_nothing(
    hvdtrain: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run_with(tmp_path, 10)
    if name == "m.keras":
        save_keras(tmp_path)
    (tmp_path / name).write_text("of the user")
    with full_disk():
        status = hvdtrain("export", "-o", name, "--force")
    assert status == 3
    assert f"{name}: can't write the file: File too large\n  fix: free some space" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "of the user"
    assert names(tmp_path) == [name, "runs"]


def test_ctrl_c_leaves_nothing_half_written(
    hvdtrain: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(tmp_path, 10)

    def interrupted(state: object, path: Path) -> None:
        path.write_text("half of i")
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "save", interrupted)
    assert hvdtrain("export", "-o", "m.pt") == 130
    assert names(tmp_path) == ["runs"]


def test_a_python_without_pytorch_is_told(
    hvdtrain: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_with(tmp_path, 10)
    for name in [name for name in sys.modules if name.startswith("hvdtrain.train.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert hvdtrain("export", "-o", "m.pt") == 3
    assert f"{sys.executable}: there is no module 'torch' here\n  fix: run 'python -m" in capsys.readouterr().err


def test_views_are_written_without_what_they_look_into(hvdtrain: Callable[..., int], tmp_path: Path) -> None:
    storage = torch.arange(100_000.0)
    state = {"view": storage[:6].reshape(2, 3).T, "same": storage[:6].reshape(2, 3).T}
    checkpoints = run_with(tmp_path)
    checkpoints.write(5, STATE, lambda path: files.save(state, path / "model.pt"))
    assert hvdtrain("export", "-o", "m.pt") == 0
    assert (tmp_path / "m.pt").stat().st_size < 5_000
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert list(found) == ["view", "same"]
    for tensor in found.values():
        assert torch.equal(tensor, state["view"])
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == 6 * 4


class Tied(torch.nn.Module):  # type: ignore[misc]
    """A table and an output layer with one weight, of which a rank has a part, and a buffer."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(*weight.shape, _weight=weight)
        self.output = torch.nn.Linear(*reversed(weight.shape), bias=False)
        self.output.weight = self.table.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.bias = torch.nn.Parameter(bias)


def test_parts_are_put_together_with_weights_that_layers_share(hvdtrain: Callable[..., int], tmp_path: Path) -> None:
    from hvdtrain.parallel.torch.cuts import Cut, mark, part_of
    from hvdtrain.train.torch.parts import Saved, load_model, part_of_rank

    whole = Tied(torch.randn(7, 3), torch.randn(5))
    cut = Cut("tensor", 0)
    checkpoints = run_with(tmp_path)
    checkpoints.begin(3)
    ranks = []
    for rank in range(2):
        model = Tied(part_of(whole.table.weight.detach(), cut, 2, rank), whole.bias.detach())
        mark(model.table.weight, cut)
        coordinates = {"tensor": rank, "embedding": 0, "data": 0, "pipeline": 0}
        groups: Any = SimpleNamespace(coordinates=coordinates, grid=SimpleNamespace(tensor=2))
        part = part_of_rank(model, {}, groups, sharded=False)
        checkpoints.write_part(3, rank, lambda path, part=part: files.save(part, path / "part.pt"))
        ranks.append((model, groups))
    checkpoint = checkpoints.write(3, STATE, lambda path: None, parts=range(2))
    assert hvdtrain("export", "-o", "m.pt") == 0
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert list(found) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(found[name], value), name
    for rank, (model, groups) in enumerate(ranks):
        model.table.weight.data.zero_()
        load_model(model, Saved(checkpoint), groups)
        assert torch.equal(model.output.weight, part_of(whole.table.weight, cut, 2, rank))


# --- list ------------------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed(
    hvdtrain: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run_with(tmp_path)
    assert hvdtrain("list") == 0
    assert capsys.readouterr() == ("", "digits/20260101T000000Z-abcdef has no checkpoints\n")
    checkpoints.write(10, STATE, lambda path: save(path, 10))
    (checkpoints.folder / "step-0000000010 (copy)").mkdir()
    lose_a_part(tmp_path)
    assert hvdtrain("list", "digits") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "epochs", "saved", "size", "parts", "files"]
    assert [line.split()[:2] for line in lines[1:]] == [["10", "1.75"], ["30", "1.75"]]
    assert [line.split(maxsplit=7)[-2:] for line in lines[1:]] == [
        ["1", "whole"],
        ["2", "damaged: part-00001/part.pt is missing"],
    ]
    assert hvdtrain("list", "--format", "json") == 0
    first, second = json.loads(capsys.readouterr().out)
    folder = checkpoints.folder / "step-0000000010"
    assert first == {
        "folder": str(folder),
        "step": 10,
        "epochs": 1.75,
        "saved": (folder / "manifest.json").stat().st_mtime,
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "parts": 1,
        "fault": None,
    }
    assert second["fault"] == "part-00001/part.pt is missing"
    assert hvdtrain("list", "nothing") == 2


# --- real runs -------------------------------------------------------------------------------------------------------

HVDTRAIN = "from hvdtrain.cli.main import main; main()"
MODEL = """
import torch
from torch import nn

def layers():
    return [lambda: nn.Linear(12, 16), nn.Tanh, lambda: nn.BatchNorm1d(16), lambda: nn.Linear(16, 16), nn.Tanh,
            lambda: nn.Linear(16, 3)]

def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(157, 12, generator=generator), torch.randint(3, (157,), generator=generator)
"""
TASK = f"""{MODEL}
from hvdtrain.train.torch import Task

class Layered(Task):
    def layers(self):
        return layers()

    def optimizer(self, model, lr):
        return torch.optim.Adam(model.parameters(), lr)

    def train_data(self):
        return torch.utils.data.TensorDataset(*data())

    eval_data = train_data

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
LOSS = f"""{WITHOUT_HOROVOD}{MODEL}
model = nn.Sequential(*(make() for make in layers())).eval()
model.load_state_dict(torch.load(sys.argv[1], weights_only=True))
values, labels = data()
print(float(nn.functional.cross_entropy(model(values), labels)))
"""
PREDICT = f"""{WITHOUT_HOROVOD}
import keras
import numpy as np

model = keras.models.load_model(sys.argv[1])
images, labels = (np.load(sys.argv[2])[name] for name in ("images", "labels"))
print((model.predict(images, verbose=0).argmax(1) == labels).mean())
"""


def python(folder: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launch(folder: Path, **spec: Any) -> None:
    settings = {
        "processes": 2,
        "oversubscribe": True,
        "hosts": {"list": ["localhost:2"]},
        "env": {"set": {"OMP_NUM_THREADS": 1}},
    }
    (folder / "job.yaml").write_text(json.dumps(settings | spec))
    python(folder, HVDTRAIN, "launch", "job.yaml")


def last_metrics(folder: Path) -> dict[str, float]:
    records = (folder / "runs" / "job" / "latest" / "metrics.jsonl").read_text().splitlines()
    return dict(json.loads(records[-1]))


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_pipelines_export_is_the_model_that_was_evaluated(tmp_path: Path) -> None:
    (tmp_path / "layered.py").write_text(TASK)
    launch(
        tmp_path,
        task="layered:Layered",
        options={"epochs": 1, "batch_size": 8, "lr": 0.02},
        checkpoint={"every_steps": 10},
        parallelism={"pipeline": 2, "micro_batches": 2},
        controller="gloo",
    )
    python(tmp_path, HVDTRAIN, "checkpoint", "export", "job", "--output", "model.pt")
    checkpoint = tmp_path / "runs" / "job" / "latest" / "checkpoints" / "step-0000000020"
    parts = [torch.load(checkpoint / part_name(rank) / "part.pt")["model"] for rank in range(2)]
    assert all(parts)
    expected = parts[0] | parts[1]
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert float(python(tmp_path, LOSS, "model.pt")) == pytest.approx(last_metrics(tmp_path)["eval_loss"], rel=1e-5)
    listed = json.loads(python(tmp_path, HVDTRAIN, "checkpoint", "list", "--format", "json"))
    assert [(each["step"], each["epochs"], each["parts"], each["fault"]) for each in listed] == [
        (10, pytest.approx(80 / 157), 2, None),
        (20, 1, 2, None),
    ]


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_keras_export_predicts_as_it_was_evaluated(tmp_path: Path) -> None:
    import numpy as np

    from hvdtrain.tasks import digits_data

    launch(
        tmp_path,
        task="hvdtrain.tasks.digits_keras:Digits",
        options={"epochs": 1, "batch_size": 64, "lr": 0.05},
        controller="mpi",
    )
    python(tmp_path, HVDTRAIN, "checkpoint", "export", "--output", "digits.keras")
    _, _, images, labels = digits_data.load()
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    accuracy = float(python(tmp_path, PREDICT, "digits.keras", "data.npz"))
    assert accuracy > 0.3
    assert accuracy == pytest.approx(last_metrics(tmp_path)["eval_accuracy"], abs=1e-6)
