"""What compressed gradients do to the step rate of a job that its link holds up, and of one that it doesn't.

Two hosts in network namespaces (tests/namespace_hosts.py), one rank on each, Gloo between them. A multilayer perceptron
of 8.4 million parameters trains on a batch so small that the gradients' way decides. In one job all kinds take turns,
a few steps each, so that what else goes on meets all of them alike; what counts is the median step. ``auto`` has made
its choice before. The floor is the wire's own time: with two ranks a ring-allreduce sends each gradient once.

    .venv/bin/python benchmarks/compression.py [--mbit 400] [--turns 6] [--kinds none,bf16]      (root)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespace_hosts import Cluster, why_no_hosts

_KINDS = "none,fp16,bf16,topk,auto"
_PARAMETERS = 1024 * 2048 + 2048 * 2048 + 2048 * 1024 + 2048 + 2048 + 1024
_TRAINS = """
import json, sys, time
import horovod.torch as hvd, torch
from torch import nn
from hvdtrain.parallel import groups
from hvdtrain.parallel.torch.compression import make_reducer

turns, kinds = int(sys.argv[1]), sys.argv[2].split(",")
group = groups.init(hvd).replicas
torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
for parameter, values in zip(
    model.parameters(), gradients.split([parameter.numel() for parameter in model.parameters()]), strict=True
):
    parameter.grad = values.view_as(parameter)
buckets = gradients.split(1 << 21)
reducers = {kind: make_reducer(kind) for kind in kinds}

def step(kind):
    gradients.zero_()
    inputs = torch.randn(8, 1024)
    nn.functional.mse_loss(model(inputs), inputs).backward()
    reductions = [
        reducers[kind].start(bucket, group, f"{kind}.{number}") for number, bucket in enumerate(buckets)
    ]
    for reduction in reductions:
        reduction.proceed()
    for reduction in reductions:
        reduction.finish()
    gradients.div_(group.size)
    optimizer.step()

def timed(kind):
    begun = time.perf_counter()
    step(kind)
    return time.perf_counter() - begun

times = {kind: [] for kind in kinds}
for kind in kinds:
    for _ in range(20 if kind == "auto" else 3):
        step(kind)
for turn in range(turns):
    for kind in kinds if turn % 2 == 0 else reversed(kinds):
        step(kind)
        times[kind] += [timed(kind) for _ in range(4)]
if hvd.rank() == 0:
    why = "".join(reducers["auto"].why.values()) if "auto" in kinds else ""
    print("result", json.dumps({"times": times, "why": why}), flush=True)
"""


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=400)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--kinds", default=_KINDS, help=f"of {_KINDS}; the first is what others are compared with")
    options = parser.parse_args()
    if reason := why_no_hosts():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder, Cluster(2) as cluster:
        os.chdir(folder)
        Path("train.py").write_text(_TRAINS)
        for mbit in (options.mbit, None):
            with contextlib.ExitStack() as limits:
                for host in cluster.hosts if mbit else ():
                    limits.enter_context(host.limit(mbit))
                _table(cluster, mbit, options.turns, options.kinds)


def _table(cluster: Cluster, mbit: int | None, turns: int, kinds: str) -> None:
    result = _measured(cluster, turns, kinds)
    times = {kind: statistics.median(taken) for kind, taken in result["times"].items()}
    floor = f"{mbit} Mbit/s each way; float32's wire: {_PARAMETERS * 32 / mbit / 1e6:.3f} s" if mbit else "no limit"
    print(f"\n{_PARAMETERS / 1e6:.1f} million parameters, two hosts, {floor}")
    print("\n| kind | median step | slowest | steps per second | against the first |\n|---|---|---|---|---|")
    first = next(iter(times.values()))
    for kind, step_s in times.items():
        slowest = max(result["times"][kind])
        print(f"| {kind} | {step_s:.4f} s | {slowest:.4f} s | {1 / step_s:.2f} | {first / step_s:.2f} x |")
    print(f"\n{result['why']}", flush=True)


def _measured(cluster: Cluster, turns: int, kinds: str) -> dict:
    spec = {
        "command": ["python", "train.py", str(turns), kinds],
        "hosts": {"list": ["h1:1", "h2:1"]},
        "controller": "gloo",
        "env": {"set": {"OMP_NUM_THREADS": "1"}},
        "validate": "none",
    }
    Path("job.yaml").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "hvdtrain", "launch", "job.yaml"]
    done = cluster.hosts[0].run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = [line.partition("result ")[2] for line in done.stdout.splitlines() if "result " in line]
    if done.returncode or not found:
        sys.exit(done.stdout)
    return json.loads(found[0])


if __name__ == "__main__":
    main()
