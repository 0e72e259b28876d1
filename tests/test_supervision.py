"""What a run survives, how it ends, and what it says about it: real ranks, signals, full disks and little memory."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import CONTROLLERS, PATIENCE_S, RAISES, TRAINS_ON, Job, descendants, worker_pids
from real_processes import is_running, wait_until_gone

pytestmark = pytest.mark.processes

# The bar: so long after what happened no process of the job is left.
GONE_S = 10


@pytest.fixture(params=CONTROLLERS)
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


# --- the end of one process ------------------------------------------------------------------------------------------


def test_a_killed_rank(job: Job, controller: str) -> None:
    with job.running(TRAINS_ON, controller=controller) as process:
        worker_pids(process, 2)
        everything = descendants(process.pid)
        victim = next(pid for pid in everything if environment_of(pid).get("HVDTRAIN_HEARTBEAT") and rank_of(pid) == 1)
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        process.wait(PATIENCE_S)
        wait_until_gone(everything, GONE_S - (time.monotonic() - killed_at))
    assert process.returncode == 5
    failure = job.failure
    assert (failure["rank"], failure["kind"], failure["signal"]) == (1, "signal", "SIGKILL")
    assert job.status["state"] == "failed"
    assert job.status["exit_status"] == 5


def environment_of(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def rank_of(pid: int) -> int:
    environment = environment_of(pid)
    return int(environment.get("HOROVOD_RANK") or environment["OMPI_COMM_WORLD_RANK"])


def test_a_rank_that_raises(job: Job, controller: str) -> None:
    done = job.launch(RAISES, controller=controller)
    assert done.returncode == 4, done.stderr
    failure = job.failure
    assert (failure["rank"], failure["kind"], failure["exit_code"]) == (1, "exception", 1)
    assert failure["exception"] == "ValueError: the data of rank 1 is bad"
    assert failure["traceback"][0] == "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("import sys; sys.exit(137)", "exception", "ended with exit status 137 (128 + 9: a shell says so of"),
        ("import sys; sys.exit(130)", "exception", "ended with exit status 130 (128 + 2: a shell says so of"),
        ("import sys; sys.exit('no data')", "exception", "ended with exit status 1"),
        ("import ctypes; ctypes.string_at(0)", "signal", "was ended by SIGSEGV (Segmentation fault)"),
    ],
)
def test_other_ends(job: Job, code: str, kind: str, words: str) -> None:
    done = job.launch(code, processes=1)
    assert done.returncode == 4, done.stderr
    assert words in done.stderr
    assert job.failure["kind"] == kind


@needs_root
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir(), reason="needs the memory controller of cgroup v1")
def test_a_host_without_memory_is_told_from_somebodys_kill(job: Job) -> None:
    group = Path(f"/sys/fs/cgroup/memory/hvdtrain-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        code = f"""
import os
if os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    open("{group}/cgroup.procs", "w").write(str(os.getpid()))
    data = b"x" * (256 << 20)
import time; time.sleep(1000)
"""
        done = job.launch(code)
    finally:
        group.rmdir()
    assert done.returncode == 5, done.stderr
    assert re.search(r"rank 1 on \S+ was killed by the kernel: its host's memory ran out", done.stderr)
    assert (job.failure["rank"], job.failure["kind"]) == (1, "oom")


# --- hangs -----------------------------------------------------------------------------------------------------------

STOPS_ITSELF = """
import os, signal, time
import horovod.torch as hvd, torch
hvd.init()
def wait_here():
    os.kill(os.getpid(), signal.SIGSTOP)
    # It is woken to show its stack.
    time.sleep(1000)
for step in range(1000):
    if step == 3 and hvd.rank() == 1:
        wait_here()
    hvd.allreduce(torch.ones(4), name="gradient")
"""
DOES_NOT_JOIN = """
import time
import horovod.torch as hvd, torch
hvd.init()
def wait_here():
    time.sleep(1000)
for step in range(1000):
    if step == 3 and hvd.rank() == 1:
        wait_here()
    hvd.allreduce(torch.ones(4), name="gradient")
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (STOPS_ITSELF, "its process is stopped (state T)"),
        (DOES_NOT_JOIN, "the others wait in collectives that it didn't join (rank 1: allreduce.gradient)"),
    ],
    ids=["stopped", "missing"],
)
def test_a_hang_is_ended_and_the_rank_named(job: Job, controller: str, script: str, reason: str) -> None:
    """Plain Horovod waits for ever, under Gloo without a word."""
    done = job.launch(script, "--set", "hang_timeout_s=4", controller=controller)
    assert done.returncode == 6, done.stderr
    assert re.search(rf"hvdtrain: rank 1 on \S+ hung: {re.escape(reason)}", done.stderr.splitlines()[-1])
    assert (job.failure["rank"], job.failure["kind"]) == (1, "hang")
    log = (job.run_directory / "logs" / "attempt-0" / "rank-00001.log").read_text()
    assert "in wait_here" in log
    assert "in wait_here" in done.stderr
    if script == DOES_NOT_JOIN:
        # py-spy's, which sees below Python, more or less of it. A stopped process can't be looked into.
        assert re.search(r"^ +clock_nanosleep \(.*libc.*\n(.*\n)?(.*\n)? +wait_here \(", log, re.MULTILINE), log


# --- stopping --------------------------------------------------------------------------------------------------------

STUBBORN = TRAINS_ON.replace("import os", "import os, signal\nsignal.signal(15, signal.SIG_IGN)", 1)
SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(5)
    open(f"saved-{os.environ.get('HOROVOD_RANK') or os.environ['OMPI_COMM_WORLD_RANK']}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("pid", os.getpid())
while True:
    time.sleep(1000)
"""


def test_the_second_signal_kills(job: Job, controller: str) -> None:
    with job.running(STUBBORN, controller=controller) as process:
        worker_pids(process, 2)
        everything = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stdout
        assert "SIGINT: stopping the job (once more to kill it)" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
        assert process.returncode == 130
        wait_until_gone(everything, 1)
    assert job.status["state"] == "stopped"


def test_the_first_signal_leaves_time_to_save(job: Job, controller: str) -> None:
    with job.running(SAVES, controller=controller) as process:
        worker_pids(process, 2)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    assert process.returncode == 143
    assert sorted(path.name for path in job.folder.glob("saved-*")) == ["saved-0", "saved-1"]


def test_the_time_to_save_is_bounded(job: Job) -> None:
    with job.running(STUBBORN, "--set", "stop_grace_s=1") as process:
        worker_pids(process, 2)
        everything = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(GONE_S)
        wait_until_gone(everything, 1)
    assert process.returncode == 143


def test_an_early_signal_starts_nothing(job: Job, controller: str) -> None:
    with job.running("open('began', 'w')", controller=controller) as process:
        assert process.stdout
        process.stdout.readline()
        everything = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(3)
        wait_until_gone(everything, 1)
    assert process.returncode == 130
    assert not (job.folder / "began").exists()


# --- restarts --------------------------------------------------------------------------------------------------------

FAILS_ONCE = """
import os, signal
print("attempt", os.environ["HVDTRAIN_ATTEMPT"])
if os.environ["HVDTRAIN_ATTEMPT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lost_rank_begins_again(job: Job, controller: str) -> None:
    options = ["--set", "restarts.max=2", "--set", "restarts.backoff_s=0.5"]
    done = job.launch(FAILS_ONCE, *options, controller=controller)
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL; starting again in 0.5 s (restart 1 of 2)" in done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.endswith("1")) == ["[0] attempt 1", "[1] attempt 1"]
    assert (job.run_directory / "logs" / "attempt-1" / "rank-00001.log").read_text() == "attempt 1\n"
    assert [event["event"] for event in job.events if "attempt" in event["event"] or event["event"] == "ended"] == [
        "attempt_started",
        "attempt_failed",
        "attempt_started",
        "ended",
    ]
    assert (job.status["state"], job.status["attempt"]) == ("finished", 1)


def test_the_same_failure_is_not_repeated_for_ever(job: Job) -> None:
    done = job.launch("1 / 0", "--set", "restarts.max=9", "--set", "restarts.backoff_s=0")
    assert done.returncode == 4
    assert "not started again: it failed before its first step twice, in the same way" in done.stderr
    assert not (job.run_directory / "logs" / "attempt-2").exists()


def test_a_signal_while_waiting_for_the_restart(job: Job) -> None:
    with job.running("1 / 0", "--set", "restarts.max=9", "--set", "restarts.backoff_s=1000") as process:
        assert process.stdout
        for line in process.stdout:
            if "starting again in 1000 s" in line:
                break
        assert job.status["state"] == "restarting"
        process.send_signal(signal.SIGINT)
        assert process.wait(GONE_S) == 130
    assert job.status["state"] == "stopped"


# --- disks and terminals ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@needs_root
def test_a_disk_that_fills_up_does_not_end_the_job(job: Job, small_disk: Path) -> None:
    code = "import os\nfor i in range(30): print('x' * (1 << 20))\nprint('through')"
    done = job.launch(code, "--runs", str(small_disk), processes=1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0] through"
    assert done.stderr.count("No space left on device; the job goes on, its records have gaps") == 1


@needs_root
def test_a_full_disk_is_found_before_the_start(job: Job, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (15 << 20))
    done = job.launch("open('began', 'w')", "--runs", str(small_disk), processes=1)
    assert done.returncode == 3
    assert "can't write the run directory: No space left on device" in done.stderr
    assert "free some space, or choose another folder with --runs DIRECTORY" in done.stderr
    assert not (job.folder / "began").exists()
    assert list((small_disk / "job").iterdir()) == []


def test_a_console_on_a_full_disk_does_not_end_the_job(job: Job) -> None:
    command = f"{shlex.join(job.arguments('print(1); open(chr(119), chr(119))', processes=1))} >/dev/full 2>&1"
    done = subprocess.run(["bash", "-c", command], cwd=job.folder, env=job.environment, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert (job.folder / "w").exists()
    assert (job.run_directory / "logs" / "attempt-0" / "rank-00000.log").read_text() == "1\n"


def test_a_terminal_that_is_closed_does_not_end_a_job_that_ignores_it(job: Job) -> None:
    """As after `nohup` in a terminal that then goes away: writing gives EIO."""
    terminal, end = os.openpty()
    arguments = job.arguments("input_ = open('go'); print(input_.read()); open('w', 'w')", processes=1)
    os.mkfifo(job.folder / "go")
    process = subprocess.Popen(
        ["nohup", *arguments], cwd=job.folder, env=job.environment, stdout=end, stderr=end, stdin=subprocess.DEVNULL
    )
    os.close(end)
    with (job.folder / "go").open("w") as go:
        os.close(terminal)
        go.write("on")
    assert process.wait(PATIENCE_S) == 0
    assert (job.folder / "w").exists()


@pytest.mark.parametrize("value", ["/nonexistent", "/etc/passwd"])
def test_a_temporary_folder_that_cannot_be_used(job: Job, value: str) -> None:
    job.environment["TMPDIR"] = value
    done = job.launch("open('began', 'w')", processes=1)
    assert done.returncode == 3
    assert f"TMPDIR={value}: the folder for temporary files can't be used" in done.stderr
    assert not (job.folder / "began").exists()


def test_nothing_is_left_in_the_temporary_folder(job: Job, tmp_path: Path) -> None:
    """Neither of a launch that ends well nor of one that is killed before its workers have come."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    job.environment["TMPDIR"] = str(folder)
    assert job.launch("print(1)").returncode == 0
    with job.running("print(1)") as process:
        assert process.stdout
        process.stdout.readline()
        everything = descendants(process.pid)
        process.kill()
        wait_until_gone(everything, GONE_S)
    assert list(folder.glob("hvdtrain*")) == []


# --- records and secrets ---------------------------------------------------------------------------------------------

TOKEN = "s3cret-token-of-the-test"  # noqa: S105
WAITS = "import os, sys, time; print('pid', os.getpid(), os.environ['TOKEN'][::-1]); time.sleep(1000)"


def test_a_secret_is_on_no_command_line_and_in_no_file(job: Job, controller: str) -> None:
    job.environment["TOKEN"] = TOKEN
    with job.running(WAITS, "--set", "env.secrets=[TOKEN]", controller=controller) as process:
        worker_pids(process, 2)
        everything = descendants(process.pid)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in everything if is_running(pid)]
        assert len(lines) >= 5
        assert not [line for line in lines if TOKEN in line]
        # Only the ranks themselves have it.
        holders = [pid for pid in everything if TOKEN in environment_of(pid).values()]
        assert len(holders) == 2
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
    for path in job.run_directory.resolve().rglob("*"):
        assert not path.is_file() or TOKEN not in path.read_text(), path
    assert TOKEN[::-1] in (job.run_directory / "logs" / "attempt-0" / "rank-00000.log").read_text()


def test_the_run_directory_tells_what_ran_on_what(job: Job) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", "."], cwd=job.folder, check=True)
    (job.folder / "train.py").write_text("print(1)")
    subprocess.run(["git", "add", "train.py"], cwd=job.folder, check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], cwd=job.folder, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=job.folder, text=True).strip()
    assert job.launch("print(1)").returncode == 0
    known = json.loads((job.run_directory / "environment.json").read_text())
    assert known["code"] == {"commit": commit, "dirty": False}
    assert known["packages"]["horovod"] == "0.28.1"
    assert known["hosts"] == ["localhost"]
    assert job.launch("print(2)").returncode == 0
    assert json.loads((job.run_directory / "environment.json").read_text())["code"]["dirty"] is True
    assert job.run_directory.resolve().stat().st_mode & 0o777 == 0o700
