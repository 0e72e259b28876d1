"""``python -m hvdtrain.train``: one rank of a task job, as the environment describes it (`hvdtrain.contract`)."""

from __future__ import annotations

import os
import sys
import time

from hvdtrain import contract
from hvdtrain.errors import ExitStatus, HvdtrainError, InputError, UsageError
from hvdtrain.train.load import load_run, load_task
from hvdtrain.train.loop import train

# Most faults are every rank's, and rank 0 tells them for all: its end ends the job. The others wait that long for it
# and then speak for themselves, since their host may lack what rank 0's has.
_WAIT_FOR_RANK_0_S = 10.0


def main() -> int:
    """Train. Returns the exit status: `contract.BAD_TASK_STATUS` where the task or its options are at fault.

    It is 0 only where the training is done or was stopped orderly, whatever the task's code does.
    """
    # TensorFlow reads it once, when it's imported; its informational lines would come from every rank.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        _train()
    except HvdtrainError as error:
        if contract.rank_of(os.environ) != 0:
            time.sleep(_WAIT_FOR_RANK_0_S)
        faults = error.problems if isinstance(error, InputError) else [error]
        sys.stderr.write("".join(f"error: {fault}\n" for fault in faults))
        return contract.BAD_TASK_STATUS if error.exit_status is ExitStatus.USAGE else 1
    return 0


def _train() -> None:
    try:
        run = load_run(os.environ)
        task = load_task(run.name, os.environ.get(contract.OPTIONS) or "{}")
        train(task, run)
    except SystemExit as error:
        raise UsageError(
            f"the task called exit({error.code!r}) before the training was done",
            where=os.environ.get(contract.TASK),
            fix="take exit() out of the task and of what it imports, or put it under if __name__ == '__main__'",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
