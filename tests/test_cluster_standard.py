"""Level standard on real hosts: the slow one is named and its rate measured, and no healthy one is blamed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespace_hosts import Cluster

pytestmark = pytest.mark.hosts

LIMIT_S = 400
# Runs on the first host, as validate-cluster does; prints the report and the matrix.
MEASURE = """
import json, sys
from hvdtrain.cluster import standard
from hvdtrain.cluster.models import Request
from hvdtrain.hosts.models import Host

request = Request(python=sys.executable, directory=sys.argv[1])
looked = standard.standard([Host(name) for name in sys.argv[2:]], request)
rates = {f"{a} {b}": rate for (a, b), rate in looked.measured.bit_per_s.items()}
print(json.dumps({**looked.report.to_json(), "rates": rates, "order": looked.measured.rank_order}))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4) as cluster:
        yield cluster


def measured(cluster: Cluster, directory: Path) -> dict[str, Any]:
    argv = [sys.executable, "-c", MEASURE, str(directory), *cluster.names]
    done = cluster.hosts[0].run(argv, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@contextlib.contextmanager
def limited(cluster: Cluster, **mbit: int) -> Iterator[None]:
    """The hosts' links in Mbit/s; the others' are bounded by the wire too, and not by what else this machine does."""
    with contextlib.ExitStack() as stack:
        for host in cluster.hosts:
            stack.enter_context(host.limit(mbit.get(host.name, 600)))
        yield


def blamed(report: dict[str, Any], check: str = "bandwidth") -> list[tuple[str, list[str]]]:
    findings = [finding for finding in report["findings"] if finding["check"] == check]
    return [(finding["status"], finding["hosts"]) for finding in findings if finding["status"] in ("warn", "fail")]


def rates(report: dict[str, Any], host: str) -> tuple[list[float], list[float]]:
    """Out and in, Mbit/s."""
    found = {tuple(pair.split()): rate / 1e6 for pair, rate in report["rates"].items()}
    out = [rate for (sender, _), rate in found.items() if sender == host]
    into = [rate for (_, receiver), rate in found.items() if receiver == host]
    return out, into


def test_the_limited_host_of_four_is_named_and_its_rate_measured(cluster: Cluster, tmp_path: Path) -> None:
    with limited(cluster, h3=200):
        report = measured(cluster, tmp_path)
    assert blamed(report) == [("fail", ["h3"])]
    assert report["ok"] is False
    (finding,) = [f for f in report["findings"] if f["check"] == "bandwidth" and f["status"] == "fail"]
    # As a user reads it: "191 Mbit/s out, 191 Mbit/s in".
    said = finding["found"].split(", ")
    assert [part.split()[1:] for part in said] == [["Mbit/s", "out"], ["Mbit/s", "in"]]
    assert all(180 <= float(part.split()[0]) <= 220 for part in said), finding
    assert all(180 <= rate <= 220 for direction in rates(report, "h3") for rate in direction)
    assert len(report["rates"]) == 12
    # It stands in the ring once, whatever the order.
    assert sorted(report["order"]) == cluster.names
    reduces(report, cluster.names, [["h1", "h2"], ["h1", "h3"], ["h1", "h4"], ["h2", "h3"], ["h2", "h4"], ["h3", "h4"]])
    assert list(tmp_path.iterdir()) == []


def reduces(report: dict[str, Any], names: list[str], pairs: list[list[str]]) -> None:
    """Horovod reduced inside each host, between pairs and over all, and all sums were right."""
    (finding,) = [f for f in report["findings"] if f["check"] == "allreduce"]
    assert (finding["status"], finding["hosts"]) == ("ok", names), finding
    assert f"over all {2 * len(names)} ranks" in finding["found"]
    timings = report["measurements"]["allreduces"]
    groups = sorted(timing["hosts"] for timing in timings if timing["size_bytes"] == 16 << 20)
    assert groups == sorted([*([name] for name in names), *pairs, names])
    over_all = [timing for timing in timings if timing["hosts"] == names]
    assert [timing["size_bytes"] for timing in over_all] == [1 << 10, 1 << 16, 1 << 20, 16 << 20]
    # No ring is faster than its slowest link, but for what a token bucket lets through at once.
    assert over_all[-1]["bus_bit_per_s"] / 1e6 < 260


def test_a_host_that_only_sends_slowly(cluster: Cluster, tmp_path: Path) -> None:
    host = cluster.hosts[1]
    rate = ["root", "tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms"]
    with limited(cluster):
        # The limit's end takes it away too.
        host.run(["tc", "qdisc", "replace", "dev", host.interface, *rate])
        report = measured(cluster, tmp_path)
    assert blamed(report) == [("fail", ["h2"])]
    (finding,) = [f for f in report["findings"] if f["check"] == "bandwidth" and f["status"] == "fail"]
    assert finding["found"].endswith("Mbit/s out")
    assert "only it sends slowly" in finding["fix"]


def test_equally_limited_hosts_are_all_well(cluster: Cluster, tmp_path: Path) -> None:
    with limited(cluster, h1=300, h2=300, h3=300, h4=300):
        report = measured(cluster, tmp_path)
    assert blamed(report) == []
    assert all(225 <= rate / 1e6 <= 330 for rate in report["rates"].values()), report["rates"]
    assert report["order"] == cluster.names
    checked = {finding["check"]: finding["status"] for finding in report["findings"]}
    assert checked["latency"] in ("ok", "warn")
    assert {checked[name] for name in ("disk-write", "disk-read", "memory-bandwidth")} <= {"ok", "warn"}
