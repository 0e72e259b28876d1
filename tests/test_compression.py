"""Compressed gradients on four real ranks, and on two hosts with a slow link. compression_cases.py is what they do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_cases import DTYPES, ENTRIES, EXTREMES, GROUPS, KINDS, RATIO, SIZES, STEPS, gradient
from namespace_hosts import Cluster
from real_processes import CROWDED, horovodrun, python_on_ranks

from hvdtrain.errors import UsageError
from hvdtrain.parallel.torch.compression import make_reducer
from hvdtrain.parallel.torch.compression_topk import TopK, largest

HERE = Path(__file__).parent
CASES = HERE / "compression_cases.py"
RANKS = 4
PATIENCE_S = 300
# Of the sum of magnitudes: two roundings to nearest, of a rank's value and of the sum.
ROUNDING = {"none": 1e-6, "fp16": 2**-10, "bf16": 2**-7, "auto": 2**-7, "float64": 1e-15, "int64": 0}
ROUNDING |= {"float16": ROUNDING["fp16"], "bfloat16": ROUNDING["bf16"]}

Results = list[dict[str, Any]]


def results_in(folder: Path, ranks: int) -> Results:
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.mark.processes
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_on_four_ranks(controller: str, tmp_path: Path) -> None:
    checks: list[Callable[[Results], None]] = [sums, types, extremes, feedback, learns, auto]
    names = [check.__name__ for check in checks]
    words = [str(CASES), str(tmp_path), str(RANKS), *names]
    python_on_ranks(controller, RANKS, tmp_path, *words, env=CROWDED, timeout=PATIENCE_S)
    results = results_in(tmp_path, RANKS)
    for check in checks:
        check([result[check.__name__] for result in results])


def members(group: str, rank: int) -> list[int]:
    return list(range(RANKS)) if group == "replicas" else [other for other in range(RANKS) if (other - rank) % 2 == 0]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def is_sum(found: torch.Tensor, gradients: list[torch.Tensor], rounding: float) -> bool:
    due = torch.stack([one.double() for one in gradients])
    return bool(((found.double() - due.sum(0)).abs() <= rounding * due.abs().sum(0)).all())


def sums(results: Results) -> None:
    """In groups of four and of two, also of one element and of none."""
    assert results[0].keys() == {(kind, group, size) for kind in KINDS for group in GROUPS for size in SIZES}
    for rank, (kind, group, size) in ((rank, key) for rank in range(RANKS) for key in results[0]):
        ranks = members(group, rank)
        found = results[rank][kind, group, size]
        assert same_bits(found, results[ranks[0]][kind, group, size]), (kind, group, size)
        gradients = [gradient(other, size) for other in ranks]
        k = -(-size // 100)
        if kind == "topk" and k * len(ranks) < size:
            gradients = [torch.where(one.abs() >= one.abs().topk(k).values.min(), one, 0.0) for one in gradients]
        assert is_sum(found, gradients, ROUNDING.get(kind, 1e-6)), (kind, group, size)


def types(results: Results) -> None:
    """What isn't float32 keeps its own precision with every kind."""
    for rank, kind, dtype in ((rank, kind, dtype) for rank in range(RANKS) for kind in KINDS for dtype in DTYPES):
        found = results[rank][kind, dtype]
        assert found.dtype == getattr(torch, dtype)
        assert same_bits(found, results[0][kind, dtype]), (kind, dtype)
        gradients = [gradient(other, 1001, dtype=dtype) for other in range(RANKS)]
        assert is_sum(found, gradients, ROUNDING[dtype]), (kind, dtype)


def extremes(results: Results) -> None:
    due = {kind: torch.tensor(EXTREMES) for kind in KINDS}
    due["fp16"] = torch.tensor(EXTREMES).half().float()
    assert due["fp16"].tolist()[1:] == [float("inf")] * 4 + [1, 0]
    # One entry is sent, and no number counts as the largest.
    due["topk"] = torch.tensor([float("nan"), *[0.0] * (len(EXTREMES) - 1)])
    for kind, result in ((kind, result) for kind in KINDS for result in results):
        torch.testing.assert_close(result[kind], due[kind], rtol=2**-8, atol=0, equal_nan=True)
        assert same_bits(result[kind], results[0][kind]), kind


def feedback(results: Results) -> None:
    """Nothing is lost: what was applied and what is left are all gradients; who resumes goes on as if never stopped."""
    total = sum(gradient(rank, ENTRIES, step).double() for rank in range(RANKS) for step in range(STEPS))
    found = results[0]["applied"] + sum(result["left"] for result in results)
    torch.testing.assert_close(found, total, rtol=0, atol=1e-3)  # of sums of 100s in float32
    for result in results:
        assert max(result["sent"]) <= RANKS * RATIO * ENTRIES
        assert min(result["sent"]) >= RATIO * ENTRIES
        assert result["left"].abs().max() > 0
        assert same_bits(result["applied"], results[0]["applied"])
        assert same_bits(result["went on"][0], result["went on"][1])
        assert result["dropped"]


def learns(results: Results) -> None:
    """Weights end within a hundredth of the true ones, whatever the kind; without top-k's residuals they don't."""
    for result in results:
        assert result == results[0]
        assert max(result.values()) < 0.01, result


def auto(results: Results) -> None:
    """Among four, small buckets go as they are: two collectives take longer than one."""
    for result in results:
        # Of the groups of two each has times of its own.
        assert result["why"]["replicas"] == results[0]["why"]["replicas"]
        assert result["wrong"] == 0
        assert set(result["chosen"]) == set(GROUPS)
        assert result["chosen"]["replicas"] == "none", result["why"]


@pytest.mark.processes
@pytest.mark.hosts
@pytest.mark.timeout(PATIENCE_S)
def test_auto_compresses_over_a_slow_link(cluster: Cluster, tmp_path: Path) -> None:
    for host in cluster.hosts[:2]:
        host.limit(100)
    words = [sys.executable, str(CASES), str(tmp_path), "2", "auto_large"]
    command = [*horovodrun("gloo", 2), *words]
    command[command.index("localhost:2")] = "h1:1,h2:1"
    done = cluster.hosts[0].run(
        [*command[:1], "--network-interfaces", "eth0", *command[1:]],
        cwd=tmp_path, env=CROWDED, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    for result in results_in(tmp_path, 2):
        assert result["auto_large"]["chosen"] == dict.fromkeys(GROUPS, "bf16"), result
        assert "compression: bf16" in result["auto_large"]["why"]["data"]
        assert result["auto_large"]["wrong"] == 0


@pytest.mark.parametrize("what", ["normal", "equal", "zeros", "few", "nan"])
def test_the_largest_are_those_of_a_whole_selection(what: str) -> None:
    values = torch.randn(200_001, generator=torch.Generator().manual_seed(1))
    values = {
        "normal": values,
        "equal": values.sign(),
        "zeros": values * 0,
        "few": values * (values > 3),
        "nan": values.where(values < 3, float("nan")),
    }[what]
    found = largest(values, 2000)
    assert len(set(found.tolist())) == 2000
    due = values.abs().topk(2000).values
    torch.testing.assert_close(values[found].abs().sort(descending=True).values.nan_to_num(9), due.nan_to_num(9))


def test_what_cannot_be_used_is_told() -> None:
    with pytest.raises(UsageError, match="no compression 'gzip'"):
        make_reducer("gzip")
    with pytest.raises(UsageError, match=r"ratio is 1\.5"):
        TopK(1.5)
