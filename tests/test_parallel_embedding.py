"""Embedding tables that are cut over ranks, on four real ranks. parallel_embedding_cases.py holds what they do."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_processes import CROWDED, python_on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
CASES = HERE / "parallel_embedding_cases.py"
RANKS = 4

Results = list[dict[str, Any]]


@pytest.fixture(params=["gloo", "mpi"], scope="module")
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def results_of(controller: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """What each rank's cases returned, by framework: one launch each."""

    @functools.cache
    def run(framework: str) -> Results:
        folder = tmp_path_factory.mktemp(f"{framework}-{controller}")
        python_on_ranks(controller, RANKS, folder, str(CASES), framework, str(folder), env=CROWDED, timeout=500)
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]

    return run


both_frameworks = pytest.mark.parametrize("framework", ["torch", "keras"])


@both_frameworks
def test_ranks_together_are_one_table(results_of: Callable[[str], Results], framework: str) -> None:
    """Initial rows, vectors and gradients of every number of samples, mode and grid, to 1e-10 in float64."""
    results = results_of(framework)
    names = [name for name in results[0] if name.startswith("embedding")]
    assert len(names) == 2 * (4 + 2) * {"torch": 2, "keras": 3}[framework] + {"torch": 0, "keras": 2 * 3}[framework]
    for rank, name in ((rank, name) for rank in range(RANKS) for name in names):
        found = results[rank][name]
        assert max(found["initial"], found["forward"], found["backward"]) < 1e-10, (rank, name, found)


def test_sparse_gradients_are_sparse_and_the_parameter_is_marked(results_of: Callable[[str], Results]) -> None:
    for name, found in results_of("torch")[2].items():
        if name.startswith("embedding"):
            assert found["is_sparse"] == name.endswith("sparse")
            assert found["marked"]


def test_keras_variables_are_marked(results_of: Callable[[str], Results]) -> None:
    assert all(found["marked"] for name, found in results_of("keras")[2].items() if name.startswith("embedding"))


@both_frameworks
def test_bfloat16_travels_as_it_is(results_of: Callable[[str], Results], framework: str) -> None:
    types = {"torch": "torch.bfloat16 torch.bfloat16", "keras": "bfloat16 float32"}[framework]
    assert [result["bfloat16"] for result in results_of(framework)] == [{"forward": 0, "dtype": types}] * RANKS


@both_frameworks
def test_ids_out_of_range_are_told(results_of: Callable[[str], Results], framework: str) -> None:
    errors = results_of(framework)[1]["errors"]
    assert "id 17 for table 1, which has 17 rows" in errors["range"]
    assert "for table 0, which has 3 rows" in errors["negative"]
    assert "for 4 tables and mode=None" in errors["fields"]
    if framework == "torch":
        assert "sample 2 has id 17" in errors["range"]
        assert "float64 of shape [3, 4]" in errors["type"]
    else:
        assert "id 17 for table 1, which has 17 rows" in errors["graph"]


def test_torch_draws_long_tables_in_pieces_as_at_once(results_of: Callable[[str], Results]) -> None:
    assert results_of("torch")[3]["long"] == {"rows": 0, "next": 0}


def test_several_lookups_in_one_graph_keep_apart(results_of: Callable[[str], Results]) -> None:
    assert max(result["two layers in a graph"]["apart"] for result in results_of("keras")) < 1e-10


def test_keras_fit_trains_as_with_one_table(results_of: Callable[[str], Results]) -> None:
    for result in results_of("keras"):
        assert result["fit"]["apart"] < 1e-10
        assert result["fit"]["moved"] > 0.1
        assert result["fit"]["validated"]


def test_a_saved_keras_model_has_all_rows_on_one_rank(results_of: Callable[[str], Results]) -> None:
    assert results_of("keras")[0]["fit"]["loaded"] == [[31, 5]]


def test_keras_makes_long_tables_in_blocks(results_of: Callable[[str], Results]) -> None:
    assert all(result["blocks"] == {"apart": 0, "differ": True} for result in results_of("keras"))
