"""PyTorch tasks for real: horovodrun, several processes, Gloo and MPI."""

from __future__ import annotations

import json
import re
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

# A convolution and a dense layer on noise with a seed; `value` of each evaluation sample is its number.
CASES = '''
import os
import re
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset
from hvdtrain.train.torch import Options, Task

RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


class CaseOptions(Options):
    samples: int = 97
    eval_samples: int = 23
    momentum: float = 0.0
    clip: bool = False
    plain_dataset: bool = False
    per_sample: bool = False


class Case(Task):
    options: CaseOptions

    def model(self):
        torch.manual_seed(RANK)  # every rank another start: rank 0's must win
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))

    def optimizer(self, model, lr):
        groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": lr / 2}]
        return torch.optim.SGD(groups, lr, momentum=self.options.momentum)

    def train_data(self):
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.options.samples, 1, 6, 6, generator=generator)
        labels = torch.randint(3, (self.options.samples,), generator=generator)
        return Pairs(images, labels) if self.options.plain_dataset else TensorDataset(images, labels)

    def eval_data(self):
        number = torch.arange(self.options.eval_samples)
        return TensorDataset(torch.randn(len(number), 1, 6, 6, generator=torch.Generator().manual_seed(2)), number)

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="none" if self.options.per_sample else "mean")

    def metrics(self, model, batch):
        images, number = batch
        return {
            "value": number, "mean_value": number.double().mean(), "odd": number % 2 == 1,
            "logit": model(images)[:, 0],
        }

    def on_gradients(self, model):
        if self.options.clip:
            self.norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)


class Pairs(Dataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, number):
        assert type(number) is int
        return tuple(tensor[number] for tensor in self.tensors)


class OtherData(Case):
    """Rank 1 sees a sample more."""

    def train_data(self):
        images, labels = super().train_data().tensors
        return TensorDataset(images[: 96 + RANK], labels[: 96 + RANK])


class Raises(Case):
    def loss(self, model, batch):
        if RANK == 1:
            raise ValueError("rank 1 can't read its sample")
        return super().loss(model, batch)


class Diverges(Case):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("inf" if RANK == 1 else 1)


class Exits(Case):
    """In its third step."""

    steps = 0

    def loss(self, model, batch):
        self.steps += 1
        if self.steps == 3:
            raise SystemExit(0)
        return super().loss(model, batch)


class WrongShape(Case):
    def metrics(self, model, batch):
        return {"logits": model(batch[0])}


class Dropped(Case):
    """Says what its random numbers are."""

    def loss(self, model, batch):
        print(f"RANDOM {RANK} {torch.rand(()).item():.6f}", flush=True)
        return super().loss(model, batch)


class Normed(Case):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3))

    def optimizer(self, model, lr):
        return torch.optim.SGD(model.parameters(), lr)

    def metrics(self, model, batch):
        return {"mean": model[1].running_mean.sum()}
'''


@dataclass
class Result:
    """What a job left."""

    run: Path
    status: int
    output: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / contract.METRICS_FILE).read_text().splitlines()]

    @property
    def evaluation(self) -> dict[str, float]:
        """The last one."""
        record = next(record for record in reversed(self.records) if "eval_value" in record)
        return {name: value for name, value in record.items() if name.startswith("eval_")}

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run / contract.CHECKPOINTS).iterdir())

    def weights(self, name: str = "model.pt") -> dict[str, Any]:
        import torch

        newest = self.run / contract.CHECKPOINTS / self.checkpoints[-1]
        weights: dict[str, Any] = torch.load(newest / name)
        return weights


@pytest.fixture(params=["gloo", "mpi"])
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Jobs:
    """Starts jobs in a folder that holds `CASES`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "cases.py").write_text(CASES)

    def __call__(
        self,
        task: str = "Case",
        *,
        size: int = 2,
        controller: str = "gloo",
        settings: dict[str, Any] | None = None,
        check: bool = True,
        **options: Any,
    ) -> Result:
        run = self._folder / f"run-{len(list(self._folder.iterdir()))}"
        command = [sys.executable, "-m", "hvdtrain.train"]
        if size > 1:
            command = [*horovodrun(controller, size), *command]
        environment = PLAIN | {
            contract.TASK: f"cases:{task}",
            contract.OPTIONS: json.dumps(options),
            contract.SETTINGS: json.dumps(settings or {}),
            contract.RUN_DIRECTORY: str(run),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # More ranks than cores: Open MPI's would poll without giving way.
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
        )
        if check:
            assert done.returncode == 0, done.stdout
        return Result(run, done.returncode, done.stdout)


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


class Alone:
    """Trainings by one process, each done once for all tests that compare with it."""

    def __init__(self, folder: Path) -> None:
        self._jobs = Jobs(folder)
        self._done: dict[str, Result] = {}

    def __call__(self, **options: Any) -> Result:
        key = json.dumps(options, sort_keys=True)
        if key not in self._done:
            self._done[key] = self._jobs(size=1, **options)
        return self._done[key]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-5) -> None:
    import torch

    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("size", "samples", "options"),
    [
        (2, 97, {}),  # the last step has one sample: rank 1 has none
        (2, 103, {"momentum": 0.9, "per_sample": True}),  # 4 and 3
        (3, 97, {"momentum": 0.9, "clip": True}),  # one sample for three ranks
        (3, 104, {"plain_dataset": True}),  # 3, 3 and 2
    ],
)
def test_ranks_train_as_one_process_with_their_global_batch(
    jobs: Jobs, alone: Alone, controller: str, size: int, samples: int, options: dict[str, Any]
) -> None:
    """The bar: weights equal to 1e-5 (float32, SGD), under Gloo and MPI; and so is everything that is reported."""
    common = {"samples": samples, "epochs": 3, "lr": 0.2, "log_every_steps": 5, **options}
    expected = alone(batch_size=12, **common)
    # Far from where they began, or the comparison would say nothing.
    assert expected.losses[-1] < expected.losses[0] - 0.02
    assert expected.evaluation["eval_value"] == pytest.approx(11)
    assert expected.evaluation["eval_mean_value"] == pytest.approx(11)
    assert expected.evaluation["eval_odd"] == pytest.approx(11 / 23)
    together = jobs(size=size, controller=controller, batch_size=12 // size, **common)
    assert_same(together.weights(), expected.weights())
    assert together.losses == pytest.approx(expected.losses, abs=1e-5)
    assert together.evaluation == pytest.approx(expected.evaluation, abs=1e-5)


def test_evaluation_with_fewer_samples_than_ranks(jobs: Jobs) -> None:
    assert jobs(size=3, eval_samples=2).evaluation["eval_value"] == pytest.approx(0.5)


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_compression_rounds_gradients_and_still_trains(jobs: Jobs, compression: str, tolerance: float) -> None:
    common = {"samples": 96, "batch_size": 8, "epochs": 2, "lr": 0.2}
    exact = jobs(**common).weights()
    rounded = jobs(settings={"compression": compression}, **common).weights()
    assert_same(rounded, exact, tolerance=tolerance)
    assert any((rounded[name] - value).abs().max() > 1e-7 for name, value in exact.items())


def test_compression_that_is_chosen_by_trial_is_told_once(jobs: Jobs) -> None:
    common = {"samples": 96, "batch_size": 2, "epochs": 1, "lr": 0.2, "log_every_steps": 4}
    result = jobs(settings={"compression": "auto"}, **common)
    assert len(re.findall("compression: (?:none|bf16); gradients take .* s per step as they are", result.output)) == 1


def test_what_a_run_writes(jobs: Jobs) -> None:
    settings = {"checkpoint": {"every_steps": 3, "keep": 2}}
    result = jobs(
        settings=settings, samples=64, batch_size=8, epochs=2, momentum=0.9, log_every_steps=2, evaluate_first=True
    )
    # 4 steps an epoch, checkpoints after 3 and 6, and the last one.
    assert result.checkpoints == ["step-0000000006", "step-0000000008"]
    newest = result.run / contract.CHECKPOINTS / "step-0000000008"
    assert sorted(path.name for path in newest.iterdir()) == [
        "manifest.json", "model.pt", "optimizer.pt", "random.json", "state.json"
    ]  # fmt: skip
    state = json.loads((newest / "state.json").read_text())
    assert {name: state[name] for name in ("step", "epoch", "epoch_samples", "seed", "size", "task")} == {
        "step": 8, "epoch": 2, "epoch_samples": 0, "seed": 0, "size": 2, "task": "cases:Case"
    }  # fmt: skip
    middle = json.loads((newest.parent / "step-0000000006" / "state.json").read_text())
    assert (middle["epoch"], middle["epoch_samples"]) == (1, 32)
    assert result.weights("optimizer.pt")["state"][0]["momentum_buffer"].abs().sum() > 0

    steps = [record for record in result.records if "loss" in record]
    assert [(record["epoch"], record["step"]) for record in steps] == [(1, 2), (1, 4), (2, 6), (2, 8)]
    assert steps[0].keys() == {
        "time", "attempt", "rank", "epoch", "step", "loss", "lr", "samples_per_s", "step_time_s"
    }  # fmt: skip
    for record in steps:
        assert record["samples_per_s"] * record["step_time_s"] == pytest.approx(16)
    evaluations = [(record["epoch"], record["step"]) for record in result.records if "eval_value" in record]
    assert evaluations == [(0, 0), (1, 4), (2, 8)]
    assert "global batch 16 (8 per worker); learning rate 0.01" in result.output
    assert "done after 2 epochs, 8 steps" in result.output


def test_random_numbers_differ_by_rank_and_epoch_and_repeat(jobs: Jobs) -> None:
    def numbers(**options: Any) -> set[str]:
        output = jobs("Dropped", samples=16, batch_size=8, epochs=2, **options).output
        return {line[line.index("RANDOM") :] for line in output.splitlines() if "RANDOM" in line}

    first = numbers()
    assert len({line.split()[2] for line in first}) == 4
    assert numbers() == first
    assert numbers(seed=1).isdisjoint(first)


def test_running_statistics_are_rank_0s_in_evaluation_and_checkpoint(jobs: Jobs) -> None:
    result = jobs("Normed", samples=64, batch_size=8)
    measured = next(record["eval_mean"] for record in result.records if "eval_mean" in record)
    assert result.weights()["1.running_mean"].sum().item() == pytest.approx(measured, abs=1e-6)


def test_a_rank_that_raises_ends_the_job_with_its_traceback(jobs: Jobs, controller: str) -> None:
    result = jobs("Raises", controller=controller, check=False)
    assert result.status != 0
    assert "ValueError: rank 1 can't read its sample" in result.output


def test_a_loss_that_is_no_number_ends_the_job(jobs: Jobs, controller: str) -> None:
    result = jobs("Diverges", controller=controller, check=False)
    assert result.status != 0
    assert result.output.count("error: cases:Diverges: the loss is inf in epoch 1, by step 1") == 1
    assert "Traceback" not in result.output.split("error: cases")[0]


def test_ranks_with_different_data_are_told(jobs: Jobs, controller: str) -> None:
    result = jobs("OtherData", controller=controller, check=False)
    assert result.status != 0
    assert "rank 1 has 97 training and 23 evaluation samples, rank 0 has 96 and 23" in result.output


def test_metrics_of_another_shape_are_refused(jobs: Jobs) -> None:
    result = jobs("WrongShape", size=1, check=False)
    assert result.status == contract.BAD_TASK_STATUS
    assert "the task's metrics()['logits'] has shape [23, 3]" in result.output
    assert "(here [23])" in result.output


def test_no_data_is_told(jobs: Jobs) -> None:
    result = jobs(size=1, samples=0, check=False)
    assert result.status == contract.BAD_TASK_STATUS
    assert "train_data() has no samples" in result.output


def test_a_bad_option_is_told_once_and_before_horovod_starts(jobs: Jobs, controller: str) -> None:
    result = jobs(controller=controller, check=False, epoch=3)
    assert result.status != 0
    assert result.output.count("options.epoch: unknown option; did you mean 'epochs'?") == 1
    assert "Traceback (most recent call last)" not in result.output.split("did you mean")[0]


EXIT_MESSAGE = "the task called exit(0) before the training was done\n  fix: take exit() out of the task"


def test_a_task_that_exits_has_not_trained(jobs: Jobs) -> None:
    result = jobs("Exits", size=1, check=False)
    assert result.status == contract.BAD_TASK_STATUS
    assert f"error: cases:Exits: {EXIT_MESSAGE}" in result.output


def test_a_task_that_exits_when_it_is_imported_has_not_trained(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES + "raise SystemExit(0)\n")
    result = jobs(size=1, check=False)
    assert result.status == contract.BAD_TASK_STATUS
    assert f"error: cases:Case: {EXIT_MESSAGE}" in result.output
