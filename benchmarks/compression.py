"""What compressed gradients do to the step rate of a job that its link holds up, and of one that it doesn't.

Two hosts in network namespaces (tests/namespace_hosts.py), one rank on each, Gloo between them. A multilayer perceptron
of 8.4 million parameters trains by hvdtrain's exchange of gradients, on a batch so small that their way decides. In one
job all kinds take turns, a few steps each, so that what else goes on meets all of them alike; what counts is the median
step. ``auto`` has made its choice before. The floor is the wire's own time: with two ranks a ring-allreduce sends each
gradient once.

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
from hvdtrain.parallel.torch import buckets
from hvdtrain.parallel.torch.compression import make_reducer
from hvdtrain.parallel.torch.exchange import GradientExchange

turns, kinds = int(sys.argv[1]), sys.argv[2].split(",")
buckets.keep_whole()
group = groups.init(hvd).replicas
torch.manual_seed(hvd.rank())
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
reducers = {kind: make_reducer(kind) for kind in kinds}
inputs = torch.randn(8, 1024)

def use(kind):
    return GradientExchange(model.named_parameters(), lambda _: (group, group.size), reducers[kind], kind=kind)

def step(exchange):
    exchange.begin()
    nn.functional.mse_loss(model(inputs), inputs).backward()
    exchange.finish()
    optimizer.step()

def timed(exchange):
    begun = time.perf_counter()
    step(exchange)
    return time.perf_counter() - begun

times = {kind: [] for kind in kinds}
for turn in range(turns + 1):
    for kind in kinds if turn % 2 == 0 else reversed(kinds):
        exchange = use(kind)
        for _ in range(2 if turn else 20):
            step(exchange)
        if turn:
            times[kind] += [timed(exchange) for _ in range(4)]
        exchange.remove()
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
