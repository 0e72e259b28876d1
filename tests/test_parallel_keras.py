"""Tensor parallelism, grids and compression for Keras on four real ranks. parallel_keras_cases.py has what they do."""

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
CASES = HERE / "parallel_keras_cases.py"
RANKS = 4
# Under MPI what differs by controller: each kind of collective, each kind of process set, in a graph and eagerly.
MPI_CASES = [
    "layer: embedding, tensor 2 x data 2, in a graph",
    "layer: attention, tensor 2 x data 2, eagerly",
    "layer: column in 3 blocks, tensor 4, in a graph",
    "layer: cross-entropy, tensor 4, in a graph",
    "collectives",
    "fit: clipped, tensor 2 x data 2",
    "compression: bf16",
    "compression: topk",
    "constants_in_a_graph",
    "same_layer_twice",
    "tables_case",
]

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """What each rank's cases returned, by controller: one launch each."""

    @functools.cache
    def run(controller: str) -> Results:
        folder = tmp_path_factory.mktemp(f"keras-{controller}")
        wanted = MPI_CASES if controller == "mpi" else []
        python_on_ranks(controller, RANKS, folder, str(CASES), str(folder), *wanted, env=CROWDED, timeout=500)
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]

    return run


@pytest.fixture(params=["gloo", "mpi"])
def results(request: pytest.FixtureRequest, results_of: Callable[[str], Results]) -> Results:
    return results_of(str(request.param))


@pytest.fixture
def under_gloo(results_of: Callable[[str], Results]) -> Results:
    return results_of("gloo")


def named(results: Results, prefix: str) -> list[tuple[str, dict[str, Any]]]:
    """All ranks' results of the cases that begin so; there must be some."""
    found = [(f"rank {rank}: {name}", one[name]) for rank, one in enumerate(results) for name in one]
    found = [(name, case) for name, case in found if name.partition(": ")[2].startswith(prefix)]
    assert len(found) >= RANKS
    return found


def test_layers_are_their_twins(results: Results) -> None:
    """Whole initial values, outputs and gradients, in float64."""
    for name, case in named(results, "layer: "):
        assert case["greatest"] > 0.1, name
        assert case["initial"] <= 1e-10, name
        assert case["output"] <= 1e-10, name
        assert case["gradients"] <= 1e-10, name


def test_variables_say_how_they_are_cut(under_gloo: Results) -> None:
    expected = {"column": 2, "column in 3 blocks": 2, "row": 1, "embedding": 1, "mlp": 3, "attention": 3}
    for layer, cuts in expected.items():
        for name, case in named(under_gloo, f"layer: {layer},"):
            assert case["cut"] == cuts, name


def test_collectives_have_the_backward_pass_of_the_maths(results: Results) -> None:
    for name, case in named(results, "collectives: "):
        assert case["worst"] <= 1e-10, name


def test_one_layer_in_two_places_of_a_graph_does_not_mix_them_up(results: Results) -> None:
    for name, case in named(results, "same_layer_twice"):
        assert case["worst"] <= 1e-10, name


def test_a_rank_with_constants_takes_part_in_every_step(results: Results) -> None:
    for name, case in named(results, "constants_in_a_graph"):
        assert case["worst"] == 0, name


def test_bfloat16_activations_travel(under_gloo: Results) -> None:
    for name, case in named(under_gloo, "bfloat16_layer"):
        assert case == {"dtype": "bfloat16", "gradients": ["float32"]}, name


def test_dropout_agrees_where_activations_do(under_gloo: Results) -> None:
    together, cut = ([result["dropout_case"][kind] for result in under_gloo] for kind in ("together", "cut"))
    # Ranks 0 and 1 share layers, as do 2 and 3.
    assert together[0] == together[1] != together[2] == together[3]
    assert len({tuple(mask) for mask in cut}) == RANKS


def test_fit_on_a_grid_is_fit_in_one_process(results: Results) -> None:
    """Clipped by the norm over all parts, accumulated, loss-scaled, eagerly, several steps in a call."""
    for name, case in named(results, "fit: "):
        assert case["moved"] > 0.05, name
        assert case["from_one_process"] <= 1e-4, name
        assert case["same_everywhere"], name


def test_cut_tables_are_summed_over_the_data_groups(results: Results) -> None:
    for name, case in named(results, "tables_case"):
        assert max(case.values()) <= 1e-6, name


@pytest.mark.parametrize(("kind", "rounding"), [("bf16", 2**-7), ("none", 1e-6), ("topk", None), ("auto", 2**-7)])
def test_compressed_gradients_are_right_and_the_same_on_all_ranks(
    under_gloo: Results, kind: str, rounding: float | None
) -> None:
    for name, case in named(under_gloo, f"compression: {kind}"):
        assert case["same_everywhere"], name
        assert rounding is None or case["off"] <= rounding, name
        assert kind != "bf16" or case["off"] > 1e-5, name  # It did travel as bfloat16.


@pytest.mark.parametrize("kind", ["bf16", "topk"])
def test_compression_goes_by_mpi_too(results_of: Callable[[str], Results], kind: str) -> None:
    """The same bits as by Gloo: the sums have an order of their own."""
    for (name, ours), (_, theirs) in zip(
        named(results_of("mpi"), f"compression: {kind}"), named(results_of("gloo"), f"compression: {kind}"), strict=True
    ):
        assert ours == theirs, name


@pytest.mark.parametrize(("kind", "rounding"), [("none", 1e-6), ("topk", 1e-6), ("bf16", 2**-6), ("auto", 2**-6)])
def test_sparse_gradients_are_gathered_under_every_compression(under_gloo: Results, kind: str, rounding: float) -> None:
    for name, case in named(under_gloo, f"rows: {kind}"):
        assert case["off"] <= rounding, name
        assert case["values"] == "float32", name
        assert kind != "bf16" or case["off"] > 1e-5, name


def test_topk_loses_nothing(under_gloo: Results) -> None:
    for name, case in named(under_gloo, "topk_feeds_back"):
        assert case["first"] <= 1e-6, name
        assert case["lost"] <= 1e-5, name
        assert case["kept"] > 0.1, name


def test_auto_takes_what_is_faster_for_the_slowest_rank(under_gloo: Results) -> None:
    for name, case in named(under_gloo, "auto_case"):
        assert case == {"slow none": True, "slow bf16": True}, name


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16", "topk", "auto"])
def test_training_converges_under_every_compression(under_gloo: Results, kind: str) -> None:
    for name, case in named(under_gloo, f"learning: {kind}"):
        assert case["share"] < 1e-3, name
        assert case["same_everywhere"], name


REFUSALS = {
    "units": "ColumnParallelDense can't share out 9 units evenly among 2 ranks",
    "blocks": "can't share out 8 units in 3 blocks evenly among 2 ranks\n  fix: let their number be a multiple of 6",
    "features": "RowParallelDense can't share out 7 input features evenly among 2 ranks",
    "heads": "ParallelAttention can't share out 3 heads evenly among 2 ranks",
    "width": "ParallelAttention can't share out 10 features among 4 heads",
    "clipnorm": "clipnorm would clip each rank's part of a variable by the part's own norm",
    "lamb": "Lamb needs whole variables and all of them, and each rank has parts",
    "built": "has its variables already, which don't say what they are parts of",
    "both": "both process_set and parallel say whom to average over",
    "ratio": "top-k's ratio is 0",
    "allreduce": "this compression is no step before Horovod's allreduce",
}


@pytest.mark.parametrize("request_", REFUSALS)
def test_what_can_not_work_is_refused(under_gloo: Results, request_: str) -> None:
    for result in under_gloo:
        assert result["refusals"].keys() == REFUSALS.keys()
        assert REFUSALS[request_] in result["refusals"][request_]
