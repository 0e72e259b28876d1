"""Interrupted PyTorch trainings go on as if nothing had been: signals at random steps, damaged checkpoints."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_processes import PLAIN, horovodrun

from hvdtrain import contract

pytestmark = pytest.mark.processes

PATIENCE_S = 240

# Dropout, and data that is augmented with the random numbers of PyTorch, numpy and Python. INTERRUPTS gives for some
# attempts [step, signal, rank]: in that step of the attempt the rank sends itself the signal.
CASES = """
import json, os, random, sys, time
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from hvdtrain.train.torch import Options, Task

RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
STEP, NUMBER, WHO = json.loads(os.environ["INTERRUPTS"]).get(os.environ["HVDTRAIN_ATTEMPT"], [-1, 0, 0])
STEP_S = float(os.environ.get("STEP_S", 0))


class Augmented(Dataset):
    def __init__(self, samples):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(samples, 12, generator=generator)
        self.labels = torch.randint(3, (samples,), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        noise = torch.rand(()) + np.random.rand() + random.random()
        return self.images[number] + 0.1 * float(noise), self.labels[number], number


class CaseOptions(Options):
    hidden: int = 16
    loaders: int = 0


class Case(Task):
    options: CaseOptions
    calls = 0

    def model(self):
        torch.manual_seed(RANK)
        hidden = self.options.hidden
        return nn.Sequential(
            nn.Linear(12, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Dropout(0.4),
            nn.Linear(hidden, 3),
        )

    def optimizer(self, model, lr):
        return torch.optim.AdamW(model.parameters(), lr)

    def train_data(self):
        return Augmented(100)

    def eval_data(self):
        return Augmented(21)

    def batches(self, dataset, indices):
        return DataLoader(dataset, batch_sampler=indices, num_workers=self.options.loaders)

    def loss(self, model, batch):
        images, labels, numbers = batch
        if model.training:
            time.sleep(STEP_S)
            self.calls += 1
            if self.calls == STEP and WHO == RANK:
                if self.options.loaders:
                    os.killpg(0, NUMBER)
                else:
                    os.kill(os.getpid(), NUMBER)
            sys.stdout.write(f"TRAINED {numbers.tolist()}\\n")
            sys.stdout.flush()
        return functional.cross_entropy(model(images), labels)


class Other(Case):
    pass
"""

OPTIONS = {"epochs": 3, "lr": 0.02, "lr_decay": "cosine", "warmup_epochs": 1}


@dataclass
class Ended:
    """One attempt."""

    status: int
    output: str

    @property
    def trained(self) -> list[int]:
        """Numbers of the samples in steps that this attempt has begun."""
        lists = [line[line.index("TRAINED ") + 8 :] for line in self.output.splitlines() if "TRAINED " in line]
        return [number for numbers in lists for number in json.loads(numbers)]


class Runner:
    """Starts attempts of one run in a folder."""

    def __init__(self, folder: Path, size: int, controller: str = "gloo") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cases.py").write_text(CASES)
        self.folder = folder
        self.size = size
        self.controller = controller
        self.attempts = 0

    def __call__(
        self, interrupt: tuple[int, int, int] | None = None, *, task: str = "Case", every: Any = 4, **options: Any
    ) -> Ended:
        command = [sys.executable, "-m", "hvdtrain.train"]
        if self.size > 1:
            command = [*horovodrun(self.controller, self.size), *command]
        settings = {"checkpoint": {"every_steps": every, "keep": 3}}
        environment = PLAIN | {
            contract.TASK: f"cases:{task}",
            contract.OPTIONS: json.dumps({"batch_size": 12 // self.size, **OPTIONS, **options}),
            contract.SETTINGS: json.dumps(settings),
            contract.RUN_DIRECTORY: str(self.folder / "run"),
            contract.ATTEMPT: str(self.attempts),
            "INTERRUPTS": json.dumps({self.attempts: interrupt} if interrupt else {}),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        self.attempts += 1
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            start_new_session=True,
        )
        return Ended(done.returncode, done.stdout)

    @property
    def checkpoints(self) -> list[Path]:
        return checkpoints(self.folder / "run")

    def final(self) -> dict[str, Any]:
        return final(self.folder / "run")


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / contract.CHECKPOINTS).glob("step-*"))


def final(run: Path) -> dict[str, Any]:
    """Everything in the newest checkpoint but the random streams."""
    import torch

    newest = checkpoints(run)[-1]
    state = json.loads((newest / "state.json").read_text())
    return {"state": state, **{name: torch.load(newest / f"{name}.pt") for name in ("model", "optimizer")}}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for part, inner in value.items() for key, leaf in flat(inner, f"{name}.{part}").items()}
    if isinstance(value, (list, tuple)):
        return {key: leaf for part, inner in enumerate(value) for key, leaf in flat(inner, f"{name}[{part}]").items()}
    return {name: value}


def assert_identical(one: dict[str, Any], other: dict[str, Any]) -> None:
    import torch

    ours, theirs = flat(one), flat(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name], name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Runner]:
    """A training without interruption, by 1 and by 2 ranks."""
    runners = {size: Runner(tmp_path_factory.mktemp(f"undisturbed-{size}"), size) for size in (1, 2)}
    for runner in runners.values():
        done = runner()
        assert done.status == 0, done.output
        assert runner.checkpoints[-1].name == contract.checkpoint_name(27)
    return runners


@pytest.mark.parametrize("seed", [1])
def test_one_rank_interrupted_again_and_again_ends_bit_identical(
    tmp_path: Path, undisturbed: dict[int, Runner], seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311
    runner = Runner(tmp_path, 1)
    step = 0
    for number in chance.sample([signal.SIGKILL, signal.SIGTERM, signal.SIGTERM], 3):
        ended = runner((chance.randrange(1, 8), number, 0))
        if number == signal.SIGTERM:
            assert ended.status == 0, ended.output
            assert f"stopped at step {int(runner.checkpoints[-1].name[5:])}; checkpoint saved" in ended.output
        else:
            assert ended.status == -signal.SIGKILL
        if step:
            assert f"resumed from step {step}: epoch {1 + step // 9}/3" in ended.output
        step = int(runner.checkpoints[-1].name[5:]) if runner.checkpoints else 0
    ended = runner()
    assert ended.status == 0, ended.output
    assert "done after 3 epochs, 27 steps" in ended.output
    assert_identical(runner.final(), undisturbed[1].final())


@pytest.fixture(params=["gloo", "mpi"])
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_stop_that_one_rank_alone_is_asked_for(
    tmp_path: Path, undisturbed: dict[int, Runner], controller: str
) -> None:
    runner = Runner(tmp_path, 2, controller)
    stopped = runner((random.Random(controller).randrange(5, 9), signal.SIGTERM, 1))  # noqa: S311
    assert stopped.status == 0, stopped.output
    step = int(runner.checkpoints[-1].name[5:])
    assert stopped.output.count(f"stopped at step {step}; checkpoint saved") == 1
    ended = runner()
    assert ended.status == 0, ended.output
    assert f"resumed from step {step}" in ended.output
    assert_identical(runner.final(), undisturbed[2].final())


class Launch:
    """`hvdtrain launch` of two ranks, in a folder."""

    def __init__(self, folder: Path, controller: str, interrupts: dict[int, tuple[int, int, int]], **env: str) -> None:
        (folder / "cases.py").write_text(CASES)
        spec = {
            "task": "cases:Case",
            "options": {"batch_size": 6, **OPTIONS},
            "processes": 2,
            "hosts": {"list": ["localhost:2"]},
            "controller": controller,
            "checkpoint": {"every_steps": 4},
            "restarts": {"backoff_s": 0},
            "env": {"set": {"OMP_NUM_THREADS": "1", "INTERRUPTS": json.dumps(interrupts), **env}},
        }
        (folder / "job.yaml").write_text(json.dumps(spec))
        self._folder = folder

    def __call__(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self._folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    @property
    def run(self) -> Path:
        return self._folder / "runs" / "job" / "latest"


def test_lost_ranks_are_restarted_by_the_launcher(
    tmp_path: Path, undisturbed: dict[int, Runner], controller: str
) -> None:
    chance = random.Random(controller)  # noqa: S311
    kills = {attempt: (chance.randrange(6, 10), int(signal.SIGKILL), 1 - attempt) for attempt in (0, 1)}
    launch = Launch(tmp_path, controller, kills)
    process = launch("-m", "hvdtrain", "launch", "job.yaml")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert "resumed from step" in output
    attempts = [json.loads(line)["attempt"] for line in (launch.run / contract.METRICS_FILE).read_text().splitlines()]
    assert attempts == sorted(attempts)
    assert set(attempts) == {0, 1, 2}
    assert_identical(final(launch.run), undisturbed[2].final())


def test_a_launch_that_is_stopped_saves_and_is_resumed(
    tmp_path: Path, undisturbed: dict[int, Runner], controller: str
) -> None:
    launch = Launch(tmp_path, controller, {}, STEP_S="0.2")
    process = launch("-m", "hvdtrain", "launch", "job.yaml")
    assert process.stdout
    steps = 0
    while steps < random.Random(controller).randrange(2, 10):  # noqa: S311
        line = process.stdout.readline()
        assert line, "the launch has ended"
        steps += line.startswith("[0] TRAINED")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143, output
    step = int(checkpoints(launch.run)[-1].name[5:])
    assert steps <= step < 27
    assert f"stopped at step {step}; checkpoint saved" in output
    process = launch("-m", "hvdtrain", "resume")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert f"resumed from step {step}" in output
    assert_identical(final(launch.run), undisturbed[2].final())


def test_processes_that_load_data_outlive_the_signal(tmp_path: Path) -> None:
    """The launcher signals the rank's whole process group."""
    runner = Runner(tmp_path, 1)
    stopped = runner((5, signal.SIGTERM, 0), loaders=2)
    assert stopped.status == 0, stopped.output
    assert "stopped at step 5; checkpoint saved" in stopped.output
    assert runner(loaders=2).output.count("resumed from step 5") == 1


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_loses_no_sample_and_takes_none_twice(tmp_path: Path, before: int, after: int) -> None:
    first = Runner(tmp_path, before)
    stopped = first((4, signal.SIGTERM, 0), every=None, epochs=1, warmup_epochs=0)
    assert stopped.status == 0, stopped.output
    state = json.loads((first.checkpoints[-1] / "state.json").read_text())
    assert 0 < state["epoch_samples"] == len(stopped.trained) < 100
    second = Runner(tmp_path, after)
    ended = second(every=None, epochs=1, warmup_epochs=0, batch_size=8)
    assert ended.status == 0, ended.output
    assert f"the checkpoint is of {before} worker{'s' * (before > 1)}, this is {after} worker" in ended.output
    assert sorted(stopped.trained + ended.trained) == list(range(100))


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "optimizer.pt", 100)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = Runner(tmp_path_factory.mktemp("stopped"), 1)
    ended = runner((14, signal.SIGTERM, 0))
    assert [path.name for path in runner.checkpoints] == [contract.checkpoint_name(step) for step in (8, 12, 14)]
    assert "stopped at step 14; checkpoint saved" in ended.output
    return runner


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, stopped: Runner, undisturbed: dict[int, Runner]
) -> None:
    """What else damage can be is in test_train_checkpoints.py."""
    shutil.copytree(stopped.folder, tmp_path, dirs_exist_ok=True)
    runner = Runner(tmp_path, 1)
    truncate(runner.checkpoints[-1])
    ended = runner()
    assert ended.status == 0, ended.output
    assert "warning: checkpoint step-0000000014 is passed over: optimizer.pt has 100 bytes, not " in ended.output
    assert "resumed from step 12: epoch 2/3, 36 of its 100 samples done" in ended.output
    assert_identical(runner.final(), undisturbed[1].final())


def test_where_no_checkpoint_is_whole_the_training_begins_anew_and_says_so(tmp_path: Path, stopped: Runner) -> None:
    shutil.copytree(stopped.folder, tmp_path, dirs_exist_ok=True)
    runner = Runner(tmp_path, 1)
    for checkpoint in runner.checkpoints:
        truncate(checkpoint)
    ended = runner((2, signal.SIGTERM, 0))
    assert "warning: no checkpoint is whole: the training starts from the beginning" in ended.output
    assert "stopped at step 2; checkpoint saved" in ended.output


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            "Other",
            {},
            "can't go on from checkpoint step-0000000014: it is of the task cases:Case, and this is cases:Other",
        ),
        ("Case", {"hidden": 8}, "options have changed: hidden was 16 and is 8"),
        ("Case", {"seed": 3}, "options have changed: seed was 0 and is 3"),
        ("Case", {"epochs": 1}, "it is in epoch 2, and options.epochs is 1"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    stopped: Runner, task: str, options: dict[str, Any], message: str
) -> None:
    ended = stopped(task=task, **options)
    assert ended.status == contract.BAD_TASK_STATUS
    assert message in ended.output
    assert "Traceback" not in ended.output


def test_what_may_change_may_change(tmp_path: Path, stopped: Runner) -> None:
    """More epochs, another rate and another batch."""
    shutil.copytree(stopped.folder, tmp_path, dirs_exist_ok=True)
    ended = Runner(tmp_path, 1)(epochs=4, lr=0.1, batch_size=7)
    assert ended.status == 0, ended.output
    # 40 of 100 samples are left of the second epoch, and two epochs.
    assert "done after 4 epochs, 50 steps" in ended.output


def test_a_finished_run_that_is_started_again_is_done(tmp_path: Path, undisturbed: dict[int, Runner]) -> None:
    shutil.copytree(undisturbed[1].folder, tmp_path, dirs_exist_ok=True)
    ended = Runner(tmp_path, 1)()
    assert ended.status == 0, ended.output
    assert "resumed from step 27: all of 3 epochs done" in ended.output
    assert ended.trained == []


def test_a_checkpoint_that_can_not_be_written_ends_the_run(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / contract.CHECKPOINTS).write_text("a file where the folder would be")
    ended = runner()
    assert ended.status == 1
    assert "can't write the checkpoint of step 4: " in ended.output
    assert "fix: free some space" in ended.output
    assert len(ended.trained) < 100


def test_the_interval_is_chosen_and_told(tmp_path: Path) -> None:
    ended = Runner(tmp_path, 2)(every="auto", epochs=2)
    assert ended.status == 0, ended.output
    chosen = re.search(
        r"checkpoints every ([\d.,]+) s, about ([\d,]+) steps: saving stops the training for", ended.output
    )
    assert chosen, ended.output
    assert "a failure is expected every 86,400 s (none yet, so one a day for each host is assumed)" in ended.output
    steps = [int(path.name[5:]) for path in Runner(tmp_path, 2).checkpoints]
    assert steps[0] == 10
    assert steps[-1] == 18
