"""The file that keeps what Horovod's autotune found, for later runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from hvdtrain.errors import InputError, Problem, UsageError
from hvdtrain.spec.fields import NUMBER, WHOLE_NUMBER, Boolean, OptionalText
from hvdtrain.spec.loader import read_model, refuse
from hvdtrain.spec.models import Section
from hvdtrain.spec.yaml_reader import FileKind, read_document

# Those that a later run uses.
VALUES = ("fusion_threshold_mb", "cycle_time_ms")
_TUNED = FileKind("file of tuned values", "'fusion_threshold_mb' and 'cycle_time_ms'", "cycle_time_ms: 2.5")
_MEND = "correct the file, or delete it and run once with horovod.autotune: true"
_COMMENT = """\
# What Horovod's autotune found best, written by hvdtrain. A job whose spec names this file in horovod.tuned uses
# fusion_threshold_mb and cycle_time_ms; the rest says where they come from.
"""

_Count = Annotated[Annotated[int, Field(ge=1)] | None, WHOLE_NUMBER]


class Tuned(Section):
    """Tuned values, and what they were measured with. Of the latter nothing is needed."""

    fusion_threshold_mb: Annotated[Annotated[int, Field(ge=0, le=4096)], WHOLE_NUMBER] = 0
    """Size of the fusion buffer, in whole MB: horovodrun takes no parts of them."""

    cycle_time_ms: Annotated[Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)], NUMBER] = 1.0
    """Time between two rounds of negotiation, in milliseconds."""

    score_mb_per_s: Annotated[Annotated[float, Field(ge=0, allow_inf_nan=False)] | None, NUMBER] = None
    """10^6 bytes reduced per second, on each process."""

    samples: _Count = None
    """Settings that were scored."""

    finished: Boolean = False
    """Whether autotune came to its end; else the values are the best until then."""

    processes: _Count = None
    """Of the run."""

    hosts: _Count = None
    """Of the run."""

    network: OptionalText = None
    """Fabric and subnets between the hosts; null for one host, or where it isn't known."""

    time: OptionalText = None
    """End of the run, UTC."""

    job: OptionalText = None
    """The job's name."""


def whole_mb(fusion_threshold_mb: float) -> int:
    """The nearest size that horovodrun takes; 0 turns fusion off, so less than 1 MB becomes 1."""
    return max(1, round(fusion_threshold_mb)) if fusion_threshold_mb else 0


def load_tuned(path: Path) -> Tuned:
    """Read a file of tuned values.

    Raises:
        UsageError: with all faults of the file.
    """
    problems: list[Problem] = []
    try:
        document = read_document(path, problems, _TUNED)
        tuned = read_model(Tuned, document, (), problems)
        missing = [key for key in VALUES if document.get((key,)) is None]
        problems += [Problem(str(path), 0, 0, f"'{key}' is missing, which tuned values need") for key in missing]
        refuse(problems, path)
    except InputError as error:
        raise UsageError(str(error), fix=_MEND) from None
    return tuned


def write_tuned(path: Path, tuned: Tuned) -> None:
    """Write a file of tuned values in one step; what is there is replaced.

    Raises:
        OSError: it can't be written.
    """
    values: dict[str, Any] = tuned.model_dump()
    # The file that a link stands for, not the link.
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(_COMMENT + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
