"""What Horovod's autotune found: reads its log, and says how many steps it takes.

Sources: ``horovod/common/parameter_manager.cc`` and ``parameter_manager.h`` of Horovod 0.28.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_MEASUREMENTS_OF_A_SCORE = 5
# Variables that change how long it takes, and Horovod's defaults.
_WARM_UP = ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3)
_STEPS = ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10)
_MOST = ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20)


@dataclass(frozen=True)
class Sample:
    """One setting that autotune tried.

    Attributes:
        fusion_threshold_mb: size of the fusion buffer, in MiB.
        cycle_time_ms: time between two rounds of negotiation, in milliseconds.
        score_mb_per_s: bytes reduced per microsecond, which are 10^6 bytes per second; the median of five measurements.
    """

    fusion_threshold_mb: float
    cycle_time_ms: float
    score_mb_per_s: float


@dataclass(frozen=True)
class Found:
    """What a log, or several, have.

    Attributes:
        best: the setting with the highest score.
        samples: how many settings were scored.
        finished: whether autotune came to the end of its search.
    """

    best: Sample
    samples: int
    finished: bool


@dataclass(frozen=True)
class Effort:
    """How many training steps autotune takes, each counted as one allreduce of the same name.

    Attributes:
        first: steps until the first setting is scored.
        whole: steps of the whole search.
        settings: that the whole search scores.
    """

    first: int
    whole: int
    settings: int


def read_log(text: str) -> Found | None:
    """The best of a log; None where nothing was scored.

    A row that isn't whole, as of a killed process, doesn't count, nor does the best row, which Horovod writes once more
    when its search ends.
    """
    header, *rows = text[: text.rfind("\n") + 1].splitlines() or [""]
    samples = [sample for row in rows if (sample := _sample(dict(zip(_fields(header), _fields(row), strict=False))))]
    if not samples:
        return None
    best = max(samples, key=_score)
    finished = len(samples) > 1 and samples[-1] == max(samples[:-1], key=_score)
    return Found(best, len(samples) - finished, finished)


def together(found: Iterable[Found | None]) -> Found | None:
    """What several logs of one job have; None where nothing was scored in any of them."""
    known: Sequence[Found] = [one for one in found if one]
    if not known:
        return None
    best = max((one.best for one in known), key=_score)
    return Found(best, sum(one.samples for one in known), any(one.finished for one in known))


def effort(environment: Mapping[str, str]) -> Effort:
    """What autotune takes under these variables."""
    warm_up, steps, most = (_number(environment, *of) for of in (_WARM_UP, _STEPS, _MOST))
    # The allreduce that ends a score is the first one past it, and is in no other.
    a_score = _MEASUREMENTS_OF_A_SCORE * steps + 1
    return Effort(first=(warm_up + 1) * a_score, whole=(warm_up + most + 1) * a_score, settings=most + 1)


def _fields(row: str) -> list[str]:
    # One of Horovod's separators is ", ".
    return [field.strip() for field in row.split(",")]


def _sample(row: Mapping[str, str]) -> Sample | None:
    try:
        values = [float(row[name]) for name in ("tensor_fusion_threshold", "cycle_time_ms", "score")]
    except (KeyError, ValueError):
        return None
    return Sample(*values) if all(math.isfinite(value) and value >= 0 for value in values) and values[2] else None


def _score(sample: Sample) -> float:
    return sample.score_mb_per_s


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default
