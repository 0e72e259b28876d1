"""`hvdtrain launch` for real: horovodrun, two processes or more, both controllers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_processes import wait_until_gone

pytestmark = pytest.mark.processes

CONTROLLERS = ["gloo", "mpi"]
PATIENCE_S = 180


@pytest.fixture(params=CONTROLLERS)
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Job:
    """A spec in a folder of its own, whose command runs a Python script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}

    def arguments(self, script: str, *options: str, controller: str = "gloo", processes: int = 2) -> list[str]:
        (self.folder / "train.py").write_text(script)
        spec = {
            "command": ["python", "train.py"],
            "processes": processes,
            "hosts": {"list": [f"localhost:{processes}"]},
            "controller": controller,
        }
        (self.folder / "job.yaml").write_text(json.dumps(spec))
        return [sys.executable, "-m", "hvdtrain", "launch", "job.yaml", *options]

    def launch(self, script: str, *options: str, **settings: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.arguments(script, *options, **settings),  # type: ignore[arg-type]
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    @contextmanager
    def running(self, script: str, **settings: object) -> Iterator[subprocess.Popen[str]]:
        """The launch as a process, with its output merged; killed at the end if it lives on."""
        process = subprocess.Popen(
            self.arguments(script, **settings),  # type: ignore[arg-type]
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @property
    def run_directory(self) -> Path:
        return self.folder / "runs" / "job" / "latest"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


ALLREDUCE = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}: {total.item():g}")
hvd.barrier()
"""


def test_a_script_that_knows_nothing_of_hvdtrain(job: Job, controller: str) -> None:
    done = job.launch(ALLREDUCE, controller=controller)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2: 3", "[1] rank 1 of 2: 3"]
    assert f"controller {controller}: as the job spec says" in done.stderr
    logs = job.run_directory / "logs" / "attempt-0"
    assert (logs / "rank-00001.log").read_text() == "rank 1 of 2: 3\n"
    assert job.run_directory.resolve().stat().st_mode & 0o777 == 0o700


TORN = """
import os, sys, time
for i in range(2000):
    sys.stdout.write("begin ")
    sys.stdout.flush()
    sys.stdout.write(f"middle {i} ")
    sys.stdout.flush()
    sys.stdout.write("x" * 200 + " end\\n")
print("no end", end="")
"""


def test_lines_are_never_cut(job: Job, controller: str) -> None:
    """Plain `horovodrun --mpi` puts its tags into the middle of such lines."""
    done = job.launch(TORN, controller=controller)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] begin middle {i} {'x' * 200} end" for i in range(2000)] + [f"[{rank}] no end"]
    assert len(lines) == 4002


RAISES = """
import sys
import horovod.torch as hvd, torch
hvd.init()
for step in range(1000):
    if step == 3 and hvd.rank() == 1:
        raise ValueError("the data of rank 1 is bad")
    hvd.allreduce(torch.ones(4), name=f"step{step}")
"""


def test_the_first_failing_rank_comes_last_on_the_screen(job: Job, controller: str) -> None:
    done = job.launch(RAISES, controller=controller)
    assert done.returncode == 4, done.stderr
    *_, traceback_end, summary = done.stderr.splitlines()
    assert traceback_end == "hvdtrain:   ValueError: the data of rank 1 is bad"
    assert re.match(r"hvdtrain: rank 1 on \S+ ended with exit status 1 after [\d.]+ s; run directory: ", summary)


KILLED = """
import os, signal
import horovod.torch as hvd, torch
hvd.init()
for step in range(1000):
    if step == 3 and hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(4), name=f"step{step}")
"""


def test_a_killed_rank_is_named(job: Job, controller: str) -> None:
    done = job.launch(KILLED, controller=controller)
    assert done.returncode == 5, done.stderr
    assert "hvdtrain: rank 1 on " in done.stderr
    assert "was killed by SIGKILL" in done.stderr.splitlines()[-1]


TRAINS_ON = """
import os
import horovod.torch as hvd, torch
hvd.init()
print("pid", os.getpid())
while True:
    hvd.allreduce(torch.ones(4), name="x")
"""


def worker_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    pids: list[int] = []
    assert process.stdout
    for line in process.stdout:
        if match := re.match(r"\[\d+\] pid (\d+)", line):
            pids.append(int(match[1]))
            if len(pids) == count:
                return pids
    raise AssertionError("the launch ended")


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return children + [grandchild for child in children for grandchild in descendants(child)]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_nothing_is_left_after_a_signal(job: Job, controller: str, number: signal.Signals, status: int) -> None:
    """Plain horovodrun leaves orphans under MPI, or returns 0 after 20 s."""
    with job.running(TRAINS_ON, controller=controller) as process:
        worker_pids(process, 2)
        everything = descendants(process.pid)
        assert len(everything) >= 5  # horovodrun or mpirun, two wrappers, two commands
        process.send_signal(number)
        process.wait(PATIENCE_S)
        assert process.returncode == status
        wait_until_gone(everything, 10 if number == signal.SIGKILL else 1)


def test_a_killed_launcher_is_named(job: Job, controller: str) -> None:
    """Not a rank that fell with it."""
    with job.running(TRAINS_ON, controller=controller) as process:
        worker_pids(process, 2)
        everything = descendants(process.pid)
        name = {"gloo": "horovodrun", "mpi": "mpirun"}[controller]
        (pid, *_) = [pid for pid in everything if name in Path(f"/proc/{pid}/comm").read_text()]
        os.kill(pid, signal.SIGKILL)
        assert process.stdout
        last = process.stdout.read().splitlines()[-1]
        assert process.wait(PATIENCE_S) == 5
        assert last.startswith("hvdtrain: horovodrun was ended by SIGKILL (Killed) before the job was done after ")
        wait_until_gone(everything, 1)


def test_a_long_temporary_folder(job: Job) -> None:
    folder = job.folder / ("x" * 120)
    folder.mkdir()
    job.environment["TMPDIR"] = str(folder)
    done = job.launch("print('hi')")
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []


def test_more_processes_than_slots(job: Job) -> None:
    done = job.launch(ALLREDUCE, "--set", "processes=3")
    assert done.returncode == 2
    assert done.stderr == (
        "error: 3 processes, but the hosts have 2 slots\n"
        "  fix: ask for fewer processes, add hosts or slots, or set 'oversubscribe: true'\n"
    )
    assert not (job.folder / "runs").exists()


def test_oversubscribed_when_the_spec_says_so(job: Job, controller: str) -> None:
    done = job.launch(ALLREDUCE, "--set", "processes=3", "--set", "oversubscribe=true", controller=controller)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines())[2] == "[2] rank 2 of 3: 6"


ENVIRONMENT = """
import json, os
print(json.dumps({name: os.environ.get(name) for name in ("ODD", "FORWARDED", "TOKEN", "NOT_NAMED", "BASH_FUNC_f%%")}))
"""


def test_the_environment_is_what_the_spec_says(job: Job, controller: str) -> None:
    odd = "a 'b' \"c\"\n$HOME `id` \\ é"
    job.environment |= {"FORWARDED": "f w", "TOKEN": "s3cret-token", "NOT_NAMED": "x"}
    overrides = {"ODD": odd, "BASH_FUNC_f%%": "() { :; }"}
    done = job.launch(
        ENVIRONMENT,
        "--set", f"env.set={json.dumps(overrides)}",
        "--set", "env.forward=[FORWARDED]",
        "--set", "env.secrets=[TOKEN]",
        controller=controller,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = {
        "ODD": odd,
        "FORWARDED": "f w",
        "TOKEN": "s3cret-token",
        "NOT_NAMED": None,
        "BASH_FUNC_f%%": "() { :; }",
    }
    for line in done.stdout.splitlines():
        assert json.loads(line[4:]) == expected
    for path in job.run_directory.resolve().rglob("*"):
        if path.is_file() and not path.name.startswith("rank-"):
            assert "s3cret-token" not in path.read_text()


def test_a_dry_run_can_be_pasted(job: Job, controller: str) -> None:
    job.environment |= {"TOKEN": "s3cret 'token'"}
    script = ALLREDUCE + "import os; print(ascii(os.environ['ODD']), os.environ['TOKEN'])"
    odd = "two words\n'quoted' $HOME"
    shown = job.launch(
        script,
        "--dry-run",
        "--set", f"env.set={json.dumps({'ODD': odd})}",
        "--set", "env.secrets=[TOKEN]",
        controller=controller,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "s3cret" not in shown.stdout
    assert not (job.folder / "runs").exists()
    pasted = subprocess.run(
        ["bash", "-c", shown.stdout], env=job.environment, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert pasted.returncode == 0, pasted.stderr
    assert "rank 1 of 2: 3" in pasted.stdout
    assert f"{odd!a} s3cret 'token'" in pasted.stdout


def test_a_dry_run_for_programs_is_the_plan_that_runs(job: Job) -> None:
    shown = json.loads(job.launch(ALLREDUCE, "--dry-run", "--format", "json").stdout)
    assert job.launch(ALLREDUCE).returncode == 0
    ran = json.loads((job.run_directory / "plan.json").read_text())
    for plan in (shown, ran):
        del plan["environment"]["HVDTRAIN_RUN_DIRECTORY"], plan["run_directory"]
    assert shown == ran
    assert shlex.join(shown["argv"]).endswith("-m hvdtrain.worker python train.py")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "command=[python, tarin.py]"], "the script 'tarin.py' doesn't exist"),
        (["--set", "command=[no-such-program]"], "the program 'no-such-program' wasn't found or isn't executable"),
        (["--set", "directory=/nonexistent"], "the working directory doesn't exist"),
        (["--hosts", "far-away:2"], "this version starts workers on this machine only, and the plan has far-away"),
        (["--runs", "/proc/runs"], "can't write the run directory"),
    ],
)
def test_what_is_missing_is_found_before_the_start(job: Job, options: list[str], message: str) -> None:
    done = job.launch(ALLREDUCE, *options)
    assert done.returncode == 3, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_fails_at_once(job: Job, controller: str) -> None:
    done = job.launch("import no_such_module", controller=controller)
    assert done.returncode == 4, done.stderr
    assert done.stderr.splitlines()[-2] == "hvdtrain:   ModuleNotFoundError: No module named 'no_such_module'"


def test_a_reader_that_leaves_does_not_end_the_job(job: Job) -> None:
    command = f"{shlex.join(job.arguments(TORN))} 2>err | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=job.folder, env=job.environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, (job.folder / "err").read_text()
    assert len(done.stdout.splitlines()) == 1
    assert len((job.run_directory / "logs" / "attempt-0" / "rank-00000.log").read_text().splitlines()) == 2001
