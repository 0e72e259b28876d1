"""The grid of ranks: degrees that fit, what is said of those that don't, and groups. No process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planning import plan_on

from hvdtrain.errors import UsageError
from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.groups import ALONE, ProcessSets
from hvdtrain.plan.grid import make_grid, what_sharding_does
from hvdtrain.spec.models import JobSpec, Parallelism


@pytest.mark.parametrize(
    ("degrees", "processes", "grid"),
    [
        ({}, 6, Grid(data=6)),
        ({"tensor": 2, "pipeline": 2}, 8, Grid(tensor=2, pipeline=2, data=2)),
        ({"tensor": 2, "data": 3}, 6, Grid(tensor=2, data=3)),
        ({"embedding": 4}, 4, Grid(embedding=4)),
    ],
)
def test_degrees_that_fit(degrees: dict[str, Any], processes: int, grid: Grid) -> None:
    assert make_grid(Parallelism(**degrees), processes) == grid


@pytest.mark.parametrize(
    ("degrees", "processes", "fault", "fix"),
    [
        (
            {"tensor": 4}, 6, "6 processes can't be divided by tensor 4",
            "ask for 4 or 8 processes, or change the degrees",
        ),
        (
            {"tensor": 2, "pipeline": 3}, 8, "8 processes can't be divided by pipeline 3 x tensor 2 = 6",
            "ask for 6 or 12 processes, or change the degrees",
        ),
        (
            {"tensor": 2, "data": 2}, 6, "data 2 x tensor 2 = 4, and there are 6 processes",
            "ask for 4 processes, or leave data: auto, which is 3",
        ),
        (
            {"tensor": 2, "data": 2}, 5, "data 2 x tensor 2 = 4, and there are 5 processes",
            "ask for 4 processes, or change the degrees",
        ),
        ({"data": 2}, 3, "data 2, and there are 3 processes", "ask for 2 processes, or leave data: auto, which is 3"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit(degrees: dict[str, Any], processes: int, fault: str, fix: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_grid(Parallelism(**degrees), processes)
    assert (raised.value.what, raised.value.fix) == (f"parallelism: {fault}", fix)


def test_what_is_said_of_a_sharded_optimizer() -> None:
    assert what_sharding_does(Grid(tensor=2, data=4)) == (
        "shard_optimizer: each rank keeps 1/4 of the optimizer's state of its part of the model"
    )
    divided = Parallelism(tensor=2, shard_optimizer=True)
    job = JobSpec(name="job", task="a:B", directory=Path("/jobs"), processes=4, parallelism=divided)
    assert what_sharding_does(Grid(tensor=2, data=2)) in plan_on(job, 4).reasons
    assert "no effect" in what_sharding_does(Grid(tensor=2, pipeline=2))


def test_a_group_of_one_has_nobody_to_meet() -> None:
    """Horovod would take all ranks in the place of no process set."""
    groups = ProcessSets(Grid(tensor=4)).groups(2)
    assert groups.tensor.process_set.process_set_id == 0
    for group in (groups.data, ALONE):
        assert group.size == 1
        with pytest.raises(UsageError, match="is alone in its group"):
            group.process_set  # noqa: B018
