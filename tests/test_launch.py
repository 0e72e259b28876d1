"""`hvdtrain launch` for real: horovodrun, two processes or more, both controllers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from launching import CONTROLLERS, PATIENCE_S, RAISES, TRAINS_ON, Job, descendants, worker_pids
from real_processes import wait_until_gone

pytestmark = pytest.mark.processes


@pytest.fixture(params=CONTROLLERS)
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


def test_mpi_takes_no_transport_that_hangs(job: Job) -> None:
    """horovodrun's own `^openib` would bring back what Debian's configuration leaves out."""
    done = job.launch("import os; print(os.environ['OMPI_MCA_pml'], os.environ['OMPI_MCA_btl'])", controller="mpi")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] ob1 ^openib,uct,ofi", "[1] ob1 ^openib,uct,ofi"]


WAITS = """
import time
import horovod.torch as hvd, torch
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    time.sleep(2)
began, busy = time.monotonic(), time.thread_time()
hvd.allreduce(torch.zeros(1))
print(f"waited {time.monotonic() - began > 1.5}, worked {time.thread_time() - busy > 0.5}")
"""


def test_a_rank_that_waits_for_others_leaves_them_the_core(job: Job, controller: str) -> None:
    done = job.launch(WAITS, controller=controller)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] waited True, worked False", "[1] waited False, worked False"]


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


def test_the_first_failing_rank_comes_last_on_the_screen(job: Job, controller: str) -> None:
    done = job.launch(RAISES, controller=controller)
    assert done.returncode == 4, done.stderr
    *_, traceback_end, summary = done.stderr.splitlines()
    assert traceback_end == "hvdtrain:   ValueError: the data of rank 1 is bad"
    # It may have been told to end by the others' end before it had ended by itself.
    assert re.match(
        r"hvdtrain: rank 1 on \S+ (ended with exit status 1|raised an exception) after [\d.]+ s; run directory: ",
        summary,
    )


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
import json, os, pathlib, time
values = {name: os.environ.get(name) for name in ("ODD", "FORWARDED", "NOT_NAMED", "BASH_FUNC_f%%")}
print(json.dumps(values | {"reversed": os.environ["TOKEN"][::-1]}))
print("the token is", os.environ["TOKEN"], flush=True)
if os.environ["HOROVOD_RANK" if "HOROVOD_RANK" in os.environ else "OMPI_COMM_WORLD_RANK"] == "1":
    while not pathlib.Path("printed").exists():
        time.sleep(0.01)
    raise ValueError(os.environ["TOKEN"])
pathlib.Path("printed").touch()
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
    assert done.returncode == 4, done.stderr
    expected = {
        "ODD": odd,
        "FORWARDED": "f w",
        "NOT_NAMED": None,
        "BASH_FUNC_f%%": "() { :; }",
        "reversed": "nekot-terc3s",
    }
    lines = sorted(done.stdout.splitlines())
    assert [json.loads(line[4:]) for line in lines if "{" in line] == [expected, expected]
    assert [line for line in lines if "{" not in line] == ["[0] the token is ***", "[1] the token is ***"]
    assert job.failure["exception"] == "ValueError: ***"
    assert "s3cret-token" not in done.stderr
    for path in job.run_directory.resolve().rglob("*"):
        if path.is_file():
            assert "s3cret-token" not in path.read_text()


def test_a_dry_run_can_be_pasted(job: Job, controller: str) -> None:
    job.environment |= {"TOKEN": "s3cret 'token'"}
    # In one piece: mpirun marks each, wherever in a line it begins.
    script = ALLREDUCE + (
        "import os, sys; sys.stdout.write(f\"{ascii(os.environ['ODD'])} {os.environ.get('TOKEN')}\\n\")"
    )
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
    assert "# without the secrets, which only the launch itself hands over: TOKEN\n" in shown.stdout
    assert not (job.folder / "runs").exists()
    pasted = subprocess.run(
        ["bash", "-c", shown.stdout], env=job.environment, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert pasted.returncode == 0, pasted.stderr
    assert "rank 1 of 2: 3" in pasted.stdout
    assert f"{odd!a} None" in pasted.stdout


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
        (["--hosts", "far-away:2"], "far-away: name: its name can't be resolved"),
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
    *_, traceback_end, cause, fix, _ = done.stderr.splitlines()
    assert traceback_end == "hvdtrain:   ModuleNotFoundError: No module named 'no_such_module'"
    assert re.match(r"hvdtrain: cause: the Python that rank [01] runs has no module 'no_such_module'", cause)
    assert fix.startswith("hvdtrain: fix: python -m pip install the package of 'no_such_module'")


def test_a_reader_that_leaves_does_not_end_the_job(job: Job) -> None:
    command = f"{shlex.join(job.arguments(TORN))} 2>err | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=job.folder, env=job.environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, (job.folder / "err").read_text()
    assert len(done.stdout.splitlines()) == 1
    assert len((job.run_directory / "logs" / "attempt-0" / "rank-00000.log").read_text().splitlines()) == 2001
