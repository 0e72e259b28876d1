"""How much of a step a pipeline of two stages idles, against (p - 1) / (m + p - 1).

Usage: python benchmarks/pipeline.py [STEPS]

Both stages compute equally long, and much longer than a message takes. One thread each: two cores are enough.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import horovod.torch as hvd
import torch
from launch_overhead import BIN
from torch import nn

from hvdtrain.parallel import groups as parallel_groups
from hvdtrain.parallel.grid import Grid
from hvdtrain.parallel.torch.collectives import all_reduce
from hvdtrain.parallel.torch.pipeline import Pipeline
from hvdtrain.parallel.torch.schedules import SCHEDULES, bubble
from hvdtrain.parallel.torch.stages import build_stage

STAGES = 2
MICRO_BATCHES = (1, 2, 4, 8)
WIDTH = 768
SAMPLES = 128
LAYERS_PER_STAGE = 8
# Steps that aren't counted: Horovod learns the names, and the stages get into step.
WARM_UP = 2
WORKER = "worker"


def measured_bubble(pipeline: Pipeline, groups: parallel_groups.Groups, micro_batches: int, steps: int) -> float:
    """Median over steps of the mean over stages."""
    # With a gradient, as later stages' inputs have one: so all stages compute the same.
    data = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    bubbles = []
    for _ in range(WARM_UP + steps):
        pipeline.step([SAMPLES] * micro_batches, lambda _: data, lambda output, _: output.square().mean())
        assert pipeline.measured is not None
        bubbles.append(pipeline.measured.bubble)
    total = all_reduce(torch.tensor(bubbles[WARM_UP:], dtype=torch.float64), groups.pipeline)
    return statistics.median((total / STAGES).tolist())


def worker(steps: int) -> None:
    """One stage; the first prints a line of JSON: schedule -> the bubble for each number of micro-batches."""
    torch.set_num_threads(1)
    groups = parallel_groups.init(hvd, Grid(pipeline=STAGES))
    makers = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())] * (STAGES * LAYERS_PER_STAGE)
    first = LAYERS_PER_STAGE * groups.coordinates["pipeline"]
    stage = build_stage(makers, range(first, first + LAYERS_PER_STAGE))
    found = {}
    for schedule in SCHEDULES:
        pipeline = Pipeline(stage, groups, schedule=schedule)
        found[schedule] = [measured_bubble(pipeline, groups, number, steps) for number in MICRO_BATCHES]
    if groups.rank == 0:
        print("RESULT", json.dumps(found), flush=True)
    hvd.barrier()


def launch(controller: str, steps: int) -> dict[str, list[float]]:
    """Both stages on this machine."""
    horovodrun = [str(BIN / "horovodrun"), "-np", str(STAGES), "-H", f"localhost:{STAGES}", f"--{controller}"]
    done = subprocess.run(
        [*horovodrun, sys.executable, __file__, WORKER, str(steps)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if "RESULT" in line]
    found: dict[str, list[float]] = json.loads(line.partition("RESULT")[2])
    return found


def main() -> None:
    """Print the table."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    columns = "".join(f" {number} |" for number in MICRO_BATCHES)
    print(f"| bubble of {STAGES} stages, micro-batches: |{columns}")
    print("|---" * (1 + len(MICRO_BATCHES)) + "|")
    theory = "".join(f" {100 * bubble(STAGES, number):.1f}% |" for number in MICRO_BATCHES)
    print(f"| theory |{theory}", flush=True)
    for controller in ("gloo", "mpi"):
        for schedule, bubbles in launch(controller, steps).items():
            print(f"| {schedule}, {controller} |" + "".join(f" {100 * found:.1f}% |" for found in bubbles), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(int(sys.argv[2]))
    else:
        main()
