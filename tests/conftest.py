"""Tests that need what this machine lacks are skipped, and say so."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator

import pytest
from namespace_hosts import Cluster, why_no_hosts

from hvdtrain.horovod.installed import installed


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("processes"):
            under_mpi = "mpi" in _parameters(item).values()
            if reason := _why_no_processes() or (under_mpi and _why_no_mpi()):
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("hosts") and (reason := why_no_hosts()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three hosts, h1 to h3, for a module's tests."""
    with Cluster(3) as hosts:
        yield hosts


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


@functools.cache
def _why_no_processes() -> str | None:
    horovod = installed()
    if horovod is None:
        return "Horovod isn't installed"
    missing = sorted({"torch", "tensorflow"} - set(horovod.frameworks))
    return f"Horovod has no part for {' and '.join(missing)}" if missing else None


@functools.cache
def _why_no_mpi() -> str | None:
    horovod = installed()
    if horovod is not None and "mpi" not in horovod.controllers:
        return "Horovod was built without MPI"
    return None if shutil.which("mpirun") else "no mpirun on PATH"
