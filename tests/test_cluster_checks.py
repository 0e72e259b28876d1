"""Checks over facts, names folded, reports kept and compared: without a process."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cluster.checks.common import equal
from hvdtrain.cluster.groups import fold
from hvdtrain.cluster.kept import compare, keep, read_report
from hvdtrain.cluster.models import Evidence, Finding, Report, Request, Unreached
from hvdtrain.cluster.quick import judge
from hvdtrain.cluster.render import render
from hvdtrain.errors import InputError, StartError
from hvdtrain.hosts.models import Host

FACTS = json.loads((Path(__file__).parent / "data/cluster/facts-local.json").read_text())["facts"]
NAMES = ("node01", "node02", "node03")
GPU = {"index": 0, "model": "H100", "ecc_uncorrected": 0, "throttle_reasons": []}


def evidence(unreached: dict[str, Unreached] | None = None, clock_s: float = 0.0, **changes: Any) -> Evidence:
    """Three equal hosts, the last with its facts changed: ``gpus__count=7``."""
    facts = {name: copy.deepcopy(FACTS) for name in NAMES if name not in (unreached or {})}
    for facts_of in facts.values():
        facts_of["gpus"] |= {"count": 1, "gpus": [dict(GPU)], "xids": []}
        facts_of["system"]["load_1m"] = 0.1
    for name, value in changes.items():
        section, key = name.split("__")
        facts["node03"][section][key] = value
    clocks = {name: (clock_s if name == "node03" else 0.0, 0.001) for name in facts}
    return Evidence(tuple(map(Host, NAMES)), Request(), facts, unreached or {}, clocks)


def blamed(findings: tuple[Finding, ...]) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(f.status, f.check, f.hosts) for f in findings if f.status in ("warn", "fail")}


def test_equal_hosts_are_well() -> None:
    assert blamed(judge(evidence())) == set()


@pytest.mark.parametrize(
    ("change", "status", "check"),
    [
        ({"gpus__count": 7}, "fail", "gpu-count"),
        ({"gpus__gpus": [GPU | {"model": "A100"}]}, "warn", "gpu-model"),
        ({"gpus__driver_version": "550.1"}, "fail", "gpu-driver"),
        ({"gpus__gpus": [GPU | {"ecc_uncorrected": 3}]}, "fail", "gpu-ecc"),
        ({"gpus__xids": [{"xid": 79}]}, "warn", "gpu-xid"),
        ({"gpus__gpus": [GPU | {"throttle_reasons": ["hw_thermal_slowdown"]}]}, "fail", "gpu-heat"),
        ({"gpus__processes": [{"pid": 5, "user": "ann"}]}, "warn", "gpu-processes"),
        ({"system__uid": 1001}, "fail", "user-id"),
        ({"system__kernel": "5.4"}, "warn", "kernel"),
        ({"system__cpu_governors": ["powersave"]}, "warn", "governor"),
        ({"system__numa_balancing": True}, "warn", "numa-balancing"),
        ({"system__ecc_uncorrected": 2}, "fail", "ecc-memory"),
        ({"clock_s": -5.0}, "fail", "clock"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_one_host_that_differs_is_named(change: dict[str, Any], status: str, check: str) -> None:
    assert blamed(judge(evidence(**change))) == {(status, check, ("node03",))}


def test_where_two_hosts_differ_both_are_named() -> None:
    two = replace(evidence(), hosts=(Host("node01"), Host("node02")))
    found = equal(two, "software", "torch", {"node01": "2.9", "node02": "2.13"}, "install {value}")
    assert [(f.status, f.hosts) for f in found] == [("fail", ("node01",)), ("fail", ("node02",))]


def test_a_host_that_is_not_reached_fails_once_and_is_skipped_else() -> None:
    found = judge(evidence({"node03": Unreached("login", "no", "put your key there")}))
    assert blamed(found) == {("fail", "ssh", ("node03",))}
    status = {f.check: f.status for f in found if "node03" in f.hosts}
    assert (status["name"], status["host-key"], status["answer"], status["torch"]) == ("ok", "ok", "skip", "skip")


def test_a_host_that_sends_nonsense_breaks_nothing() -> None:
    broken = evidence()
    nonsense = {**broken.facts, "node03": {"system": [], "gpus": "x", "software": None, "disks": 3}}
    assert judge(replace(broken, facts=nonsense))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["node01", "node02", "node64"], "node[01-02,64]"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1,10.0.0.2"),
        (["fe80::1", "a1", "a2"], "a[1-2],fe80::1"),
        (["x", "x"], "x"),
    ],
)
def test_names_are_folded(names: list[str], text: str) -> None:
    assert fold(names) == text


def report(**changes: Any) -> Report:
    return Report(1.0, 0.5, "quick", NAMES, judge(evidence(**changes)))


def test_a_report_is_kept_and_compared(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    keep(report(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_report(path) == report()
    (change,) = compare(read_report(path), report(gpus__count=7))
    assert (change.check, change.hosts, change.now) == ("gpu-count", ("node03",), "fail, 7")
    with pytest.raises(StartError):
        keep(report(), tmp_path / "none" / "report.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', "\xff"])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="no report"):
        read_report(path)


def test_a_report_reads_well() -> None:
    first, *_, last = [str(part) for part in render(report(gpus__count=7))]
    assert first.startswith("fail  node03: gpu-count: 7\n      expected: 1, as 2 others have\n      fix: look for")
    assert last.startswith("1 of 3 hosts failed: node03 (")
