"""Holds the installed Horovod against what is installed around it now."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from hvdtrain.horovod.installed import Installed, fits
from hvdtrain.horovod.prove import proofs
from hvdtrain.horovod.toolchain import Toolchain, framework_version

REBUILD = "hvdtrain horovod build"


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        part: what is looked at.
        built: what Horovod was built with or against; empty if it wasn't.
        now: what is installed now; empty if it isn't.
        ok: False where something has to be done; None where the part is simply not there.
        advice: what to do, or why it isn't there.
    """

    part: str
    built: str
    now: str
    ok: bool | None
    advice: str = ""


def check(horovod: Installed | None, toolchain: Toolchain, *, run: bool) -> list[Finding]:
    """All findings. With ``run``, every framework and controller is proved by an allreduce as well."""
    if horovod is None:
        return [Finding("horovod", "", "", False, REBUILD)]
    findings = [Finding("horovod", horovod.version, horovod.version, True)]
    findings += [_framework(horovod, name) for name in ("torch", "tensorflow")]
    findings.append(_keras(horovod))
    findings += [_gloo(horovod), _mpi(horovod, toolchain), _nccl(horovod, toolchain), _python(horovod, toolchain)]
    if run and all(finding.ok is not False for finding in findings):
        findings += _proofs(horovod)
    return findings


def _framework(horovod: Installed, name: str) -> Finding:
    now = framework_version(name) or ""
    if name not in horovod.frameworks:
        if now:
            # It may have been left out on purpose (build --with).
            return Finding(name, "", now, None, f"to use it with Horovod: {REBUILD}")
        return Finding(name, "", "", None, "not installed")
    built = horovod.frameworks[name] or "unknown version"
    if not now:
        return Finding(name, built, "", False, f"install {name} {built} again, or {REBUILD}")
    if not fits(horovod, name, now):
        return Finding(name, built, now, False, f"built against another version: {REBUILD}")
    return Finding(name, built, now, True)


def _keras(horovod: Installed) -> Finding:
    try:
        now = version("keras")
    except PackageNotFoundError:
        return Finding("keras", "", "", None, "not installed")
    if "tensorflow" not in horovod.frameworks:
        return Finding("keras", "", now, None, "needs Horovod's TensorFlow part")
    if int(now.partition(".")[0]) < 3:
        return Finding("keras", "horovod.tensorflow.keras", now, True)
    return Finding("keras", "hvdtrain.keras", now, True, "horovod.tensorflow.keras fails on Keras 3")


def _gloo(horovod: Installed) -> Finding:
    built = "gloo" in horovod.controllers
    return Finding("gloo", "yes" if built else "", "", built, "" if built else REBUILD)


def _mpi(horovod: Installed, toolchain: Toolchain) -> Finding:
    now = toolchain.mpi.version if toolchain.mpi else ""
    if "mpi" not in horovod.controllers:
        advice = f"to use it: {REBUILD}" if now else "no mpirun and mpicxx on PATH"
        return Finding("mpi", "", now, None, advice)
    built = (horovod.record or {}).get("mpi") or "yes"
    if shutil.which("mpirun") is None:
        return Finding("mpi", built, "", False, f"install MPI again (Debian: openmpi-bin), or {REBUILD}")
    if now and built not in ("yes", now):
        return Finding("mpi", built, now, False, f"built against another MPI: {REBUILD}")
    return Finding("mpi", built, now, True)


def _nccl(horovod: Installed, toolchain: Toolchain) -> Finding:
    if horovod.nccl:
        built = (horovod.record or {}).get("nccl") or "yes"
        return Finding("nccl", built, toolchain.nccl.version if toolchain.nccl else "", True)
    if toolchain.nccl:
        return Finding("nccl", "", toolchain.nccl.version, False, f"GPUs would reduce over the CPU: {REBUILD}")
    return Finding("nccl", "", "", None, toolchain.why_no_nccl)


def _python(horovod: Installed, toolchain: Toolchain) -> Finding:
    now = ".".join(toolchain.python.version.split(".")[:2])
    built = (horovod.record or {}).get("python") or now
    return Finding("python", built, now, built == now, "" if built == now else REBUILD)


def _proofs(horovod: Installed) -> list[Finding]:
    return [
        Finding(
            f"{proof.framework} over {proof.controller}",
            "",
            "2 processes",
            proof.ok,
            "" if proof.ok else proof.error[-1],
        )
        for proof in proofs(horovod)
    ]
