"""Horovod's autotune: its log, the file that keeps the best values, and the runs that write and use it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import Job
from planning import plan_on

from hvdtrain.errors import StartError, UsageError
from hvdtrain.horovod.autotune import Effort, Found, Sample, effort, read_log, together
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.plan.tuned import Tuned, load_tuned, whole_mb, write_tuned
from hvdtrain.spec.loader import load_spec, resolved_yaml
from hvdtrain.spec.models import Environment, HorovodSettings, JobSpec
from hvdtrain.supervise.facts import read_tuned
from hvdtrain.supervise.preflight import check_before_start

HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,"
    "cycle_time_ms,tensor_fusion_threshold,score\n"
)
# As Horovod 0.28.1 wrote it, scores apart.
ROWS = "0,0,0, 1,5,4,46.5026\n0,0,0, 1,50,32,4.79171\n0,0,0, 1,26.9347,60.2591,81.25\n0,0,0, 1,10,8,23.5525\n"
BEST = Sample(60.2591, 26.9347, 81.25)
TUNED = Tuned(fusion_threshold_mb=60, cycle_time_ms=26.935, samples=21, finished=True, processes=2, hosts=1)


def test_the_best_row_of_a_log() -> None:
    assert read_log(HEADER + ROWS) == Found(BEST, samples=4, finished=False)


def test_the_best_row_comes_once_more_at_the_end() -> None:
    assert read_log(HEADER + ROWS + "0,0,0, 1,26.9347,60.2591,81.25\n") == Found(BEST, samples=4, finished=True)


@pytest.mark.parametrize("text", ["", HEADER, HEADER.strip(), ROWS, HEADER + "0,0,0, 1,5,4,0\n", "\0\n\0,\n"])
def test_a_log_without_a_score(text: str) -> None:
    assert read_log(text) is None


@pytest.mark.parametrize("row", ["0,0,0, 1,5,4,99999", "0,0,0\n", "0,0,0, 1,5,4,nan\n", "0,0,0, 1,5,4,inf\n", "x\n"])
def test_a_row_that_is_not_whole_does_not_count(row: str) -> None:
    assert read_log(HEADER + ROWS + row) == Found(BEST, samples=4, finished=False)


def test_attempts_count_together() -> None:
    other = Found(Sample(4, 5, 90.0), samples=2, finished=True)
    assert together([Found(BEST, 4, False), None, other]) == Found(other.best, samples=6, finished=True)
    assert together([None]) is None


def test_how_many_steps_it_takes() -> None:
    assert effort({}) == Effort(first=204, whole=1224, settings=21)
    few = {"WARMUP_SAMPLES": "1", "STEPS_PER_SAMPLE": "2", "BAYES_OPT_MAX_SAMPLES": "3"}
    assert effort({f"HOROVOD_AUTOTUNE_{name}": value for name, value in few.items()}) == Effort(22, 55, 4)


@pytest.mark.parametrize(("found", "given"), [(60.2591, 60), (0.3, 1), (0.0, 0)])
def test_horovodrun_takes_whole_megabytes(found: float, given: int) -> None:
    assert whole_mb(found) == given


def test_the_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    full = TUNED.model_copy(
        update={"score_mb_per_s": 81.25, "network": "tcp 10.0.0.0/8", "time": "12:00", "job": "1e3"}
    )
    target, link = tmp_path / "target.yaml", tmp_path / "tuned.yaml"
    link.symlink_to(target)
    for tuned in (TUNED, full):
        write_tuned(link, tuned)
        assert load_tuned(link) == tuned
    assert sorted(tmp_path.iterdir()) == [target, link]
    assert link.is_symlink()
    assert link.read_text().startswith("# What Horovod's autotune found best")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tuned.yaml").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_tuned(tmp_path / "tuned.yaml", TUNED)
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.yaml"]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", [": the file is empty: a file of tuned values has at least"]),
        ("hello\n", [":1:1: expected a mapping (lines such as 'cycle_time_ms: 2.5'), found the text 'hello'"]),
        ("cycle_time_ms: 1\n", [": 'fusion_threshold_mb' is missing"]),
        ("a: [\n", [":2:1: "]),
        (
            "fusion_threshold_mb: 0.5\ncycle_time_ms: soon\nlr: 1\n",
            [
                ":1:22: fusion_threshold_mb: expected a whole number, found the number 0.5",
                ":2:16: cycle_time_ms: expected a number, found the text 'soon'",
                ":3:1: unknown key 'lr'",
            ],
        ),
    ],
)
def test_a_damaged_or_foreign_file(tmp_path: Path, text: str, faults: list[str]) -> None:
    file = tmp_path / "tuned.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_tuned(file)
    for fault in faults:
        assert f"{file}{fault}" in str(caught.value)
    assert "fix: correct the file, or delete it and run once with horovod.autotune: true" in str(caught.value)
    assert caught.value.exit_status == 2


def test_the_path_counts_from_the_specs_folder(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("task: a:B\nhorovod: {tuned: kept/tuned.yaml, autotune: true}\n")
    spec = load_spec(job)
    assert spec.horovod.tuned == tmp_path / "kept" / "tuned.yaml"
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(resolved_yaml(spec))
    assert load_spec(resolved).horovod == spec.horovod


def test_which_jobs_read_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    assert read_tuned(spec_with(tuned=file)) is None
    write_tuned(file, TUNED)
    assert read_tuned(spec_with(tuned=file)) == TUNED
    file.write_text("damaged")
    assert read_tuned(spec_with(tuned=file, autotune=True)) is None
    assert read_tuned(spec_with()) is None


def spec_with(env: Environment | None = None, controller: str = "auto", **horovod: Any) -> JobSpec:
    return JobSpec(
        name="job",
        command=("python", "train.py"),
        directory=Path("/jobs"),
        controller=controller,
        env=env or Environment(),
        horovod=HorovodSettings(**horovod),
    )


def plan(job: JobSpec, *slots: int, tuned: Tuned | None = None, **facts: Any) -> LaunchPlan:
    return plan_on(job, *(slots or (2,)), tuned=tuned, **facts)


def arguments(made: LaunchPlan) -> list[str]:
    """Those for Horovod's own settings."""
    return list(made.argv[made.argv.index("--disable-cache") + 1 : made.argv.index("/env/bin/python")])


def test_autotune_keeps_a_log_and_holds_all_but_the_two_values() -> None:
    made = plan(spec_with(autotune=True, tuned=Path("/kept.yaml")))
    assert arguments(made) == ["--autotune", "--autotune-log-file", "/runs/1/autotune.csv"]
    assert made.environment["HOROVOD_CACHE_CAPACITY"] == "1024"
    assert made.environment["HOROVOD_HIERARCHICAL_ALLREDUCE"] == "0"
    assert made.tuning
    assert made.tuning.file == "/kept.yaml"
    assert "autotune: the best values are written to /kept.yaml" in made.reasons
    assert LaunchPlan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_autotune_leaves_what_the_user_says() -> None:
    env = Environment(set={"HOROVOD_CACHE_CAPACITY": "16"})
    made = plan(spec_with(env, autotune=True, fusion_threshold_mb=8, hierarchical_allreduce=True))
    assert arguments(made)[:3] == ["--fusion-threshold-mb", "8", "--hierarchical-allreduce"]
    assert made.environment["HOROVOD_CACHE_CAPACITY"] == "16"
    assert "HOROVOD_HIERARCHICAL_ALLREDUCE" not in made.environment
    assert made.tuning
    assert made.tuning.file == "/runs/1/tuned.yaml"


def test_tuned_values_are_used_and_named() -> None:
    made = plan(spec_with(tuned=Path("/kept.yaml")), tuned=TUNED)
    assert arguments(made) == ["--fusion-threshold-mb", "60", "--cycle-time-ms", "26.935"]
    assert made.tuning is None
    assert made.reasons[-2:] == (
        "fusion_threshold_mb 60 from /kept.yaml (best of 21 settings)",
        "cycle_time_ms 26.935 from /kept.yaml (best of 21 settings)",
    )


def test_the_users_own_values_come_first() -> None:
    env = Environment(set={"HOROVOD_CYCLE_TIME": "7"})
    made = plan(spec_with(env, tuned=Path("/k.yaml"), fusion_threshold_mb=0), 4, tuned=TUNED)
    assert arguments(made) == ["--fusion-threshold-mb", "0"]
    assert made.reasons[-2:] == (
        "fusion_threshold_mb 0 as the job spec says; /k.yaml has 60",
        "cycle_time_ms as the environment's HOROVOD_CYCLE_TIME says; /k.yaml has 26.935",
    )


def test_values_of_another_number_of_processes() -> None:
    cut_short = TUNED.model_copy(update={"samples": 1, "finished": False, "processes": 1})
    made = plan(spec_with(tuned=Path("/k.yaml")), 2, 2, tuned=cut_short)
    assert "cycle_time_ms 26.935 from /k.yaml (best of 1 setting, a search that was cut short)" in made.reasons
    assert made.reasons[-1] == (
        "/k.yaml was measured with 1 process on 1 host, and this job has 4 processes on 2 hosts: "
        "autotune again for values of its own"
    )


def test_a_file_that_is_not_there_yet() -> None:
    made = plan(spec_with(tuned=Path("/k.yaml")))
    assert arguments(made) == []
    assert made.reasons[-1] == "horovod.tuned: /k.yaml isn't there yet: run once with horovod.autotune: true"


@pytest.mark.parametrize(
    ("slots", "controller", "nccl", "reason"),
    [
        ((2,), "mpi", True, "hierarchical_allreduce has no effect: all processes are on one host"),
        ((2, 2), "mpi", False, "hierarchical_allreduce has no effect: Horovod was built without NCCL"),
        ((2, 2), "auto", True, "hierarchical_allreduce has no effect: Horovod does it under MPI alone"),
        ((2, 1), "mpi", True, "hierarchical_allreduce: hosts have different numbers of processes"),
        ((2, 2), "mpi", True, None),
    ],
)
def test_where_hierarchical_allreduce_works(
    slots: tuple[int, ...], controller: str, nccl: bool, reason: str | None
) -> None:
    made = plan(spec_with(controller=controller, hierarchical_allreduce=True), *slots, nccl=nccl)
    assert arguments(made) == ["--hierarchical-allreduce"]
    assert [text.startswith(reason or "") for text in made.reasons if "hierarchical" in text] == [True] * bool(reason)


def test_hierarchical_allreduce_can_be_refused() -> None:
    made = plan(spec_with(hierarchical_allreduce=False))
    assert arguments(made) == ["--no-hierarchical-allreduce"]
    assert not [text for text in made.reasons if "hierarchical" in text]


@pytest.mark.parametrize(
    ("name", "fault"), [("no/tuned.yaml", "is in a folder that doesn't exist"), ("", "is a folder")]
)
def test_where_the_file_cannot_be_is_found_before_the_start(tmp_path: Path, name: str, fault: str) -> None:
    job = spec_with(autotune=True, tuned=tmp_path / name).model_copy(update={"directory": tmp_path})
    with pytest.raises(StartError, match=fault):
        check_before_start(job, plan(job))


FEW = {
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": 1,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": 2,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": 3,
}
NEEDED = effort({name: str(value) for name, value in FEW.items()})
TRAINS = """
import os, sys
import horovod.torch as hvd, torch
hvd.init()
for step in range(int(os.environ["STEPS"])):
    handles = [hvd.allreduce_async(torch.ones(20000), name=f"layer{layer}") for layer in range(3)]
    for handle in handles:
        hvd.synchronize(handle)
print("uses", os.environ.get("HOROVOD_FUSION_THRESHOLD"), os.environ.get("HOROVOD_CYCLE_TIME"))
sys.exit(3 if os.environ.get("FAILS") and hvd.rank() else 0)
"""


class Autotuning(Job):
    """A job that autotunes in few steps, and keeps what it finds in ``tuned.yaml``."""

    def arguments(
        self, script: str, *options: str, steps: int = 4, autotune: bool = True, **settings: Any
    ) -> list[str]:
        command = super().arguments(script, *options, **settings)
        file = self.folder / "job.yaml"
        spec = json.loads(file.read_text())
        spec["env"] = {"set": {**FEW, "STEPS": steps, "OMP_NUM_THREADS": 1}}
        spec["horovod"] = {"autotune": autotune, "tuned": "tuned.yaml"}
        file.write_text(json.dumps(spec))
        return command

    @property
    def tuned(self) -> Path:
        return self.folder / "tuned.yaml"


@pytest.mark.processes
def test_a_run_tunes_and_a_later_one_uses_it(tmp_path: Path) -> None:
    job = Autotuning(tmp_path)
    done = job.launch(TRAINS, steps=NEEDED.whole)
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load(job.tuned.read_text())
    assert (written["samples"], written["finished"]) == (NEEDED.settings, True)
    assert (written["processes"], written["hosts"], written["job"]) == (2, 1, "job")
    assert written["score_mb_per_s"] > 0
    assert f"autotune: fusion_threshold_mb {written['fusion_threshold_mb']}, cycle_time_ms" in done.stderr
    assert f"; written to {job.tuned}" in done.stderr
    rows = (job.run_directory / "logs" / "attempt-0" / "autotune.csv").read_text().splitlines()[1:]
    # Without the response cache, with which Horovod would begin, scores say nothing of later runs.
    assert {row.split(",")[3] for row in rows} == {" 1"}

    later = job.launch(TRAINS, autotune=False, controller="mpi")
    assert later.returncode == 0, later.stderr
    assert f"cycle_time_ms {written['cycle_time_ms']:g} from {job.tuned}" in later.stderr
    threshold = written["fusion_threshold_mb"] * 1024 * 1024
    assert set(re.findall(r"uses .*", later.stdout)) == {f"uses {threshold} {written['cycle_time_ms']}"}


@pytest.mark.processes
def test_a_run_that_fails_keeps_what_it_found(tmp_path: Path) -> None:
    job = Autotuning(tmp_path)
    options = ("--set", "horovod.tuned=null", "--set", "env.set.FAILS=1")
    done = job.launch(TRAINS, *options, controller="mpi", steps=NEEDED.first)
    assert done.returncode == 4, done.stderr
    assert "(best of 1 so far, of about 4, " in done.stderr
    tuned = load_tuned(job.run_directory / "tuned.yaml")
    assert (tuned.samples, tuned.finished) == (1, False)


@pytest.mark.processes
def test_a_run_that_is_too_short_says_so(tmp_path: Path) -> None:
    job = Autotuning(tmp_path)
    job.tuned.write_text("what an earlier run found")
    done = job.launch(TRAINS, steps=NEEDED.first - 1)
    assert done.returncode == 0, done.stderr
    assert "too short to find anything: the first setting is scored after about 22 steps, all 4 after 55" in done.stderr
    assert job.tuned.read_text() == "what an earlier run found"
