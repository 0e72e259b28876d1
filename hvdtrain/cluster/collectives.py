"""Runs Horovod's own allreduce on the hosts, as a job that `hvdtrain launch` starts like any other."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain import contract
from hvdtrain.cluster.allreduce import Allreduces, Timing, Wrong
from hvdtrain.cluster.bandwidth import ring, rounds
from hvdtrain.cluster.effort import Effort
from hvdtrain.cluster.models import Evidence
from hvdtrain.hosts.models import Host
from hvdtrain.spec.loader import resolved_yaml
from hvdtrain.spec.models import JobSpec
from hvdtrain.supervise.child import start_launch

_NAME = "allreduce"
# Of more hosts each is measured with its two neighbours only: every pair has a process set of its own.
_ALL_PAIRS = 8
# Starting, imports on busy machines, and a slow link.
_START_S, _PER_STAGE_S = 120.0, 20.0
_STOP_S = 40.0
_LONGEST = 400


def reduce_on(evidence: Evidence, hosts: Sequence[str], effort: Effort) -> Allreduces:
    """Allreduces inside each host, between pairs and over all, with sums that are checked.

    Args:
        evidence: of the hosts.
        hosts: those that take part.
        effort: which sizes, and for how long.
    """
    names = tuple(hosts)
    if without := [name for name in names if not isinstance(evidence.value(name, "software", "horovod"), dict)]:
        return Allreduces(names, skipped=f"no Horovod on {', '.join(without)}")
    per_host = ranks_per_host(evidence, names, all_gpus=effort.gpu_s > 0)
    if len(names) * per_host < 2:
        return Allreduces(names, skipped="there is only one rank")
    pairs = _pairs(len(names))
    question = {"hosts": len(names), "per_host": per_host, "rounds": pairs, "sizes": effort.sizes,
                "seconds": effort.allreduce_s, "gpu_s": effort.gpu_s}  # fmt: skip
    spec = _spec(evidence, names, per_host, question)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        return _run(spec, names, Path(folder), _START_S + _PER_STAGE_S * (2 + len(pairs)))


def ranks_per_host(evidence: Evidence, hosts: Iterable[str], *, all_gpus: bool) -> int:
    """Two, so that what happens inside a host is seen; one where a host has a single GPU, which takes no two ranks.

    Or as many as each host has GPUs.
    """
    counts = [evidence.value(host, "gpus", "count") or 0 for host in hosts]
    if all_gpus and min(counts) > 0:
        return int(min(counts))
    return 1 if 1 in counts else 2


def _pairs(count: int) -> list[list[list[int]]]:
    """Rounds of pairs of host numbers; of two hosts the only pair is all of them."""
    if count < 3:
        return []
    if count > _ALL_PAIRS:
        neighbours = [list(pair) for pair in ring(range(count))]
        # A ring of an odd number of hosts needs a third round, for its last link.
        return [part for part in (neighbours[:-1:2], neighbours[1:-1:2], neighbours[-1:]) if part]
    place = {str(number): number for number in range(count)}
    return [[sorted((place[one], place[other])) for one, other in pairs] for pairs in rounds(list(place))]


def _spec(evidence: Evidence, names: Sequence[str], per_host: int, question: dict[str, Any]) -> JobSpec:
    request = evidence.request
    hosts = {host.name: host for host in evidence.hosts}
    ssh = {key: value for key, value in asdict(request.ssh).items() if value is not None}
    # Scalars as Python has them: nothing here was written by anybody.
    return JobSpec.model_validate(
        {
            "name": _NAME,
            "command": ["python", "-m", "hvdtrain.tasks.collectives", json.dumps(question)],
            "directory": Path(request.directory or "/"),
            "python": request.python,
            "hosts": {"list": [_line(hosts[name], per_host) for name in names]},
            "ssh": ssh,
            "network": {"fabric": request.fabric, "interfaces": request.interfaces, "hcas": request.hcas},
            "controller": request.controller,
            "validate": "none",
            "hang_timeout_s": 60.0,
            "stop_grace_s": 1.0,
        }
    )


def _line(host: Host, slots: int) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{host.user}@{name} slots={slots}" if host.user else f"{name} slots={slots}"


def _run(spec: JobSpec, names: tuple[str, ...], folder: Path, limit_s: float) -> Allreduces:
    job, output = folder / "allreduce.yaml", folder / "output"
    job.write_text(resolved_yaml(spec))
    launch = start_launch([str(job)], folder, output)
    try:
        launch.wait(limit_s)
    except subprocess.TimeoutExpired:
        return Allreduces(names, error=(f"it wasn't done within {limit_s:.0f} s", None))
    finally:
        _end(launch)
    run = next(iter(folder.glob(f"{_NAME}/*/{contract.PLAN_FILE}")), None)
    lines = _lines(run.parent) if run else []
    error = _error(launch.returncode, run.parent if run else None, output)
    timings = tuple(_timing(line, names) for line in lines if "seconds" in line)
    wrong = tuple(_wrong(line, names) for line in lines if "wrong" in line)
    controller = json.loads(run.read_text())["controller"] if run else ""
    gpus: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "gpu" in line:
            gpus.setdefault(names[line["host"]], []).append(line["gpu"])
    return Allreduces(names, timings, wrong, error, controller=controller, gpus=gpus)


def _end(launch: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        if launch.poll() is None:
            launch.send_signal(number)
            try:
                launch.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue


def _lines(run: Path) -> list[dict[str, Any]]:
    """What the ranks told; a line that was cut is passed over."""
    found = []
    for log in sorted(run.glob(f"{contract.LOGS}/attempt-*/rank-*.log")):
        for line in log.read_text(errors="replace").splitlines():
            _, mark, text = line.partition(contract.COLLECTIVE_MARK)
            with contextlib.suppress(ValueError):
                if mark:
                    found.append(json.loads(text))
    return found


def _timing(line: dict[str, Any], names: Sequence[str]) -> Timing:
    return Timing(tuple(names[number] for number in line["hosts"]), line["ranks"], line["bytes"], line["seconds"])


def _wrong(line: dict[str, Any], names: Sequence[str]) -> Wrong:
    hosts = tuple(names[number] for number in line["hosts"])
    return Wrong(names[line["host"]], line["wrong"], line["bytes"], hosts)


def _error(status: int, run: Path | None, output: Path) -> tuple[str, str | None] | None:
    """Why the job failed, and on which host."""
    if status == 0:
        return None
    try:
        failure = json.loads((run / contract.FAILURE_FILE).read_text()) if run else None
    except (OSError, ValueError):
        failure = None
    if failure:
        why = (
            failure.get("diagnosis") or failure.get("exception") or failure.get("kind") or "for no reason that is known"
        )
        rank = f" on rank {failure['rank']}" if failure.get("rank") is not None else ""
        return f"Horovod's allreduce failed{rank}: {why}"[:_LONGEST], failure.get("host")
    last = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()][-2:]
    return f"Horovod's allreduce couldn't be started: {'; '.join(last)}"[:_LONGEST], None
