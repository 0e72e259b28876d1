"""``python -m hvdtrain.train``: trains the task that the environment names, as one rank of a job."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.train.loop import Loop, Settings
from hvdtrain.train.options import BadTaskError, Options, parse_options


def load_task(name: str, options: dict[str, Any]) -> Any:
    """The task with its options. The current folder is importable, for a user's own.

    Raises:
        BadTaskError: there is no such module or class, or an option is wrong.
    """
    module_name, _, class_name = name.partition(":")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the task's own module misses is the task's affair, and keeps its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise BadTaskError(f"task '{name}': no module '{error.name}' in {Path.cwd()} or installed") from error
    task_class = getattr(module, class_name, None)
    if task_class is None:
        raise BadTaskError(f"task '{name}': no class '{class_name}' in {module.__file__}")
    model = getattr(task_class, "Options", Options)
    return task_class(parse_options(model, options))


def main() -> None:
    """Read the contract's variables, train, and leave together with the other ranks."""
    try:
        task = load_task(os.environ[contract.TASK], json.loads(os.environ.get(contract.OPTIONS, "{}")))
    except BadTaskError as error:
        if contract.rank_of(os.environ) == 0:
            sys.stderr.write(f"{error}\n")
        sys.exit(contract.BAD_TASK_STATUS)
    given = json.loads(os.environ.get(contract.SETTINGS, "{}"))
    checkpoint = given.get("checkpoint", {})
    settings = Settings(
        run_directory=Path(os.environ[contract.RUN_DIRECTORY]),
        attempt=int(os.environ.get(contract.ATTEMPT, "0")),
        checkpoint_every=checkpoint.get("every_steps"),
        checkpoint_keep=checkpoint.get("keep", 3),
    )
    backend = task.backend(compression=given.get("compression", "none"))
    Loop(backend, task.options, settings).run()


if __name__ == "__main__":
    main()
