"""Elastic jobs on this machine: workers are lost, come back, are added and taken away, and no sample is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launching import PATIENCE_S, Job, descendants
from real_processes import wait_until_gone

pytestmark = pytest.mark.processes
VISITS = Path(__file__).with_name("visits.py")
OPTIONS = {"epochs": 2, "batch_size": 8, "lr": 0.5, "evaluate_every_epochs": None, "log_every_steps": 20}


class ElasticJob(Job):
    """Two or three workers that count the visits of each sample, with a hostfile that may be edited."""

    def hosts(self, slots: int) -> None:
        temporary = self.folder / "hosts.new"
        temporary.write_text(f"localhost slots={slots}\n")
        temporary.replace(self.folder / "hosts")

    @contextmanager
    def training(self, slots: int = 3, **settings: Any) -> Iterator[subprocess.Popen[str]]:
        """The launch, once it trains."""
        (self.folder / "visits.py").write_text(VISITS.read_text())
        self.hosts(slots)
        spec = {
            "task": "visits:Visits",
            "options": OPTIONS,
            "hosts": {"file": "hosts"},
            "elastic": {"min": 2, "max": 3, "cooldown_s": 1, "batch": "keep_global"},
            "restarts": {"backoff_s": 0.1},
        }
        for key, value in settings.items():
            spec[key] = {**spec[key], **value} if isinstance(spec.get(key), dict) else value  # type: ignore[dict-item]
        (self.folder / "job.yaml").write_text(json.dumps(spec))
        with (self.folder / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "hvdtrain", "launch", "job.yaml"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        try:
            self.wait(lambda: self.status["step"] > 3, process)
            yield process
        finally:
            process.kill()
            process.wait()

    def wait(self, condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
        """Until it holds; fails when the launch ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if (self.run_directory / "status.json").exists() and condition():
                return
            assert process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def happened(self, event: str, **fields: Any) -> bool:
        return any({"event": event, **fields}.items() <= record.items() for record in self.events)

    def command_of(self, rank: int) -> int:
        """Pid of a rank's command."""
        wrapper = next(known["pid"] for known in self.status["ranks"] if known["rank"] == rank)
        (pid,) = Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()
        return int(pid)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def results(self) -> dict[str, Any]:
        records = (self.run_directory / "metrics.jsonl").read_text().splitlines()
        return next(record for record in map(json.loads, reversed(records)) if "eval_visits" in record)


@pytest.fixture
def job(tmp_path: Path) -> ElasticJob:
    return ElasticJob(tmp_path)


def assert_exact(job: ElasticJob) -> None:
    """Every sample was trained once in each epoch."""
    assert job.results["eval_wrong"] == 0, job.output
    assert job.results["eval_visits"] == pytest.approx(OPTIONS["epochs"])


def test_a_lost_worker_is_gone_on_without_and_replaced(job: ElasticJob) -> None:
    with job.training(options={"step_s": 0.15}) as process:
        os.kill(job.command_of(1), signal.SIGKILL)
        job.wait(lambda: job.happened("resized", before=3, size=2), process)
        job.wait(lambda: job.happened("resized", before=2, size=3), process)
        assert process.wait(PATIENCE_S) == 0, job.output
    assert job.happened("worker_lost", rank=1, left=2)
    assert "rank 1 on " in job.output
    assert "was killed by SIGKILL; going on with 2 workers; its slot is free again in 1 s" in job.output
    assert "resized from 3 workers to 2 at step" in job.output
    assert "global batch 24 (kept), learning rate 0.5" in job.output
    assert job.status["state"] == "finished"
    assert job.status["attempt"] == 0
    assert_exact(job)


def test_a_wrapper_that_is_killed_takes_its_worker_with_it(job: ElasticJob) -> None:
    with job.training() as process:
        command = job.command_of(0)
        os.kill(next(known["pid"] for known in job.status["ranks"] if known["rank"] == 0), signal.SIGKILL)
        wait_until_gone([command], 10)
        assert process.wait(PATIENCE_S) == 0, job.output
    assert job.happened("worker_lost", rank=0)
    assert_exact(job)


def test_all_lost_at_once_begin_again_from_the_checkpoint(job: ElasticJob) -> None:
    with job.training(checkpoint={"every_steps": 10}) as process:
        job.wait(lambda: job.status["step"] > 15, process)
        for rank in range(3):
            os.kill(job.command_of(rank), signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 0, job.output
    assert job.status["attempt"] == 1
    assert "resumed from step" in job.output
    assert_exact(job)


def test_an_edited_hostfile_grows_and_shrinks_the_job(job: ElasticJob) -> None:
    with job.training(slots=2, options={"step_s": 0.1, "epochs": 4}, elastic={"batch": "keep_per_worker"}) as process:
        job.hosts(3)
        job.wait(lambda: job.happened("resized", before=2, size=3), process)
        (job.folder / "hosts").write_text("localhost slots=0\n")
        job.wait(lambda: "the hosts stay as they were" in job.output, process)
        job.hosts(2)
        job.wait(lambda: job.happened("resized", before=3, size=2), process)
        assert process.wait(PATIENCE_S) == 0, job.output
    assert "the hosts have 3 slots now, not 2" in job.output
    assert "global batch 24 (8 per worker)" in job.output
    assert not job.happened("worker_lost")


def test_the_hosts_of_a_program(job: ElasticJob) -> None:
    (job.folder / "slots").write_text("localhost:2")
    elastic = {"discovery": ["cat", "slots"]}
    with job.training(slots=2, options={"step_s": 0.1}, elastic=elastic) as process:
        (job.folder / "slots").write_text("localhost:3")
        job.wait(lambda: job.happened("resized", before=2, size=3), process)
        assert process.wait(PATIENCE_S) == 0, job.output


def test_too_few_workers_are_waited_for_and_not_for_ever(job: ElasticJob) -> None:
    elastic = {"cooldown_s": 1000, "timeout_s": 3}
    with job.training(slots=2, options={"step_s": 0.1}, elastic=elastic, restarts={"max": 0}) as process:
        everything = descendants(process.pid)
        os.kill(job.command_of(1), signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 5, job.output
        wait_until_gone(everything, 1)
    assert "1 of at least 2 workers: waiting for slots, for 3 s at most" in job.output
    assert "fewer than 2 workers for 3 s (elastic.timeout_s)" in job.output.splitlines()[-1]
    assert job.failure["rank"] == 1


def test_a_fault_of_the_task_is_not_tried_for_ever(job: ElasticJob) -> None:
    with job.training(options={"fails": True}) as process:
        (job.folder / "fail").touch()
        assert process.wait(PATIENCE_S) == 4, job.output
    assert job.failure["exception"] == "ValueError: the data is bad"


def test_a_worker_that_hangs_is_ended_and_the_others_go_on(job: ElasticJob) -> None:
    with job.training(options={"step_s": 0.1}, hang_timeout_s=5) as process:
        os.kill(job.command_of(2), signal.SIGSTOP)
        job.wait(lambda: job.happened("resized", before=3, size=2), process)
        assert process.wait(PATIENCE_S) == 0, job.output
    assert job.happened("hang", rank=2)
    assert_exact(job)


def test_a_stopped_job_goes_on_where_it_was(job: ElasticJob) -> None:
    with job.training(options={"step_s": 0.1}) as process:
        everything = descendants(process.pid)
        process.terminate()
        assert process.wait(PATIENCE_S) == 143, job.output
        wait_until_gone(everything, 1)
    assert "checkpoint saved" in job.output
    command = [sys.executable, "-m", "hvdtrain", "resume", "job"]
    done = subprocess.run(command, cwd=job.folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "resumed from step" in done.stdout
    assert_exact(job)


def test_keras(job: ElasticJob) -> None:
    options = {"epochs": 20, "batch_size": 32, "lr": 0.05, "lr_scaling": "linear"}
    settings = {"task": "hvdtrain.tasks.digits_keras:Digits", "elastic": {"batch": "keep_per_worker"}}
    with job.training(options=options, **settings) as process:
        os.kill(job.command_of(1), signal.SIGKILL)
        job.wait(lambda: job.happened("resized", before=3, size=2), process)
        assert process.wait(PATIENCE_S) == 0, job.output
    assert "global batch 64 (32 per worker), learning rate 0.1" in job.output
    records = map(json.loads, (job.run_directory / "metrics.jsonl").read_text().splitlines())
    assert max(record.get("eval_accuracy", 0) for record in records) > 0.95


LOSES_A_RANK_ON_TRIAL = """
import os, signal
from pathlib import Path
from hvdtrain.keras import compression
from hvdtrain.tasks.digits_keras import Digits

times, tries = compression._seconds_of_both, []

def times_or_end(values, wire):
    tries.append(values)
    if len(tries) == 2:
        try:
            Path("ended").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return times(values, wire)

compression._seconds_of_both = times_or_end
Task = Digits
"""


def test_a_worker_that_is_lost_while_the_others_come_together(job: ElasticJob) -> None:
    (job.folder / "fragile.py").write_text(LOSES_A_RANK_ON_TRIAL)
    options = {"epochs": 12, "batch_size": 32, "lr": 0.05}
    with job.training(options=options, task="fragile:Task", horovod={"compression": "auto"}) as process:
        os.kill(job.command_of(1), signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 0, job.output
    assert (job.folder / "ended").exists()
    assert [event["event"] for event in job.events].count("worker_lost") == 2, job.output
    assert job.status["attempt"] == 0
