"""What docs/parallelism.md shows, done."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "parallelism.md").read_text()


def hvdtrain(*arguments: str, folder: Path = ROOT / "configs") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdtrain", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def test_the_picture_of_the_grid() -> None:
    lines = PAGE.split("--dry-run\n", 1)[1].split("```")[0].splitlines()
    assert len(lines) == 3
    output = hvdtrain("launch", "gpt-tensor2-data2-torch.yaml", "--dry-run").stdout
    at = output.splitlines().index(lines[0])
    assert output.splitlines()[at : at + 3] == lines


def test_degrees_that_do_not_fit(tmp_path: Path) -> None:
    job = {"command": ["true"], "processes": 6, "parallelism": {"tensor": 4}, "oversubscribe": True}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = hvdtrain("launch", "job.yaml", "--dry-run", folder=tmp_path)
    assert done.returncode == 2
    shown = re.search(r"```\n(error: parallelism.*?)```", PAGE, re.DOTALL)
    assert shown
    assert done.stderr == shown[1]


def block(kind: str, beginning: str) -> str:
    (found,) = re.findall(rf"```{kind}\n({beginning}.*?)```", PAGE, re.DOTALL)
    return str(found)


def train(folder: Path, name: str) -> None:
    done = hvdtrain("launch", f"{name}.yaml", "--runs", "runs", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr
    records = (folder / "runs" / name / "latest" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, records) if "loss" in record]
    assert losses[-1] < losses[0] / 1.5


@pytest.mark.processes
def test_the_sequence_of_layers_trains_as_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "wine.py").write_text(block("python", "import torch\nfrom sklearn"))
    (tmp_path / "wine.yaml").write_text(block("yaml", "task: wine"))
    train(tmp_path, "wine")


@pytest.mark.processes
def test_layers_in_parts_train_and_are_loaded_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "wine.py").write_text(block("python", "import torch\nfrom sklearn"))
    (tmp_path / "wide.py").write_text(block("python", "from torch import nn\nfrom wine"))
    (tmp_path / "wide.yaml").write_text(block("yaml", "task: wide"))
    train(tmp_path, "wide")
    (export,) = re.findall(r"`hvdtrain (checkpoint export wide .*?)`", PAGE)
    done = hvdtrain(*export.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    load = block("python", "import torch\nfrom wide") + "print(*net.state_dict())"
    loaded = subprocess.run([sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert loaded.returncode == 0, loaded.stderr
    assert {"mlp.up.weight", "mlp.down.weight"} <= set(loaded.stdout.split())
