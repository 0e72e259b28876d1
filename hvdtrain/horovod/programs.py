"""Programs of hvdtrain's own that horovodrun finds on its PATH in the place of others."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.horovod import mpirun


def script(file: str | None) -> str:
    """What a shell runs for a file of Python that needs the standard library alone."""
    return shlex.join([sys.executable, "-I", "-S", str(file)])


def write(program: Path, text: str) -> None:
    """Write a program for its user alone.

    Raises:
        OSError: it can't be written.
    """
    program.write_text(text)
    program.chmod(0o700)


def write_mpirun(folder: Path, program: str, parameters: Mapping[str, str]) -> dict[str, str]:
    """Write what stands for mpirun (`hvdtrain.horovod.mpirun`) into a folder.

    Args:
        folder: comes first on the PATH.
        program: the real one.
        parameters: MCA parameters that take the place of horovodrun's.

    Returns:
        The variables that it wants.

    Raises:
        OSError: it can't be written.
    """
    write(folder / "mpirun", f'#!/bin/sh\nexec {script(mpirun.__file__)} "$@"\n')
    return {mpirun.PROGRAM: program, mpirun.PARAMETERS: json.dumps(dict(parameters))}
