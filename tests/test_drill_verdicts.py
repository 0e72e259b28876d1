"""What a drill makes of what it saw, and of its options: without processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.drill.faults import FAULTS
from hvdtrain.drill.judge import judge
from hvdtrain.drill.models import Blame, Limits, Seen, Subject
from hvdtrain.hosts.models import Host
from hvdtrain.plan.facts import Facts
from hvdtrain.plan.plan import make_plan
from hvdtrain.spec.models import JobSpec

FACTS = Facts(
    python="/env/bin/python",
    horovodrun="/env/bin/horovodrun",
    controllers=("gloo",),
    mpirun=None,
    cores=8,
    environment={"PATH": "/usr/bin"},
)
WELL = Seen(rank=1, attempt=0, noticed_s=0.2, recovered_s=9.0, recovery="a new attempt trains past step 7")
NAMED = Blame(attempt=0, kind="signal", rank=1)


def verdict(fault: str, limits: Limits | None = None, **seen: Any) -> tuple[str, tuple[str, ...]]:
    result = judge(FAULTS[fault], replace(WELL, **seen), limits or Limits())
    return result.verdict, result.reasons


def test_limits() -> None:
    assert verdict("kill-rank", blame=NAMED) == ("measured", ())
    assert verdict("kill-rank", Limits({"": 0.2}, {"": 9}), blame=NAMED) == ("pass", ())
    late = ("noticed after 0.2 s, limit 0.1 s", "recovered after 9.0 s, limit 8 s")
    assert verdict("kill-rank", Limits({"": 0.1}, {"": 8}), blame=NAMED) == ("fail", late)
    assert verdict("kill-rank", Limits({"": 0.1, "kill-rank": 1}), blame=NAMED) == ("pass", ())
    assert verdict("kill-rank", Limits({"stop-rank": 0.1}), blame=NAMED) == ("measured", ())


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"noticed_s": None, "recovered_s": None}, "it was never noticed"),
        ({"blame": NAMED, "recovered_s": None, "recovery": "why"}, "it never recovered: why"),
        ({"blame": NAMED, "left": ("12 python",)}, "processes were left: 12 python"),
        ({"blame": replace(NAMED, rank=0)}, "failure.json names rank 0, not rank 1"),
        ({"blame": replace(NAMED, rank=None)}, "failure.json names no rank, not rank 1"),
        ({"blame": replace(NAMED, attempt=1)}, "attempt 2 failed too"),
        ({"blame": None}, "failure.json is missing"),
    ],
)
@pytest.mark.parametrize("fault", ["kill-rank", "kill-wrapper", "stop-rank"])
def test_what_is_wrong_without_limits(fault: str, seen: dict[str, Any], reason: str) -> None:
    assert verdict(fault, **seen) == ("fail", (reason,))


def test_nobody_is_to_blame_for_the_launcher() -> None:
    assert verdict("kill-launcher", rank=None, blame=replace(NAMED, rank=None))[0] == "measured"
    assert verdict("kill-launcher", rank=None, blame=NAMED)[1] == ("failure.json names rank 1, not no rank",)


def test_a_slow_rank() -> None:
    named = {"event": "straggler", "rank": 1}
    assert verdict("slow-rank", events=[named]) == ("measured", ())
    assert verdict("slow-rank", events=[named, {"event": "straggler", "rank": 0}])[1] == ("rank 0 was called slow",)
    ended = [named, {"event": "attempt_failed"}]
    assert verdict("slow-rank", events=ended, summary="rank 1 hung")[1] == ("the job was ended: rank 1 hung",)
    reasons = verdict("slow-rank", noticed_s=None, recovered_s=None, called_slow=(1,))[1]
    assert reasons == ("it was never noticed", "rank 1 had been called slow before it was, and isn't named twice")


def test_an_orderly_stop() -> None:
    ends = [{"event": "rank_ended", "rank": rank, "exit_code": code} for rank, code in [(0, 0), (1, -15)]]
    assert verdict("stop-job", rank=None, exit_status=143, events=ends) == ("measured", ())
    assert verdict("stop-job", rank=None, exit_status=5)[1] == ("the launch ended with status 5, not 143",)
    killed = [{"event": "rank_ended", "rank": 1, "exit_code": -9}]
    reasons = verdict("stop-job", rank=None, exit_status=143, events=killed)[1]
    assert reasons == ("ranks that didn't end within stop_grace_s and were killed: 1",)


@pytest.mark.parametrize(
    ("fault", "event"),
    [
        ("kill-rank", {"event": "rank_ended", "rank": 1}),
        ("kill-wrapper", {"event": "rank_ended", "rank": 1}),
        ("stop-rank", {"event": "hang", "rank": None}),
        ("slow-rank", {"event": "straggler", "rank": 1}),
        ("kill-launcher", {"event": "attempt_failed"}),
        ("stop-job", {"event": "stopping"}),
        ("cut-host", {"event": "host_lost", "host": "node7"}),
    ],
)
def test_what_shows_that_it_is_known(fault: str, event: dict[str, Any]) -> None:
    hit = subject("localhost", "node7")
    assert FAULTS[fault].is_notice(event, hit)
    assert not FAULTS[fault].is_notice({"event": "rank_started", "rank": 1}, hit)
    if event.get("rank") is not None:
        assert not FAULTS[fault].is_notice(event | {"rank": 0}, hit)
    if "host" in event:
        assert not FAULTS[fault].is_notice(event | {"host": "node8"}, hit)


def test_a_host_that_was_cut_off() -> None:
    hit = {"rank": None, "host": "node7"}
    lost = Blame(attempt=0, kind="lost_host", rank=1, host="node7")
    assert verdict("cut-host", blame=lost, **hit) == ("measured", ())
    wrong = verdict("cut-host", blame=replace(lost, host="node8"), **hit)
    assert wrong[1] == ("failure.json names node8, not node7",)
    assert verdict("cut-host", blame=replace(lost, host=None), **hit)[1] == ("failure.json names no host, not node7",)
    assert verdict("cut-host", **hit)[1] == ("failure.json is missing",)


def test_a_slow_link() -> None:
    hit = {"rank": None, "host": "node7"}
    assert verdict("slow-link", **hit) == ("measured", ())
    ended = [{"event": "attempt_failed"}]
    assert verdict("slow-link", events=ended, summary="rank 1 hung", **hit)[1] == ("the job was ended: rank 1 hung",)


# --- where a fault can't be done -------------------------------------------------------------------------------------


def subject(*hosts: str, tells_steps: bool = True, hang_timeout_s: float | None = 600, rank: int = -1) -> Subject:
    """Hosts called node… are others than this machine."""
    job = JobSpec(name="job", command=("python", "train.py"), directory=Path("/"), hang_timeout_s=hang_timeout_s)
    facts = replace(FACTS, remote=frozenset(host for host in hosts if host.startswith("node")))
    plan = make_plan(job, [Host(name=host, slots=1, max_slots=None) for host in hosts], facts, Path("/"))
    return Subject(plan, tells_steps=tells_steps, rank=rank % len(hosts), hang_timeout_s=15)


def why_not(name: str, given: Subject) -> str | None:
    return FAULTS[name].not_here(given)


def test_all_but_the_faults_of_hosts_can_be_done_on_this_machine() -> None:
    here = subject("localhost", "127.0.0.1")
    reasons = {name: reason for name in FAULTS if (reason := why_not(name, here))}
    assert reasons.keys() == {"cut-host", "slow-link"}
    assert all("has them on this machine only (localhost, 127.0.0.1)" in reason for reason in reasons.values())


def test_a_rank_that_cannot_be_slow() -> None:
    assert why_not("slow-rank", subject("localhost")) == "one rank alone is slower than nobody"
    assert "tells nothing of its steps" in str(
        why_not("slow-rank", subject("localhost", "localhost", tells_steps=False))
    )


def test_ranks_and_hosts_elsewhere_can_be_hit() -> None:
    far = subject("localhost", "node7")
    assert [name for name in FAULTS if why_not(name, far)] == []


def test_the_launching_machine_cannot_be_cut_off_from_itself() -> None:
    near = subject("localhost", "node7", rank=0)
    assert why_not("cut-host", near) == "rank 0 runs on this machine, as the launch itself does; try --rank 1"
    assert why_not("slow-link", near) is None


def test_the_speed_of_a_command_is_not_known() -> None:
    far = subject("localhost", "node7", tells_steps=False)
    assert "nobody can say how fast it goes" in str(why_not("slow-link", far))
    assert why_not("cut-host", far) is None


def test_a_hang_is_looked_for_sooner() -> None:
    assert FAULTS["stop-rank"].settings(subject("localhost")) == ("hang_timeout_s=15",)
    assert FAULTS["stop-rank"].settings(subject("localhost", hang_timeout_s=15)) == ()
    assert FAULTS["kill-rank"].settings(subject("localhost")) == ()


def test_a_hang_is_looked_for_later_than_silence() -> None:
    assert FAULTS["cut-host"].settings(subject("localhost", "node7", hang_timeout_s=5)) == ("hang_timeout_s=30",)
    assert FAULTS["cut-host"].settings(subject("localhost", "node7")) == ()
    assert FAULTS["cut-host"].settings(subject("localhost", "node7", hang_timeout_s=None)) == ()


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-notice-s", "kill-rnak=3"], "there is no fault 'kill-rnak'; there are kill-rank, "),
        (["--max-recover-s", "soon"], "'soon' isn't a number of seconds"),
        (["--max-recover-s", "kill-rank=-1"], "'-1' isn't a number of seconds"),
        (["--max-recover-s", "nan"], "'nan' isn't a number of seconds"),
        (["--rank", "2"], "--rank 2: the job has ranks 0 to 1"),
        (["--fault", "flood"], "'flood' is not one of"),
        (["--rate", "fast"], "'fast' isn't a rate such as 50mbit"),
        (["--rate", "0mbit"], "'0mbit' isn't a rate such as 50mbit"),
        (["--set", "proceses=3"], "unknown key 'proceses'"),
    ],
)
def test_bad_options(tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "job.yaml").write_text("command: [python, -V]\nprocesses: 2\nhosts: {list: ['localhost:2']}\n")
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "drill", "job.yaml", *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()
