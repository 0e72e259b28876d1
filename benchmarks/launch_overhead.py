"""What `hvdtrain launch` adds to the same job under plain horovodrun, and `hvdtrain --help` beside `torchrun --help`.

Usage: python benchmarks/launch_overhead.py [PAIRS]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pairs import Comparison, compare

BIN = Path(sys.executable).parent
JOB = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
assert total.item() == 3
hvd.barrier()
"""


def timed(command: list[str], folder: Path) -> float:
    """Wall time of a command that must succeed, in seconds."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - start


def launches(controller: str, pairs: int, folder: Path) -> Comparison:
    """The same two-process job under both launchers."""
    (folder / "job.py").write_text(JOB)
    spec = {
        "command": ["python", "job.py"],
        "processes": 2,
        "controller": controller,
        "hosts": {"list": ["localhost:2"]},
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    plain = [str(BIN / "horovodrun"), "-np", "2", "-H", "localhost:2", f"--{controller}", sys.executable, "job.py"]
    ours = [str(BIN / "hvdtrain"), "launch", "job.yaml"]
    return compare(lambda: timed(plain, folder), lambda: timed(ours, folder), pairs)


def main() -> None:
    """Print the table."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print("| what | base | hvdtrain | median difference |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for controller in ("gloo", "mpi"):
            result = launches(controller, pairs, folder)
            print(
                f"| 2-process job, {controller}, {pairs} pairs | horovodrun {result.base:.2f} s "
                f"| {result.ours:.2f} s | {result.difference:+.2f} s |",
                flush=True,
            )
        help_ = compare(
            lambda: timed([str(BIN / "torchrun"), "--help"], folder),
            lambda: timed([str(BIN / "hvdtrain"), "--help"], folder),
            pairs,
        )
        print(
            f"| --help, {pairs} pairs | torchrun {help_.base:.3f} s | {help_.ours:.3f} s "
            f"| {help_.ours / help_.base:.2f} of torchrun's |"
        )


if __name__ == "__main__":
    main()
