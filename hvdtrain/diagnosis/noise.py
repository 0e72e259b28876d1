"""Lines that never are a cause: consequences of another failure, and what healthy runs print too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hvdtrain.diagnosis import tracebacks

# What a rank says that lost the others in the middle of a collective, or was told to end.
_CONSEQUENCES = re.compile(
    r"Horovod has been shut down|Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed|"
    r"Fatal Python error: Aborted|ncclCommAbort|NCCL communicator was aborted|remote process exited|"
    r"KeyboardInterrupt|SystemExit|Horovod detected that one or more processes exited|BrokenProcessPool|"
    r"Timed out waiting \d+ms|Wait timeout after|Connect timeout"
)
_CHATTER = re.compile(
    r"WARNING: All log messages before absl::|[IW]\d{4} [\d:.]+ |\d{4}-\d\d-\d\d [\d:.]+: [IW] |"
    r"To enable the following instructions|-{20,}$|Process \d+ exit with status code|Terminating remaining workers|"
    r"Primary job  terminated normally|a non-zero exit code\. Per user-direction|Terminated$|"
    r"mpirun detected that one or more processes exited|the job to be terminated\. The first process|"
    r"  Process name: |  Exit code: |Process name: |Exit code: |\[[\w.-]+:\d+\] \d+ more process|"
    r"\[[\w.-]+:\d+\] Set MCA parameter|\s*$"
)


def is_consequence(exception: str) -> bool:
    """Whether an exception's line says that another rank had ended before."""
    return bool(_CONSEQUENCES.search(exception))


def telling(lines: Sequence[str]) -> list[int]:
    """Indices of the lines without those that healthy runs, and horovodrun or mpirun after any failure, print."""
    own = {
        index
        for trace in tracebacks.find(lines)
        if "Horovod detected that one or more" in trace.exception
        for index in range(trace.start, trace.end)
    }
    return [index for index, line in enumerate(lines) if index not in own and not _CHATTER.match(line)]
