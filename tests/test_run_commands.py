"""Real runs looked at and steered from other processes: `ps`, `status`, `logs`, `stop`, `resume`, `launch --detach`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import PATIENCE_S, Job, descendants, worker_pids
from real_processes import heed_interrupts, is_running, wait_until_gone

pytestmark = pytest.mark.processes

TOKEN = "s3cret-token-of-the-test"  # noqa: S105
# Saves its state when it's asked to end, and takes a while for it.
WAITS = """
import os, signal, sys, time
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
def save(*_):
    time.sleep(1)
    open(f"saved-{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("pid", os.getpid(), "attempt", os.environ["HVDTRAIN_ATTEMPT"])
while True:
    time.sleep(1000)
"""


class Runs:
    """A folder of runs, and hvdtrain's commands in it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hvdtrain", *arguments],
            cwd=self.job.folder,
            env=self.job.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hvdtrain", *arguments],
            cwd=self.job.folder,
            env=self.job.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
        )

    def status(self) -> dict[str, Any]:
        done = self.command("status", "--format", "json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def wait_for(self, state: str) -> dict[str, Any]:
        """The status once the run has that state."""
        deadline = time.monotonic() + PATIENCE_S
        while (status := self.status())["state"] != state:
            assert time.monotonic() < deadline, status
            time.sleep(0.1)
        return status

    def wait_for_lines(self, count: int) -> None:
        """Wait until the ranks of the newest attempt have written so many lines."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.command("logs").stdout.splitlines()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    @property
    def saved(self) -> list[str]:
        return sorted(path.name for path in self.job.folder.glob("saved-*"))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Whatever is left of the runs in it at the end is killed."""
    found = Runs(Job(tmp_path))
    found.job.environment.pop("HVDTRAIN_RUNS", None)
    yield found
    if found.job.run_directory.exists():
        done = found.command("stop", "--kill", "--timeout", "30")
        assert done.returncode == 0, done.stderr


def test_a_run_is_watched_followed_and_stopped(runs: Runs) -> None:
    with runs.job.running(WAITS) as process:
        pids = worker_pids(process, 2)
        following = runs.start("logs", "-f", "job")
        interrupted = runs.start("logs", "-f", "--rank", "1")
        assert following.stdout
        assert interrupted.stdout
        followed = sorted(following.stdout.readline() for _ in range(2))
        assert [line.partition(" ")[0] for line in followed] == ["[0]", "[1]"]
        assert {int(line.split()[2]) for line in followed} == set(pids)

        status = runs.wait_for("running")
        assert status["supervisor"]["pid"] == process.pid
        assert [rank["state"] for rank in status["ranks"]] == ["running", "running"]
        assert {rank["pid"] for rank in status["ranks"]} <= set(descendants(process.pid))
        identifier = runs.job.run_directory.resolve().name
        assert re.search(rf"^job +{identifier} +running ", runs.command("ps").stdout, re.M)
        assert f"job/{identifier}  running\n" in runs.command("status").stdout
        done = runs.command("resume")
        assert done.returncode == 2
        assert "the run still lives" in done.stderr

        assert interrupted.stdout.readline().startswith("pid ")
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.communicate(timeout=PATIENCE_S) == ("", "")
        assert interrupted.returncode == 130
        assert process.poll() is None

        done = runs.command("stop", identifier)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"job/{identifier} has ended: stopped, exit status 143\n"
        assert not is_running(process.pid)
        assert process.wait(PATIENCE_S) == 143
        assert following.communicate(timeout=PATIENCE_S) == ("", "")
        assert following.returncode == 0
    assert runs.saved == ["saved-0", "saved-1"]
    assert runs.status()["state"] == "stopped"
    assert runs.command("stop").stdout == f"job/{identifier} had ended before: stopped, exit status 143\n"


def test_killing_leaves_no_time_to_save(runs: Runs) -> None:
    with runs.job.running(WAITS) as process:
        worker_pids(process, 2)
        everything = descendants(process.pid)
        done = runs.command("stop", "--kill", "--format", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["state"] == "stopped"
        wait_until_gone(everything, 1)
    assert runs.saved == []


def test_a_killed_supervisor_is_shown_as_lost_and_its_run_goes_on(runs: Runs) -> None:
    with runs.job.running(WAITS) as process:
        worker_pids(process, 2)
        following = runs.start("logs", "-f")
        everything = descendants(process.pid)
        process.kill()
        process.wait()
        status = runs.status()
        assert (status["state"], status["note"]) == ("lost", f"its supervisor, process {process.pid}, is gone")
        assert re.search(r"^job .* lost ", runs.command("ps").stdout, re.M)
        done = runs.command("stop")
        assert done.returncode == 0
        assert "is lost, there is nothing to stop" in done.stdout
        _, errors = following.communicate(timeout=PATIENCE_S)
        assert following.returncode == 0
        assert "is lost: its supervisor" in errors
        wait_until_gone(everything, PATIENCE_S)
    resumed = runs.start("resume", "job")
    try:
        assert resumed.stdout
        assert re.fullmatch(r"\[[01]\] pid \d+ attempt 1\n", resumed.stdout.readline())
        runs.wait_for("running")
        second = runs.command("resume")
        assert second.returncode == 2
        assert "the run still lives" in second.stderr
        resumed.send_signal(signal.SIGINT)
        resumed.communicate(timeout=PATIENCE_S)
    finally:
        resumed.kill()
    assert resumed.returncode == 130
    assert (runs.status()["state"], runs.status()["attempt"]) == ("stopped", 1)
    assert "attempt 0" in runs.command("logs", "--attempt", "0").stdout


FAILS_ONCE = """
import os, signal
print("attempt", os.environ["HVDTRAIN_ATTEMPT"])
if os.environ["HVDTRAIN_ATTEMPT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_restart_is_followed(runs: Runs) -> None:
    options = ["--set", "restarts.max=2", "--set", "restarts.backoff_s=1", "--detach"]
    done = subprocess.run(
        runs.job.arguments(FAILS_ONCE, *options, processes=1),
        cwd=runs.job.folder, env=runs.job.environment, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    following = runs.command("logs", "-f", "--format", "json")
    assert following.returncode == 0, following.stderr
    assert [json.loads(line) for line in following.stdout.splitlines()] == [
        {"rank": 0, "attempt": attempt, "line": f"attempt {attempt}"} for attempt in (0, 1)
    ]
    assert runs.status()["state"] == "finished"


def test_a_detached_run_needs_no_terminal_and_tells_no_secret(runs: Runs) -> None:
    runs.job.environment["TOKEN"] = TOKEN
    arguments = runs.job.arguments(WAITS, "--detach", "--set", "env.secrets=[TOKEN]")
    reader, writer = os.pipe()
    # Also an open file that it doesn't know of must not keep its reader waiting.
    launch = subprocess.Popen(
        arguments, cwd=runs.job.folder, env=runs.job.environment, stdout=subprocess.PIPE, text=True, pass_fds=[writer],
        start_new_session=True,
    )  # fmt: skip
    os.close(writer)
    shown, _ = launch.communicate(timeout=PATIENCE_S)
    assert launch.returncode == 0
    assert os.read(reader, 1) == b""
    os.close(reader)
    directory = runs.job.run_directory.resolve()
    assert shown.splitlines() == [
        f"job/{directory.name} has begun",
        *(f"  hvdtrain {words} {directory}" for words in ("logs -f", "status", "stop")),
    ]
    runs.wait_for_lines(2)
    status = runs.wait_for("running")
    supervisor = status["supervisor"]["pid"]
    assert os.getsid(supervisor) == supervisor
    for pid in [supervisor, *descendants(supervisor)]:
        assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_text(), pid
    log = directory / "launch.log"
    assert log.stat().st_mode & 0o777 == 0o600
    assert sorted(line[:8] for line in log.read_text().splitlines() if line.startswith("[")) == ["[0] pid ", "[1] pid "]

    assert runs.command("stop", "--timeout", str(PATIENCE_S)).returncode == 0
    assert "stopped by SIGTERM" in log.read_text()
    for path in directory.rglob("*"):
        assert not path.is_file() or TOKEN not in path.read_text(), path

    done = runs.command("resume", "--detach")
    assert done.returncode == 0, done.stderr
    runs.wait_for_lines(2)
    assert runs.status()["attempt"] == 1
    assert runs.command("stop", str(directory)).returncode == 0


def test_a_detached_launch_fails_where_it_is_seen(runs: Runs) -> None:
    arguments = runs.job.arguments("print(1)", "--detach")
    (runs.job.folder / "train.py").unlink()
    done = subprocess.run(arguments, cwd=runs.job.folder, env=runs.job.environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert "the script 'train.py' doesn't exist" in done.stderr
    assert not (runs.job.folder / "runs").exists()
    done = subprocess.run(
        [*arguments, "--set", "env.secrets=[NOT_SET]"], cwd=runs.job.folder, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "NOT_SET" in done.stderr
    assert runs.command("launch", "job.yaml", "--detach", "--dry-run").returncode == 2


def test_a_detached_run_that_fails_later_says_so(runs: Runs) -> None:
    done = subprocess.run(
        runs.job.arguments("1 / 0", "--detach", processes=1),
        cwd=runs.job.folder, env=runs.job.environment, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    watched = runs.command("status", "--watch")
    assert watched.returncode == 0, watched.stderr
    assert re.search(r"^job/\S+  failed", watched.stdout, re.M)
    assert runs.status()["exit_status"] == 4
    assert "ZeroDivisionError" in (runs.job.run_directory / "launch.log").read_text()
    assert re.search(r"exit status +4\n", runs.command("status").stdout)


FAILS_FIRST = """
import os, sys
size = os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"]
print("one of", size, "attempt", os.environ["HVDTRAIN_ATTEMPT"])
sys.exit(int(os.environ["HVDTRAIN_ATTEMPT"] == "0"))
"""


def kept(runs: Runs) -> dict[str, bytes]:
    """The files by which a run goes on."""
    return {name: (runs.job.run_directory / name).read_bytes() for name in ("job.yaml", "plan.json")}


def test_a_run_goes_on_with_other_workers(runs: Runs) -> None:
    assert runs.job.launch(FAILS_FIRST, "--hosts", "localhost:3").returncode == 4
    before = kept(runs)

    shown = runs.command("resume", "-n", "3", "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "# 3 processes, of 3 slots: 3 on localhost" in shown.stdout
    for options, words in {
        ("-n", "4"): "4 processes, but the hosts have 3 slots",
        ("--set", "controler=mpi"): "did you mean 'controller'",
        ("--set", "name=other"): "a run keeps its job's name, and this is 'other'",
        ("--set", "command=[python, gone.py]"): "the script 'gone.py' doesn't exist",
        ("--hosts", "localhost:2", "--hostfile", "hosts"): "both given",
        ("--format", "json"): "--dry-run",
    }.items():
        refused = runs.command("resume", *options)
        assert refused.returncode in (2, 3)
        assert words in refused.stderr
    assert kept(runs) == before
    assert runs.status()["attempt"] == 0

    done = runs.command("resume", "-n", "3")
    assert (done.returncode, done.stdout.count("one of 3 attempt 1\n")) == (0, 3), done.stderr
    assert "attempt 1: controller gloo: as the job spec says; 3 processes" in done.stderr
    first = runs.job.run_directory / "logs" / "attempt-0"
    assert {name: (first / name).read_bytes() for name in before} == before
    assert json.loads((first / "environment.json").read_text())["packages"]


def test_a_run_goes_on_by_its_plan_without_its_hostfile(runs: Runs) -> None:
    hostfile = runs.job.folder / "hosts"
    hostfile.write_text("localhost slots=1")
    assert runs.job.launch(FAILS_FIRST, "--hostfile", "hosts", processes=1).returncode == 4
    hostfile.unlink()
    refused = runs.command("resume", "--replan")
    assert refused.returncode == 2
    assert str(hostfile) in refused.stderr
    done = runs.command("resume")
    assert (done.returncode, done.stdout) == (0, "[0] one of 1 attempt 1\n"), done.stderr


def test_a_finished_run_goes_on_only_with_another_job(runs: Runs) -> None:
    assert runs.job.launch("print('done')", processes=1).returncode == 0
    for options in ([], ["--replan"], ["-n", "1"]):
        refused = runs.command("resume", *options)
        assert refused.returncode == 2
        assert "the run has finished, and nothing of its job has changed" in refused.stderr
    done = runs.command("resume", "--set", "env.set.MORE=1")
    assert (done.returncode, done.stdout) == (0, "[0] done\n"), done.stderr
    assert runs.command("resume").returncode == 2


def test_a_job_that_was_edited_in_the_run_s_folder_is_planned_anew(runs: Runs) -> None:
    assert runs.job.launch(FAILS_FIRST, processes=2).returncode == 4
    file = runs.job.run_directory / "job.yaml"
    file.write_text(file.read_text().replace("processes: 2", "processes: 1") + "# by me\n")
    done = runs.command("resume")
    assert (done.returncode, done.stdout) == (0, "[0] one of 1 attempt 1\n"), done.stderr


def test_a_run_that_was_moved_is_planned_anew_when_asked(runs: Runs) -> None:
    assert runs.job.launch(FAILS_FIRST, processes=1).returncode == 4
    moved = runs.job.folder / "elsewhere" / "job" / "moved"
    moved.parent.mkdir(parents=True)
    runs.job.run_directory.resolve().rename(moved)
    refused = runs.command("resume", str(moved))
    assert refused.returncode == 2
    assert "the run was moved" in refused.stderr
    (moved / "plan.json").write_text("{}")
    assert "the run's plan can't be read: KeyError('name')" in runs.command("resume", str(moved)).stderr
    done = runs.command("resume", str(moved), "--replan")
    assert (done.returncode, done.stdout) == (0, "[0] one of 1 attempt 1\n"), done.stderr
    assert json.loads((moved / "plan.json").read_text())["run_directory"] == str(moved)


def test_a_new_launch_names_the_run_that_could_go_on(runs: Runs) -> None:
    assert runs.job.launch("1 / 0", processes=1).returncode == 4
    first = runs.job.run_directory.resolve()
    (first / "checkpoints" / "step-0000000001").mkdir(parents=True)
    done = runs.job.launch("print('anew')", processes=1)
    assert done.returncode == 0
    assert f"a new run; the one before ended before its training had, 'hvdtrain resume {first}'" in done.stderr
    assert "resume" not in runs.job.launch("print('anew')", processes=1).stderr
