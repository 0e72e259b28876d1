"""Finds the first real error in a build's log, and says what to do about it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

# The line that names the error, and the remedy. The first pattern that is found in the log wins, so causes come
# before what follows from them.
_KNOWN = (
    (r"No space left on device", "free some space in the temporary folder (TMPDIR) and in the cache, then build again"),
    (
        r"(Killed signal terminated program|error: Killed|out of memory allocating|cannot allocate memory)",
        "memory ran out: build with fewer jobs, MAKEFLAGS=-j1 hvdtrain horovod build",
    ),
    (r"Python\.h: No such file or directory", "install Python's headers (Debian: python3-dev)"),
    (r"mpi\.h: No such file or directory", "install MPI's headers (Debian: libopenmpi-dev), or build --without-mpi"),
    (r"nccl\.h: No such file or directory", "install NCCL's headers (Debian: libnccl-dev), or set NCCL_HOME"),
    (r"(No CMAKE_CXX_COMPILER could be found|CMAKE_CXX_COMPILER not set)", "install a C++ compiler (Debian: g++)"),
    (r"is not able to compile a simple test program", "the C++ compiler doesn't work: check CXX and CXXFLAGS"),
    (r"Could NOT find MPI", "install MPI (Debian: openmpi-bin libopenmpi-dev), or build --without-mpi"),
    (r"Compatibility with CMake < [\d.]+ has been removed", "set CMAKE_POLICY_VERSION_MINIMUM=3.5 and build again"),
    (r"CMake \d\S* or higher is required", "install a newer CMake: pip install cmake"),
    (r"ModuleNotFoundError: No module named '(setuptools|wheel|packaging)'", "pip install setuptools wheel packaging"),
)
# pip indents what a build prints.
_COMPILER = re.compile(r"^[ \t]*\S+?:\d+(:\d+)?: (fatal )?error: ", re.MULTILINE)
_CMAKE = re.compile(r"^[ \t]*CMake Error\b.*", re.MULTILINE)
_LINKER = re.compile(r"^.*(undefined reference to|cannot find -l).*", re.MULTILINE)
_PYTHON = re.compile(r"^[ \t]*(\w+Error|\w+Exception): .*", re.MULTILINE)
_CONTEXT = 4


@dataclass(frozen=True)
class BuildError:
    """The first real error of a build.

    Attributes:
        lines: the error and a few lines after it.
        remedy: what to do.
    """

    lines: tuple[str, ...]
    remedy: str


def first_error(log: str) -> BuildError:
    """What went wrong first in a build's log."""
    for pattern, remedy in _KNOWN:
        if match := re.search(pattern, log, re.IGNORECASE):
            return BuildError(_excerpt(log, match.start(), 2), remedy)
    found = [match for match in (_COMPILER.search(log), _CMAKE.search(log), _LINKER.search(log)) if match]
    match = min(found, key=lambda each: each.start(), default=None) or _PYTHON.search(log)
    if match:
        return BuildError(_excerpt(log, match.start(), _CONTEXT), "see the log for what came before")
    return BuildError(_dedented(log.splitlines()[-_CONTEXT:]), "see the log")


def _excerpt(log: str, position: int, count: int) -> tuple[str, ...]:
    start = log.rfind("\n", 0, position) + 1
    return _dedented(log[start : start + 4000].splitlines()[:count])


def _dedented(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line.rstrip()[:300] for line in textwrap.dedent("\n".join(lines)).splitlines())
