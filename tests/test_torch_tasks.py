"""The built-in PyTorch tasks, and the one that docs/tasks.md shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain import contract

ROOT = Path(__file__).parents[1]
PATIENCE_S = 280


def launch(spec: Path, runs: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The run's records and its output."""
    command = [sys.executable, "-m", "hvdtrain", "launch", str(spec), "--runs", str(runs), *options]
    done = subprocess.run(
        command,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    (metrics,) = runs.glob(f"*/latest/{contract.METRICS_FILE}")
    return [json.loads(line) for line in metrics.read_text().splitlines()], done.stdout


def test_the_digits_are_split_by_class_and_once_for_all() -> None:
    from hvdtrain.tasks import digits_data

    train_images, train_labels, test_images, test_labels = digits_data.load()
    assert train_images.shape == (1437, 8, 8, 1)
    assert test_images.shape == (360, 8, 8, 1)
    assert (train_images.dtype, train_labels.dtype) == (np.float32, np.int64)
    assert (train_images.min(), train_images.max()) == (0, 1)
    assert all(34 <= count <= 38 for count in np.bincount(test_labels, minlength=10))
    assert np.array_equal(test_images, digits_data.load()[2])
    # An image that is on both sides would make the test worthless.
    train = {image.tobytes() for image in train_images}
    assert not any(image.tobytes() in train for image in test_images)
    assert len(train_labels) == 1437


@pytest.fixture(scope="module")
def gpt() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("horovod")
    from hvdtrain.parallel.grid import Grid
    from hvdtrain.parallel.groups import ProcessSets
    from hvdtrain.tasks.gpt import ByteGPT, GPTOptions

    task = ByteGPT(GPTOptions(bytes=200_000, context=32, width=16, heads=2, layers=2))
    task.groups = ProcessSets(Grid()).groups(0)
    return task


def test_the_gpts_text_is_pythons_library_and_no_file_is_on_both_sides(gpt: Any) -> None:
    (train,), (evaluation,) = gpt.train_data().tensors, gpt.eval_data().tensors
    assert train.shape[1] == evaluation.shape[1] == 33
    # Each piece but its first byte: together the text, without what doesn't fill a piece.
    text = train[:, 1:].numpy().tobytes()
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "__future__.py").read_bytes()[1:5000] in text
    of_evaluation = evaluation[:, 1:].numpy().tobytes()
    assert of_evaluation[:200] not in text
    assert 150_000 < len(text) + len(of_evaluation) <= 200_000


def test_the_gpt_sees_no_later_bytes(gpt: Any) -> None:
    import torch

    torch.manual_seed(0)
    model = gpt.model().eval()
    text = torch.randint(256, (3, 32))
    changed = text.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    with torch.no_grad():
        before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=(0, 2)).min() > 1e-6


def test_the_gpt_knows_nothing_at_first(gpt: Any) -> None:
    import torch

    torch.manual_seed(0)
    bits = gpt.metrics(gpt.model(), gpt.eval_data()[torch.arange(16)])["bits_per_byte"]
    assert bits.shape == (16,)
    assert bits.mean().item() == pytest.approx(8, abs=0.2)


def test_the_gpts_parts_are_cut_from_the_whole_of_one_process(gpt: Any) -> None:
    import copy

    import torch

    from hvdtrain.parallel.grid import Grid
    from hvdtrain.parallel.groups import ProcessSets
    from hvdtrain.parallel.torch.cuts import cut_of, whole_of

    def model(task: Any) -> dict[str, torch.nn.Parameter]:
        torch.manual_seed(0)
        return dict(task.model().named_parameters())

    parts = []
    for rank in range(2):
        task = copy.copy(gpt)
        task.groups = ProcessSets(Grid(tensor=2)).groups(rank)
        parts.append(model(task))
    whole = model(gpt)
    assert {name for name in whole if cut_of(whole[name])} >= {"0.bytes.weight", "1.feed.up.bias", "3.logits.weight"}
    for name, parameter in whole.items():
        pieces = [part[name].detach() for part in parts]
        cut = cut_of(parameter)
        assert torch.equal(whole_of(pieces, cut) if cut else pieces[1], parameter), name
    for name in ("0.bytes.weight", "0.positions", "3.logits.weight"):
        assert whole[name].std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"width": 30}, "multiple of heads"), ({"context": 1}, "greater than or equal to 2")],
)
def test_bad_options_of_the_gpt(options: dict[str, int], message: str) -> None:
    pytest.importorskip("torch")
    from hvdtrain.tasks.gpt import GPTOptions

    with pytest.raises(ValueError, match=message):
        GPTOptions(**options)  # type: ignore[arg-type]


@pytest.mark.processes
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_digits_reach_their_accuracy(tmp_path: Path, controller: str) -> None:
    spec = ROOT / "configs" / "digits-torch.yaml"
    records, output = launch(spec, tmp_path, "--set", f"controller={controller}")
    assert records[-1]["eval_accuracy"] >= 0.97
    assert f"eval_accuracy {records[-1]['eval_accuracy']:.4f}" in output.splitlines()[-2]


@pytest.mark.processes
def test_the_gpt_learns(tmp_path: Path) -> None:
    """A fifth of the config's text."""
    records, _ = launch(ROOT / "configs" / "gpt-bytes-torch.yaml", tmp_path, "--set", "options.bytes=240000")
    before, after = (record["eval_bits_per_byte"] for record in records if "eval_bits_per_byte" in record)
    assert before == pytest.approx(8, abs=0.2)
    assert after < 4


@pytest.mark.processes
def test_the_documented_task_trains_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text()
    blocks = dict(re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL))
    (tmp_path / "tumours.py").write_text(blocks["python"])
    (tmp_path / "tumours.yaml").write_text(blocks["yaml"])
    records, output = launch(tmp_path / "tumours.yaml", tmp_path / "runs")
    assert records[-1]["eval_accuracy"] > 0.95
    assert "tumours:Tumours on 2 workers" in output
