"""Allreduce of two processes on one host, under MPI and under Gloo: why `controller: auto` takes MPI there.

Usage: python benchmarks/controllers.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from launch_overhead import BIN

SIZES = {"4 KiB": 1024, "64 MiB": 16 * 1024**2}
JOB = """
import statistics, sys, time
import horovod.torch as hvd, torch
hvd.init()
for count in map(int, sys.argv[1:]):
    tensor = torch.ones(count)
    times = []
    for _ in range(20):
        hvd.barrier()
        started = time.perf_counter()
        hvd.allreduce_(tensor, op=hvd.Average, name="tensor")
        times.append(time.perf_counter() - started)
    if hvd.rank() == 0:
        print(statistics.median(times))
hvd.barrier()
"""


def measure(controller: str, folder: Path) -> list[float]:
    """Median seconds for each size."""
    (folder / "job.py").write_text(JOB)
    command = ["python", "job.py", *map(str, SIZES.values())]
    spec = {"command": command, "processes": 2, "hosts": {"list": ["localhost:2"]}, "controller": controller}
    (folder / "job.yaml").write_text(json.dumps(spec))
    done = subprocess.run([str(BIN / "hvdtrain"), "launch", "job.yaml"], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return [float(line.removeprefix("[0] ")) for line in done.stdout.splitlines()]


def main() -> None:
    """Print the table: the median of three runs in turns."""
    with tempfile.TemporaryDirectory() as name:
        runs = [{controller: measure(controller, Path(name)) for controller in ("mpi", "gloo")} for _ in range(3)]
    print("| allreduce, 2 processes on one host | MPI | Gloo |")
    print("|---|---|---|")
    for index, size in enumerate(SIZES):
        mpi, gloo = (sorted(run[controller][index] for run in runs)[1] for controller in ("mpi", "gloo"))
        print(f"| {size} | {1000 * mpi:.1f} ms | {1000 * gloo:.1f} ms |")


if __name__ == "__main__":
    main()
