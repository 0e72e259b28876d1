"""What a rank keeps of a model that several share, in bytes; and a model that is too large for one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel_memory_cases import HIDDEN, LIMIT_MB, WIDTH
from real_processes import CROWDED, python_on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
CASES = str(HERE / "parallel_memory_cases.py")
RANKS = 4
MATRICES = 2 * WIDTH * HIDDEN
PARAMETERS = 4 * (MATRICES + WIDTH + HIDDEN)
AT_MOST = 0.3


def on_ranks(folder: Path, case: str) -> list[dict[str, Any]]:
    python_on_ranks("gloo", RANKS, folder, CASES, str(folder), case, str(RANKS), env=CROWDED, timeout=300)
    return [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(RANKS)]


def test_a_sharded_optimizer_keeps_a_quarter_of_the_state(tmp_path: Path) -> None:
    for found in on_ranks(tmp_path, "sharded"):
        assert found["parameters"] == PARAMETERS
        assert found["state"] <= AT_MOST * 2 * PARAMETERS
    # And a few numbers of steps.
    total = sum(json.loads(path.read_text())["state"] for path in tmp_path.glob("sharded-*.json"))
    assert 2 * PARAMETERS <= total <= 2 * PARAMETERS + 1000


def test_a_model_that_is_too_large_for_one_trains_on_four_under_the_same_limit(tmp_path: Path) -> None:
    assert 4 * PARAMETERS > LIMIT_MB * 10**6
    command = [sys.executable, CASES, str(tmp_path), "limited", "1"]
    subprocess.run(command, env=CROWDED, check=True, timeout=300)
    alone = json.loads((tmp_path / "limited-0.json").read_text())
    assert "can't allocate memory" in alone["error"]
    whole_bias = 4 * WIDTH
    for found in on_ranks(tmp_path, "limited"):
        assert found["parameters"] == (PARAMETERS - whole_bias) // RANKS + whole_bias
        assert found["parameters"] + found["state"] <= AT_MOST * 3 * PARAMETERS
