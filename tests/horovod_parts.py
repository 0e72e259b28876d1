"""Made toolchains and frameworks for the tests of Horovod's build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.horovod.toolchain import Framework, Tool, Toolchain


def guard(value: str) -> str:
    return f"#pragma once\n#if !defined(_MSC_VER) && __cplusplus < {value}\n#error newer compiler required\n#endif\n"


def headers(folder: Path, name: str, text: str) -> Path:
    path = folder / "include" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


def toolchain(*frameworks: Framework, **parts: Any) -> Toolchain:
    defaults: dict[str, Any] = {
        "python": Tool(Path("/env/bin/python"), "3.11.7"),
        "compiler": Tool(Path("/usr/bin/g++"), "g++ (Debian 12.2.0-14) 12.2.0"),
        "cmake": Tool(Path("/env/bin/cmake"), "3.31.0"),
        "mpi": Tool(Path("/usr/bin/mpicxx"), "Open MPI 4.1.4"),
        "cuda": None,
        "nccl": None,
        "why_no_nccl": "no installed framework is a CUDA build",
        "instruction_sets": ("avx",),
    }
    return Toolchain(frameworks=frameworks, **(defaults | parts))


def program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return folder / name


def made_frameworks(tmp_path: Path) -> list[Framework]:
    torch = headers(tmp_path / "torch", "ATen/ATen.h", guard("201703L"))
    flow = headers(tmp_path / "tensorflow", "absl/base/policy_checks.h", guard("201703L"))
    return [Framework("torch", "2.13.0+cpu", torch, cuda=False), Framework("tensorflow", "2.21.0", flow, cuda=False)]
