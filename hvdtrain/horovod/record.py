"""What a build was made from: the key of the cache, and what `check` compares the machine with.

The record travels inside the wheel as a Python file that only holds data, so that it comes and goes with the package.
"""

from __future__ import annotations

import ast
import os
import platform
import pprint
import sysconfig
from pathlib import Path
from typing import Any

from hvdtrain.horovod import edits, source
from hvdtrain.horovod.toolchain import Toolchain

MODULE = "hvdtrain_build.py"
# Variables of the user's that change what is compiled.
_FLAGS = ("CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "HOROVOD_BUILD_CUDA_CC_LIST")


def make_record(toolchain: Toolchain, *, with_mpi: bool) -> dict[str, Any]:
    """Everything that the compiled wheel depends on, as plain data."""
    assert toolchain.compiler is not None
    return {
        "horovod": source.VERSION,
        "edits": edits.REVISION,
        "python": ".".join(toolchain.python.version.split(".")[:2]),
        "platform": " ".join([sysconfig.get_platform(), str(sysconfig.get_config_var("SOABI")), *platform.libc_ver()]),
        "instruction_sets": list(toolchain.instruction_sets),
        "frameworks": {framework.name: framework.version for framework in toolchain.frameworks},
        "cxx_standard": toolchain.cxx_standard,
        "compiler": toolchain.compiler.version,
        "gloo": True,
        "mpi": toolchain.mpi.version if with_mpi and toolchain.mpi else None,
        "cuda": toolchain.cuda.version if toolchain.cuda else None,
        "nccl": f"{toolchain.nccl.version} in {toolchain.nccl.path}" if toolchain.nccl else None,
        "flags": {name: os.environ[name] for name in _FLAGS if os.environ.get(name)},
    }


def write_record(sources: Path, record: dict[str, Any]) -> None:
    """Put the record into the sources, where the wheel takes it from."""
    text = (
        f'"""What this wheel was built against, by `hvdtrain horovod build`."""\n\nRECORD = {pprint.pformat(record)}\n'
    )
    (sources / "horovod" / MODULE).write_text(text)


def read_record(package: Path) -> dict[str, Any] | None:
    """The record of an installed Horovod, read as data; None if hvdtrain didn't build it."""
    try:
        tree = ast.parse((package / MODULE).read_text())
        record = ast.literal_eval(tree.body[-1].value)  # type: ignore[attr-defined]
    except (OSError, SyntaxError, ValueError, AttributeError, IndexError):
        return None
    return record if isinstance(record, dict) else None
