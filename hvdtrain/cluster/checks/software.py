"""Whether the hosts run the same software."""

from __future__ import annotations

from typing import Any

from hvdtrain.cluster.checks.common import Verdict, by_host, equal, ok
from hvdtrain.cluster.models import Evidence, Finding

_PIP = "install {value} there in the job's Python"
_FRAMEWORKS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}


def check(evidence: Evidence) -> list[Finding]:
    """User, Python, packages, CUDA, NCCL and MPI."""
    findings = by_host(evidence, "software", "python-path", lambda host: _python(evidence, host))
    for name, section, key, fix in (
        ("user-id", "system", "uid", "give the user the id {value} there"),
        ("python", "software", "python_version", "install Python {value} there, or set 'python'"),
        ("mpi", "software", "mpirun_version", "install {value} there"),
        ("cuda-driver", "software", "cuda_driver_version", "install the driver with CUDA {value} there"),
        ("torch-cuda", "software", "torch_cuda", "install the PyTorch build for CUDA {value} there"),
        ("tensorflow-cuda", "software", "tensorflow_cuda", "install the TensorFlow build for CUDA {value} there"),
    ):
        values = {host: evidence.value(host, section, key) for host in evidence.reached}
        findings += equal(evidence, "software", name, values, fix)
    packages = {host: evidence.value(host, "software", "packages") or {} for host in evidence.reached}
    for name, names in (
        *_FRAMEWORKS.items(),
        ("keras", ("keras",)),
        ("nccl", ("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
    ):
        values = {host: next((found[p] for p in names if found.get(p)), None) for host, found in packages.items()}
        findings += equal(evidence, "software", name, values, _PIP)
    findings += equal(evidence, "software", "hvdtrain", {h: _hvdtrain(evidence, h) for h in evidence.reached}, _PIP)
    built = {host: _horovod(evidence, host) for host in evidence.reached}
    findings += equal(evidence, "software", "horovod", built, "build it there with 'hvdtrain horovod build'")
    return [*findings, *by_host(evidence, "software", "horovod-fits", lambda host: _fits(evidence, host))]


def _python(evidence: Evidence, host: str) -> Verdict:
    asked = evidence.request.python
    if asked is None:
        return "skip", "no Python was asked for", "", ""
    if evidence.value(host, "software", "python_asked_executable"):
        return ok(asked)
    return "fail", f"{asked} isn't there or can't be run", asked, "make the environment there, or set 'python'"


def _hvdtrain(evidence: Evidence, host: str) -> str | None:
    version = evidence.value(host, "software", "hvdtrain_version")
    if not version:
        return None
    return f"{version} ({str(evidence.value(host, 'software', 'hvdtrain_sha256'))[:12]})"


def _horovod(evidence: Evidence, host: str) -> str | None:
    horovod: Any = evidence.value(host, "software", "horovod")
    if not isinstance(horovod, dict):
        return None
    parts = [*sorted(horovod.get("frameworks") or {}), *sorted(horovod.get("controllers") or [])]
    return f"{horovod.get('version')} with {', '.join(parts + ['nccl'] * bool(horovod.get('nccl')))}"


def _fits(evidence: Evidence, host: str) -> Verdict:
    built = evidence.value(host, "software", "horovod", "frameworks")
    if not isinstance(built, dict):
        return "skip", "no Horovod", "", ""
    packages = evidence.value(host, "software", "packages") or {}
    for framework, version in built.items():
        now = next((packages[p] for p in _FRAMEWORKS.get(framework, ()) if packages.get(p)), None)
        if version and now != version and (now or "").partition("+")[0] != version.partition("+")[0]:
            found = f"built against {framework} {version}, and {now or 'none'} is installed"
            return "fail", found, f"{framework} {version}", "run 'hvdtrain horovod build' there"
    return ok()
