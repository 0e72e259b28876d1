"""`hvdtrain drill` on real jobs: what it measures, and that nothing of it is left however it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launching import CONTROLLERS, PATIENCE_S, TRAINS_ON, Job, descendants
from real_processes import is_running, wait_until_gone

pytestmark = pytest.mark.processes

DIGITS = {
    "task": "hvdtrain.tasks.digits_torch:Digits",
    "options": {"epochs": 1000, "batch_size": 32},
    "processes": 2,
    "hosts": {"list": ["localhost:2"]},
    "controller": "gloo",
    "checkpoint": {"every_steps": 20},
    "restarts": {"backoff_s": 0.5},
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def arguments(job: Job, what: str | dict[str, Any], *options: str, controller: str = "gloo") -> list[str]:
    """A drill of a script, or of a whole spec."""
    if isinstance(what, str):
        job.arguments(what, controller=controller)
    else:
        (job.folder / "job.yaml").write_text(json.dumps(what | {"controller": controller}))
    return [sys.executable, "-m", "hvdtrain", "drill", "job.yaml", "--after-s", "1", *options]


def drill(job: Job, what: str | dict[str, Any], *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments(job, what, *options, **settings),
        cwd=job.folder,
        env=job.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def results(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    report = json.loads(done.stdout)
    return {result["fault"]: result for result in report["results"]}


def test_a_task_begins_again(job: Job) -> None:
    options = ["--fault", "kill-rank", "--max-notice-s", "10", "--max-recover-s", "120", "--format", "json"]
    done = drill(job, DIGITS, *options)
    assert done.returncode == 0, done.stderr
    result = results(done)["kill-rank"]
    assert result["verdict"] == "pass"
    assert result["rank"] == 1
    assert 0 < result["noticed_s"] < 10
    assert result["noticed_s"] < result["recovered_s"] < 120
    assert (result["named"]["kind"], result["named"]["rank"], result["exit_status"]) == ("signal", 1, None)
    past = re.fullmatch(r"a new attempt trains past step (\d+)", result["recovery"])
    assert past
    records = (Path(result["run_directory"]) / "events.jsonl").read_text().splitlines()
    starts = [record for record in map(json.loads, records) if record["event"] == "attempt_started"]
    assert [record["attempt"] for record in starts] == [0, 1]
    status = json.loads((Path(result["run_directory"]) / "status.json").read_text())
    assert status["step"] > int(past[1]) > 0
    assert "rank 1: SIGKILL of its command after step " in done.stderr


def test_a_slow_rank_is_named_and_lives(job: Job) -> None:
    done = drill(job, DIGITS, "--fault", "slow-rank", "--rank", "0", "--format", "json")
    result = results(done)["slow-rank"]
    assert (done.returncode, result["verdict"], result["reasons"]) == (0, "measured", []), done.stderr
    assert result["rank"] == 0
    # A rank's speed is known after ten seconds, in which it was slow for a part or for all of them.
    assert 0 < result["noticed_s"] < 60
    assert result["named"] is None


def test_a_command_that_may_not_begin_again_ends(job: Job, controller: str) -> None:
    faults = ["--fault", "kill-wrapper", "--fault", "kill-launcher"]
    done = drill(job, TRAINS_ON, *faults, "--max-recover-s", "30", "--format", "json", controller=controller)
    assert done.returncode == 0, done.stderr
    found = results(done)
    for result in found.values():
        assert (result["verdict"], result["exit_status"]) == ("pass", 5)
        assert result["recovery"] == "the launch has ended with status 5, and no process is left"
    assert (found["kill-wrapper"]["rank"], found["kill-wrapper"]["named"]["rank"]) == (1, 1)
    assert (found["kill-launcher"]["rank"], found["kill-launcher"]["named"]["rank"]) == (None, None)


@pytest.fixture(params=CONTROLLERS)
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_limit_that_is_not_kept_fails(job: Job) -> None:
    """A hang can't be known before hang_timeout_s; the other fault keeps its own limit."""
    faults = ["--fault", "stop-rank", "--fault", "stop-job", "--hang-timeout-s", "3"]
    done = drill(job, TRAINS_ON, *faults, "--max-notice-s", "1", "--max-notice-s", "stop-job=60")
    assert done.returncode == 1, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith("stop-")}
    assert rows["stop-rank"][1:3] == ["rank", "1"]
    assert (rows["stop-rank"][-1], rows["stop-job"][-1]) == ("fail", "pass")
    assert re.search(r"stop-rank +noticed after \d+\.\d s, limit 1 s; named: rank 1, hang;", done.stdout)
    assert "launched with hang_timeout_s=3" in done.stdout
    assert "stopped by SIGTERM; the launch has ended with status 143, and no process is left" in done.stdout
    assert done.stderr.splitlines()[-1] == "error: the job doesn't cope as it has to with stop-rank"


# --- the drill's own end ---------------------------------------------------------------------------------------------


@contextmanager
def drilling(job: Job, what: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A drill that has just done its fault, and all its processes."""
    process = subprocess.Popen(
        arguments(job, what, *options), cwd=job.folder, env=job.environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr
        for line in process.stderr:
            if "rank 1: SIGSTOP of its command" in line:
                break
        yield process, descendants(process.pid)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_its_own_end_leaves_nothing(job: Job, number: signal.Signals) -> None:
    with drilling(job, TRAINS_ON, "--fault", "stop-rank", "--hang-timeout-s", "1000") as (process, everything):
        assert len(everything) >= 6
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == (-9 if number == signal.SIGKILL else 128 + number)
        wait_until_gone(everything, 10)


def test_it_touches_no_other_job(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    with Job(folder).running("import time; print('here', flush=True); time.sleep(1000)", processes=1) as other:
        assert other.stdout
        while "here" not in other.stdout.readline():
            assert other.poll() is None
        others = [pid for pid in descendants(other.pid) if is_running(pid)]
        assert drill(job, TRAINS_ON, "--fault", "kill-launcher").returncode == 0
        assert [pid for pid in others if is_running(pid)] == others


# --- jobs that can't be drilled --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "words", "fix"),
    [
        ("raise ValueError('no data')", "the job failed before the fault: rank 0 on ", "see its output"),
        ("print('through')", "the job was done before the fault", "give it more to do"),
    ],
)
def test_a_job_that_does_not_come_to_the_fault(job: Job, script: str, words: str, fix: str) -> None:
    done = drill(job, script, "--fault", "kill-rank", "-n", "1", "--after-s", "60")
    assert done.returncode == 3
    assert words in done.stderr
    assert fix in done.stderr
    assert "[1]" not in done.stderr  # -n is the launch's too
    assert done.stdout == ""


def test_a_job_that_trains_too_late(job: Job) -> None:
    started = time.monotonic()
    done = drill(job, TRAINS_ON, "--fault", "kill-rank", "--timeout", "1", "--format", "json")
    assert done.returncode == 3
    assert "the job didn't train within 1 s" in done.stderr
    assert json.loads(done.stdout)["complete"] is False
    assert time.monotonic() - started < 30


def test_a_folder_that_cannot_be_made(job: Job) -> None:
    done = drill(job, TRAINS_ON, "--runs", "/proc/nowhere")
    assert done.returncode == 3
    assert "can't make the drill's folder" in done.stderr


def test_what_cannot_be_done_is_not_passed(job: Job) -> None:
    done = drill(job, TRAINS_ON, "--fault", "cut-host", "--fault", "slow-link", "--fault", "slow-rank")
    assert done.returncode == 1
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:4]] == ["skipped"] * 3
    assert "workers on several hosts, and this job has them on this machine only (localhost)" in done.stdout
    assert "a command tells nothing of its steps" in done.stdout
    assert "error: not done: cut-host, slow-link, slow-rank" in done.stderr
    assert list((job.folder / "runs" / "drills").glob("*/*")) == []
