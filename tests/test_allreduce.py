"""What Horovod's own allreduce says of hosts; and the program that measures it, on real ranks and on faulty sums."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from real_processes import is_running, wait_until_gone

from hvdtrain import contract
from hvdtrain.cli.validate_cluster import command
from hvdtrain.cluster.allreduce import Allreduces, Links, Timing, Wrong, judge, ring_limit
from hvdtrain.cluster.collectives import _error, _pairs, ranks_per_host, reduce_on
from hvdtrain.cluster.effort import Effort
from hvdtrain.cluster.models import Evidence, Finding, Request
from hvdtrain.errors import UsageError
from hvdtrain.hosts.models import Host
from hvdtrain.tasks import collectives

NAMES = tuple(f"h{number}" for number in range(1, 6))
MIB = 1 << 20
PATIENCE_S = 120


def reduced(inside: dict[str, float] | None = None, pairs: dict[str, float] | None = None, over_all: float = 1.0,
            **more: Any) -> Allreduces:  # fmt: skip
    """Seconds for 16 MiB: 0.1 inside every host, 0.2 between two, if not said otherwise by host."""
    timings = [Timing((name,), 2, 16 * MIB, (inside or {}).get(name, 0.1)) for name in NAMES]
    for pair in itertools.combinations(NAMES, 2):
        seconds = max((pairs or {}).get(name, 0.2) for name in pair)
        timings.append(Timing(pair, 2, 16 * MIB, seconds))
    timings += [Timing(NAMES, 10, 1024, 0.001), Timing(NAMES, 10, 16 * MIB, over_all)]
    return Allreduces(NAMES, tuple(timings), controller="gloo", **more)


def told(found: Allreduces, links: Links | None = None) -> list[tuple[str, tuple[str, ...], str]]:
    return [(f.status, f.hosts, f.found) for f in judge(found, links or Links())]


def test_bus_bandwidth_is_that_of_each_link() -> None:
    assert Timing(("a", "b"), 2, 1_000_000, 1.0).bus_bit_per_s == 8_000_000
    assert Timing(("a", "b"), 4, 1_000_000, 1.0).bus_bit_per_s == 12_000_000


def test_equal_hosts_are_well() -> None:
    ((status, hosts, found),) = told(reduced())
    assert (status, hosts) == ("ok", NAMES)
    assert found == "242 Mbit/s over all 10 ranks, 1 ms for small ones (gloo)"


def test_a_host_that_is_slow_by_itself() -> None:
    slow, fine = told(reduced(inside={"h4": 0.5}))
    assert slow == ("warn", ("h4",), "268 Mbit/s among its own ranks")
    assert fine[:2] == ("ok", ("h1", "h2", "h3", "h5"))


def test_a_host_that_is_slow_with_others_is_named_once() -> None:
    found = reduced(pairs={"h2": 1.0})
    assert told(found)[0] == ("warn", ("h2",), "134 Mbit/s with others")
    # What TCP alone has shown isn't said again.
    assert [status for status, *_ in told(found, Links(slow=frozenset({"h2"})))] == ["ok"]


def test_all_ranks_against_the_slowest_link_of_the_ring() -> None:
    rates = dict.fromkeys(itertools.permutations(NAMES, 2), 10e9) | {("h3", "h4"): 1e9}
    assert [status for status, *_ in told(reduced(), Links(rates, physical=True))] == ["warn"]
    (finding,) = judge(reduced(), Links(rates, physical=True))
    assert finding.expected == "near 1 Gbit/s, which the slowest link of the ring carries"
    # The rates of a virtual switch are no promise; and a quarter is enough.
    assert [status for status, *_ in told(reduced(), Links(rates))] == ["ok"]
    assert [status for status, *_ in told(reduced(over_all=0.9), Links(rates, physical=True))] == ["ok"]


def test_the_limit_of_a_ring() -> None:
    assert ring_limit(("a", "b", "c"), {("a", "b"): 3.0, ("b", "c"): 2.0, ("c", "a"): 5.0, ("a", "c"): 1.0}) == 2.0
    assert ring_limit(("a", "b", "c"), {("a", "b"): 3.0}) is None
    assert ring_limit(("a",), {}) is None


def test_wrong_sums_name_the_host_and_not_its_partners() -> None:
    found = reduced(wrong=(Wrong("h5", 3, 16 * MIB, NAMES), Wrong("h5", 1, 1024, ("h1", "h5"))))
    first, fine = judge(found, Links())
    assert first == Finding(
        "network", "allreduce", ("h5",), "fail", "4 wrong sums in allreduces of 16 MiB, 1 KiB among h[1-5]",
        "correct sums",
        "look for memory errors and a faulty adapter there (check ecc-memory, link-errors), and for old firmware",
    )  # fmt: skip
    assert fine.hosts == NAMES[:4]


def test_a_job_that_failed_or_could_not_be() -> None:
    assert told(Allreduces(NAMES, error=("it died", "h2"))) == [
        ("fail", ("h2",), "it died"),
        ("ok", ("h1", "h3", "h4", "h5"), ""),
    ]
    assert told(Allreduces(NAMES, error=("it died", None))) == [("fail", NAMES, "it died")]
    assert told(Allreduces(NAMES, skipped="no Horovod")) == [("skip", NAMES, "no Horovod")]


class TwoRanks:
    """Horovod as rank 0 of two sees it; every so many elements the sum is off by one."""

    def __init__(self, every: int) -> None:
        self._every = every

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, values: Any, name: str, group: Any) -> Any:
        if name.endswith("count"):
            return values * 2
        found = values * np.float32(3)
        found[:: self._every] += 1
        return found

    def repeat(self, size: int, name: str, group: Any) -> Callable[[], None]:
        return lambda: None


def test_every_element_of_a_sum_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    collectives._measure(TwoRanks(every=100), (0, 1), [0, 1], None, 4000, 0.01, 0)
    first, second = (
        json.loads(line.removeprefix(contract.COLLECTIVE_MARK)) for line in capsys.readouterr().out.splitlines()
    )
    assert first == {"wrong": 10, "host": 0, "bytes": 4000, "hosts": [0, 1]}
    assert second["seconds"] > 0


@pytest.mark.parametrize(
    ("count", "rounds"),
    [
        (2, []),
        (3, [[[1, 2]], [[0, 2]], [[0, 1]]]),
        (4, [[[0, 3], [1, 2]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]]),
        (9, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[1, 2], [3, 4], [5, 6], [7, 8]], [[8, 0]]]),
        (10, [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], [[1, 2], [3, 4], [5, 6], [7, 8]], [[9, 0]]]),
    ],
)
def test_who_is_paired_when(count: int, rounds: list[Any]) -> None:
    found = _pairs(count)
    assert found == rounds
    for pairs in found:
        used = [host for pair in pairs for host in pair]
        assert len(set(used)) == len(used)


def evidence(directory: Path, python: str) -> Evidence:
    request = Request(python=python, directory=str(directory))
    return Evidence((Host("localhost"),), request, {"localhost": {"software": {"horovod": {}}}}, {})


@pytest.mark.processes
def test_on_this_machine(tmp_path: Path) -> None:
    effort = Effort(1.0, 1, 1, 1.0, 1, 1.0, (1024, MIB), 0.1)
    found = reduce_on(evidence(tmp_path, sys.executable), ["localhost"], effort)
    assert found.error is None
    assert [(timing.ranks, timing.size_bytes) for timing in found.timings] == [(2, 1024), (2, MIB)]
    assert found.wrong == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_job_that_cannot_start_says_why(tmp_path: Path) -> None:
    effort = Effort(1.0, 1, 1, 1.0, 1, 1.0, (1024,), 0.1)
    found = reduce_on(evidence(tmp_path / "gone", sys.executable), ["localhost"], effort)
    assert found.error is not None
    assert "the working directory doesn't exist" in found.error[0]


def test_without_horovod_nothing_is_started(tmp_path: Path) -> None:
    seen = Evidence((Host("localhost"),), Request(), {"localhost": {"software": {"horovod": None}}}, {})
    found = reduce_on(seen, ["localhost"], Effort(1.0, 1, 1, 1.0, 1, 1.0, (1024,), 0.1))
    assert found.skipped == "no Horovod on localhost"


@pytest.mark.parametrize(
    ("counts", "all_gpus", "expected"),
    [((0, 0), False, 2), ((8, 8), False, 2), ((1, 8), False, 1), ((8, 4), True, 4), ((0, 8), True, 2)],
)
def test_how_many_ranks_a_host_gets(counts: tuple[int, ...], all_gpus: bool, expected: int) -> None:
    facts = {f"h{number}": {"gpus": {"count": count}} for number, count in enumerate(counts)}
    seen = Evidence(tuple(map(Host, facts)), Request(), facts, {})
    assert ranks_per_host(seen, list(facts), all_gpus=all_gpus) == expected


def family(process: psutil.Process) -> list[psutil.Process]:
    """Its descendants that live, some of which end while one looks."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [one for one in process.children(recursive=True) if is_running(one.pid) and one.cmdline()]
    return []


@pytest.mark.processes
def test_a_validation_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM while Horovod's job runs: its processes and its folder go too."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "hvdtrain", "validate-cluster", "--hosts", "localhost", "--level", "standard"]
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        assert any("allreduces of Horovod's own" in line for line in process.stderr)
        whole = psutil.Process(process.pid)
        # The ranks, whatever stands between them and the command.
        while not any("hvdtrain.tasks.collectives" in " ".join(one.cmdline()) for one in family(whole)):
            assert process.poll() is None
            time.sleep(0.05)
        started = [one.pid for one in family(whole)]
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 143
    wait_until_gone(started, 10)
    assert list(tmp_path.glob("hvdtrain*")) == []


def test_why_a_job_failed(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_text("hvdtrain: looking\nerror: h2: no\n  fix: go\n")
    assert _error(0, tmp_path, output) is None
    assert _error(3, None, output) == ("Horovod's allreduce couldn't be started: error: h2: no; fix: go", None)
    record = {"rank": 1, "host": "h2", "kind": "signal", "diagnosis": None, "exception": None}
    (tmp_path / contract.FAILURE_FILE).write_text(json.dumps(record))
    assert _error(5, tmp_path, output) == ("Horovod's allreduce failed on rank 1: signal", "h2")
    (tmp_path / contract.FAILURE_FILE).write_text("{")
    assert _error(5, tmp_path, output) == ("Horovod's allreduce couldn't be started: error: h2: no; fix: go", None)


@pytest.mark.parametrize(
    "options",
    [
        ["--output", "/dev/full"],
        ["--output", "{folder}/none/report"],
        ["--write-profile", "{folder}"],
        ["--output", "{folder}/same", "--write-profile", "{folder}/same"],
    ],
)
def test_files_that_cannot_be_written_are_told_before_the_work(tmp_path: Path, options: list[str]) -> None:
    argv = ["--hosts", "no-such-host", *(word.format(folder=tmp_path) for word in options)]
    with pytest.raises(UsageError):
        command.main(argv, standalone_mode=False)
    assert list(tmp_path.iterdir()) == []
