"""How much of a slow wire a job uses that is launched with everything on auto.

Two hosts in network namespaces (tests/namespace_hosts.py), each link limited both ways; a job of one process on each
reduces a tensor again and again. With two ranks each sends and receives the tensor's size once in a ring-allreduce, so
the wire's limit is its bits by the link's rate (nccl-tests' PERFORMANCE.md: bus bandwidth = size / time * 2 (n-1)/n).

    .venv/bin/python benchmarks/slow_link.py [--mbit 400] [--mib 64] [--rounds 5]      (root)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespace_hosts import Cluster, why_no_hosts

_REDUCES = """
import sys, time
import horovod.torch as hvd, torch
hvd.init()
tensor = torch.ones(int(sys.argv[1]) << 18)
hvd.allreduce(tensor, name="warm-up")
for number in range(int(sys.argv[2])):
    hvd.allreduce(torch.ones(1), name="together")
    begun = time.perf_counter()
    hvd.allreduce(tensor, name="x")
    if hvd.rank() == 0:
        print("took", time.perf_counter() - begun, flush=True)
"""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=400)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if reason := why_no_hosts():
        sys.exit(reason)
    floor_s = options.mib * 8 * 1.048576 / options.mbit
    print(f"{options.mib} MiB by allreduce, two hosts, {options.mbit} Mbit/s each way; the wire: {floor_s:.2f} s")
    print("\n| controller | median | slowest | of the wire's limit |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder, Cluster(2) as cluster:
        (Path(folder) / "train.py").write_text(_REDUCES)
        for host in cluster.hosts:
            host.limit(options.mbit)
        os.chdir(folder)
        for controller in ("auto", "mpi"):
            command = ["python", "train.py", str(options.mib), str(options.rounds)]
            spec = {"command": command, "hosts": {"list": ["h1:1", "h2:1"]}, "controller": controller}
            Path("job.yaml").write_text(json.dumps(spec))
            done = cluster.hosts[0].run(
                [sys.executable, "-m", "hvdtrain", "launch", "job.yaml"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            times = [float(found) for found in re.findall(r"took ([\d.]+)", done.stdout)]
            if done.returncode or not times:
                sys.exit(done.stdout)
            median = statistics.median(times)
            print(f"| {controller} | {median:.2f} s | {max(times):.2f} s | {floor_s / median:.0%} |")


if __name__ == "__main__":
    main()
