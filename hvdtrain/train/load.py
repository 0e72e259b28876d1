"""From the names in the environment to a task that can be trained."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from pydantic import ValidationError

from hvdtrain import contract
from hvdtrain.errors import UsageError
from hvdtrain.train.loop import Run
from hvdtrain.train.options import parse_options
from hvdtrain.train.settings import Settings
from hvdtrain.train.task import Task

_BUILT_IN = "hvdtrain.tasks"


def load_run(environment: Mapping[str, str]) -> Run:
    """What the launcher says about this run.

    Raises:
        UsageError: a variable is missing or can't be read, as in a command of one's own.
    """
    for name in (contract.TASK, contract.RUN_DIRECTORY):
        if not environment.get(name):
            raise UsageError(f"{name} isn't set", fix="start the task with `hvdtrain launch JOB.yaml`")
    attempt = environment.get(contract.ATTEMPT, "0")
    if not attempt.isdecimal():
        raise UsageError(f"{contract.ATTEMPT} is {attempt!r}", fix="give a number from 0, or leave it out")
    try:
        settings = Settings.model_validate_json(environment.get(contract.SETTINGS) or "{}")
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise UsageError(
            f"{contract.SETTINGS}: {place + ': ' if place else ''}{fault['msg']}",
            fix='give a JSON object such as {"checkpoint": {"every_steps": 100, "keep": 3}, "compression": "none"}',
        ) from error
    return Run(environment[contract.TASK], Path(environment[contract.RUN_DIRECTORY]), int(attempt), settings)


def load_task(name: str, options: str) -> Task:
    """The task ``module:Class`` with its options, a JSON object. Modules in the current folder are found too.

    Raises:
        UsageError: there is no such module or class, or it isn't a complete task.
        InputError: an option is wrong.
    """
    task_class = _find_class(name)
    return task_class(parse_options(get_type_hints(task_class)["options"], options))


def _find_class(name: str) -> type[Task]:
    match = re.fullmatch(r"([\w.]+):(\w+)", name)
    if not match:
        raise UsageError(f"task '{name}' isn't of the form module:Class", fix=f"for example {_BUILT_IN}.gpt:ByteGPT")
    module = _import(*match.groups())
    found = getattr(module, match[2], None)
    if found is None:
        raise UsageError(
            f"task '{name}': no class '{match[2]}' in {module.__file__}", fix=_nearest_class(module, match[2])
        )
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise UsageError(
            f"task '{name}' isn't a task",
            fix="derive the class from hvdtrain.train.torch.Task or hvdtrain.train.keras.Task",
        )
    if missing := sorted(found.__abstractmethods__):
        raise UsageError(
            f"task '{name}' has no {', '.join(f'{method}()' for method in missing)}", fix="add it to the class"
        )
    return found


def _import(module: str, class_name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # What the task's own module fails to import is that module's fault, and keeps its traceback.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"task '{module}:{class_name}': there is no module '{error.name}' in {Path.cwd()} and none is installed",
            fix=_nearest_module(module),
        ) from error


def _nearest_module(module: str) -> str:
    built_in = [
        entry.name for entry in pkgutil.iter_modules(importlib.import_module(_BUILT_IN).__path__, f"{_BUILT_IN}.")
    ]
    own = [path.stem for path in Path.cwd().glob("*.py")]
    near = difflib.get_close_matches(module, [*own, *built_in], n=1)
    return f"did you mean '{near[0]}'?" if near else "put its file beside the job spec, or install its package"


def _nearest_class(module: ModuleType, class_name: str) -> str:
    tasks = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Task) and not inspect.isabstract(value)
    ]
    near = difflib.get_close_matches(class_name, tasks, n=1, cutoff=0.3) or tasks
    return f"did you mean {' or '.join(repr(name) for name in near)}?" if near else "define it there"
