"""How often to save: often enough that a failure loses little, seldom enough that saving costs little."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.errors import ExitStatus

# Before a run has failed once: a host does so about once a day. Pessimistic for most, and that costs next to nothing:
# the interval follows its square root.
PRIOR_HOST_MTBF_S = 24 * 3600.0
# Whatever the formula says: saving all the time wears disks out, and nobody wants to lose more than an hour.
SHORTEST_S = 5.0
LONGEST_S = 3600.0
_ORDERLY = (ExitStatus.DONE, ExitStatus.INTERRUPTED, ExitStatus.TERMINATED)


@dataclass(frozen=True)
class History:
    """What a run has been through.

    Attributes:
        failures: attempts that didn't end by themselves or by request.
        running_s: seconds of all attempts, the present one's until now.
    """

    failures: int
    running_s: float


def read_history(folder: Path, now: float) -> History:
    """A run's history by the launcher's records in the run directory; an empty one where there are none.

    Args:
        folder: the run directory.
        now: Unix seconds.
    """
    failures, running_s = 0, 0.0
    begun: float | None = None
    last = 0.0
    for record in _records(folder / contract.EVENTS_FILE):
        kind, moment = record["event"], float(record["time"])
        if begun is not None and kind in ("attempt_started", "attempt_failed", "ended"):
            # An attempt that begins while one runs: the launcher was killed, and what it ran with it.
            running_s += max(0.0, (last if kind == "attempt_started" else moment) - begun)
            failures += kind != "ended" or record["exit_status"] not in _ORDERLY
            begun = None
        if kind == "attempt_started":
            begun = moment
        last = moment
    return History(failures, running_s + (max(0.0, now - begun) if begun is not None else 0.0))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            # Cut off by a full disk.
            continue
        yield record


def mean_time_between_failures_s(history: History, hosts: int) -> float:
    """Seconds between two failures of the job, as observed.

    Args:
        history: of the run.
        hosts: that all must work. Without a failure yet each is taken to fail every `PRIOR_HOST_MTBF_S`, independently.
    """
    if history.failures:
        return history.running_s / history.failures
    return PRIOR_HOST_MTBF_S / hosts


def best_interval_s(save_cost_s: float, mtbf_s: float, write_s: float = 0.0) -> float:
    """Seconds from one checkpoint to the next that lose the least time to saving and to work done twice.

    ``sqrt(2 * save_cost_s * mtbf_s)``: J. W. Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", Future Generation Computer Systems 22(3), 2006, whose further terms matter only where saving takes
    a good part of the time between failures.

    Args:
        save_cost_s: seconds for which training stands still for a save.
        mtbf_s: mean seconds between two failures.
        write_s: seconds that the writing behind the training takes. The interval isn't shorter, nor shorter than
            `SHORTEST_S` or longer than `LONGEST_S`.
    """
    return max(min(math.sqrt(2 * save_cost_s * mtbf_s), LONGEST_S), SHORTEST_S, write_s)
