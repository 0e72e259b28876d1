"""The grid of ranks that a job spec asks for, and its picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from hvdtrain.errors import UsageError
from hvdtrain.parallel.grid import AXES, Grid
from hvdtrain.plan.placement import Placement
from hvdtrain.spec.models import Parallelism

_MOST_LINES = 32


def make_grid(wanted: Parallelism, processes: int) -> Grid:
    """The grid of so many processes.

    Raises:
        UsageError: the product of the degrees isn't their number; the message shows the sum.
    """
    degrees = {axis: getattr(wanted, axis) for axis in reversed(AXES)}
    fixed = {axis: degree for axis, degree in degrees.items() if isinstance(degree, int)}
    product = prod(fixed.values())
    if "data" in fixed and product == processes:
        return Grid(**fixed)
    if "data" not in fixed and processes % product == 0:
        return Grid(**fixed, data=processes // product)
    named = {axis: degree for axis, degree in fixed.items() if degree > 1} or {"data": fixed.get("data", 1)}
    factors = " x ".join(f"{axis} {degree}" for axis, degree in named.items())
    factors += f" = {product}" if len(named) > 1 else ""
    if "data" in fixed:
        rest = product // fixed["data"]
        # Where `auto` gives something, it gives this.
        auto = f"leave data: auto, which is {processes // rest}" if processes % rest == 0 else "change the degrees"
        fault, fix = f"{factors}, and there are {processes} processes", f"ask for {product} processes, or {auto}"
    else:
        nearest = max(1, processes // product) * product
        fault = f"{processes} processes can't be divided by {factors}"
        fix = f"ask for {nearest} or {nearest + product} processes, or change the degrees"
    raise UsageError(f"parallelism: {fault}", fix=fix)


def what_sharding_does(grid: Grid) -> str:
    """One sentence about ``shard_optimizer``, for the plan."""
    if grid.replicas == 1:
        return "shard_optimizer has no effect: no two ranks have the same part of the model"
    return f"shard_optimizer: each rank keeps 1/{grid.replicas} of the optimizer's state of its part of the model"


def picture(grid: Grid, placements: Sequence[Placement]) -> Iterator[str]:
    """The grid in lines: its degrees, then each tensor group with its place and hosts."""
    if grid.is_data_parallel:
        return
    degrees = [(axis, getattr(grid, axis)) for axis in reversed(AXES)]
    yield f"grid: {grid.in_words()} = {grid.size} processes"
    named = [axis for axis, degree in degrees if degree > 1 and axis != "tensor"]
    groups = list(grid.groups("tensor"))
    for ranks in groups[:_MOST_LINES]:
        at = grid.coordinates(ranks[0])
        place = ", ".join(f"{'stage' if axis == 'pipeline' else axis} {at[axis]}" for axis in named) or "all"
        hosts = list(dict.fromkeys(placements[rank].host for rank in ranks))
        numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        yield f"  {place}: {numbers} on {', '.join(hosts)}"
    if len(groups) > _MOST_LINES:
        yield f"  and {len(groups) - _MOST_LINES} more"
    crossing = sum(len({placements[rank].host for rank in ranks}) > 1 for ranks in groups)
    if crossing:
        yield (
            f"{crossing} of {len(groups)} tensor groups cross hosts, which is slow: "
            f"no host has a multiple of {grid.tensor} slots that would do"
        )
