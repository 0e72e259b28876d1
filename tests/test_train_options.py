"""Options and tasks that can't be used: what, where, and how to fix it, before any training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError, InputError, UsageError
from hvdtrain.train.load import load_run, load_task
from hvdtrain.train.options import Options, parse_options

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ('{"epoch": 3}', ["options.epoch: unknown option; did you mean 'epochs'?"]),
        ('{"learning": 3}', ["options.learning: unknown option; there are batch_size, epochs, evaluate_every_epochs, "
                             "evaluate_first, log_every_steps, lr, lr_decay, lr_scaling, seed, warmup_epochs"]),
        ('{"epochs": 0}', ["options.epochs: must be greater than or equal to 1, not 0"]),
        ('{"epochs": 2.5}', ["options.epochs: must be a valid integer, not 2.5"]),
        ('{"epochs": "2"}', ["options.epochs: must be a valid integer, not '2'"]),
        ('{"epochs": true}', ["options.epochs: must be a valid integer, not True"]),
        ('{"epochs": null}', ["options.epochs: must be a valid integer, not None"]),
        ('{"lr": NaN}', ["options.lr: must be a finite number, not nan"]),
        ('{"lr": -1, "seed": -1}', ["options.lr: must be greater than 0, not -1",
                                    "options.seed: must be greater than or equal to 0, not -1"]),
        ('{"lr_scaling": "cubic"}', ["options.lr_scaling: must be 'none', 'linear' or 'sqrt', not 'cubic'"]),
        ('{"warmup_epochs": 2.5}', ["options: warmup_epochs (2.5) can't be more than epochs (1)"]),
        ("[]", ["options: must be an object"]),
        ("{", ["options: invalid JSON: EOF while parsing an object at line 1 column 1"]),
    ],
)  # fmt: skip
def test_bad_options(text: str, messages: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_options(Options, text)
    assert [str(problem) for problem in caught.value.problems] == messages


def test_whole_numbers_are_fine_as_rates() -> None:
    assert parse_options(Options, '{"lr": 1, "warmup_epochs": 1}').lr == 1.0


def test_the_page_has_every_option_and_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", (DOCS / "tasks.md").read_text(), re.MULTILINE)
    defaults = {name: json.dumps(field.default).strip('"') for name, field in Options.model_fields.items()}
    assert dict(rows) == defaults


TASKS = """
from hvdtrain.train.task import Options, Task

class Unfinished(Task):
    def model(self): ...
    def loss(self, model, batch): ...

class Complete(Unfinished):
    def optimizer(self, model, lr): ...
    def train_data(self): ...
    def backend(self, *, compression): ...

class More(Options):
    width: int = 3

class WithOptions(Complete):
    options: More

not_a_class = 3

class NoTask: ...
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module of tasks in the current folder; its name differs by test, as modules stay loaded."""
    name = re.sub(r"\W", "_", request.node.name)[:60]
    (tmp_path / f"{name}.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return name


def test_a_task_of_the_current_folder_with_its_own_options(tasks: str) -> None:
    task = load_task(f"{tasks}:WithOptions", '{"width": 5, "epochs": 2}')
    assert (task.options.width, task.options.epochs) == (5, 2)  # type: ignore[attr-defined]
    assert type(load_task(f"{tasks}:Complete", "{}").options) is Options
    with pytest.raises(InputError, match=r"options\.widht: unknown option; did you mean 'width'"):
        load_task(f"{tasks}:WithOptions", '{"widht": 5}')


@pytest.mark.parametrize(
    ("class_name", "message"),
    [
        ("Unfinished", "has no backend(), optimizer(), train_data()"),
        ("Complet", "did you mean 'Complete'?"),
        ("not_a_class", "isn't a task"),
        ("NoTask", "isn't a task"),
    ],
)
def test_a_class_that_is_no_task(tasks: str, class_name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_task(f"{tasks}:{class_name}", "{}")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["train", "train.py", "a/b:C", ":C", "a:", "a:b:c", "a b:C"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match="isn't of the form module:Class"):
        load_task(name, "{}")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("hvdtrain.tasks.gtp:ByteGPT", "did you mean 'hvdtrain.tasks.gpt'?"),
        ("hvdtrain.taks.gpt:ByteGPT", "did you mean 'hvdtrain.tasks.gpt'?"),
        ("qqqqqq:Task", "put its file beside the job spec, or install its package"),
    ],
)
def test_a_module_that_is_not_there(name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no module") as caught:
        load_task(name, "{}")
    assert caught.value.fix == fix


def test_what_a_module_itself_misses_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "misses_a_package.py").write_text("import package_that_nobody_has")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with pytest.raises(ModuleNotFoundError, match="package_that_nobody_has"):
        load_task("misses_a_package:Task", "{}")


def test_the_run_as_the_launcher_describes_it() -> None:
    settings = '{"checkpoint": {"every_steps": null, "keep": 5}, "compression": "fp16"}'
    environment = {
        contract.TASK: "a:B", contract.RUN_DIRECTORY: "/r", contract.ATTEMPT: "2", contract.SETTINGS: settings
    }  # fmt: skip
    run = load_run(environment)
    assert (run.name, run.folder, run.attempt) == ("a:B", Path("/r"), 2)
    assert (run.settings.checkpoint.every_steps, run.settings.checkpoint.keep) == (None, 5)
    assert run.settings.compression == "fp16"


def test_a_run_by_hand_needs_only_a_task_and_a_folder() -> None:
    run = load_run({contract.TASK: "a:B", contract.RUN_DIRECTORY: "/r"})
    assert (run.attempt, run.settings.checkpoint.every_steps, run.settings.compression) == (0, 100, "none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({contract.TASK: ""}, "HVDTRAIN_TASK isn't set"),
        ({contract.RUN_DIRECTORY: ""}, "HVDTRAIN_RUN_DIRECTORY isn't set"),
        ({contract.ATTEMPT: "first"}, "HVDTRAIN_ATTEMPT is 'first'"),
        ({contract.SETTINGS: '{"compression": "int8"}'}, "HVDTRAIN_SETTINGS: compression: Input should be"),
        ({contract.SETTINGS: "{"}, "HVDTRAIN_SETTINGS: Invalid JSON"),
    ],
)
def test_a_bad_environment(change: dict[str, str], message: str) -> None:
    with pytest.raises(HvdtrainError) as caught:
        load_run({contract.TASK: "a:B", contract.RUN_DIRECTORY: "/r"} | change)
    assert message in caught.value.what
    assert caught.value.fix
