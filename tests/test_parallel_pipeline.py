"""Pipelines for real: four processes, Gloo and MPI, against one process with the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_processes import CROWDED, python_on_ranks

from hvdtrain.parallel.grid import Grid

pytestmark = pytest.mark.processes

CASES = Path(__file__).parent / "parallel_pipeline_cases.py"


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize(
    "grid", [Grid(pipeline=4), Grid(pipeline=2, data=2)], ids=["pipeline 4", "pipeline 2 x data 2"]
)
def test_a_pipeline_does_what_one_process_does(grid: Grid, controller: str, tmp_path: Path) -> None:
    """Losses, gradients, running statistics and evaluation; the cases say what of."""
    output = python_on_ranks(controller, 4, tmp_path, str(CASES), grid.to_text(), env=CROWDED, timeout=280)
    assert all(f"RANK {rank} DONE" in output for rank in range(4))
