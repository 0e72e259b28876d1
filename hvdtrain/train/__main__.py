"""``python -m hvdtrain.train``: one rank of a task job, as the environment describes it (`hvdtrain.contract`)."""

from __future__ import annotations

import os
import sys
import time

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError
from hvdtrain.train.load import load_run, load_task
from hvdtrain.train.loop import train

# Faults in the task or its options are rank 0's to tell. Its end ends the job; the other ranks wait that long for it,
# and then speak for themselves: their host may lack what rank 0's has.
_WAIT_FOR_RANK_0_S = 10.0


def main() -> int:
    """Train. Returns the exit status."""
    try:
        run = load_run(os.environ)
        task = load_task(run.name, os.environ.get(contract.OPTIONS) or "{}")
    except HvdtrainError as error:
        if contract.rank_of(os.environ) != 0:
            time.sleep(_WAIT_FOR_RANK_0_S)
        return _report(error, contract.BAD_TASK_STATUS)
    try:
        train(task, run)
    except HvdtrainError as error:
        return _report(error, 1)
    return 0


def _report(error: HvdtrainError, status: int) -> int:
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
