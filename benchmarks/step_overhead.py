"""What hvdtrain's loop and supervision add to each step of the same training written by hand.

Usage: python benchmarks/step_overhead.py [PAIRS]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from launch_overhead import BIN
from pairs import Comparison, summarize

HERE = Path(__file__).parent


def measure(model: str, controller: str, pairs: int, folder: Path) -> Comparison:
    """Both ways in turns, on two processes under `hvdtrain launch`."""
    spec = {
        "command": ["python", str(HERE / "steps.py"), model, str(pairs)],
        "processes": 2,
        "hosts": {"list": ["localhost:2"]},
        "controller": controller,
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    done = subprocess.run([str(BIN / "hvdtrain"), "launch", "job.yaml"], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[0] [[")]
    return summarize([(base, ours) for base, ours in json.loads(line.removeprefix("[0] "))])


def main() -> None:
    """Print the table."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print("| step of | by hand | hvdtrain | median difference |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for model in ("mlp", "cnn"):
            for controller in ("gloo", "mpi"):
                result = measure(model, controller, pairs, Path(name))
                print(
                    f"| {model}, {controller}, {pairs} pairs | {1000 * result.base:.1f} ms "
                    f"| {1000 * result.ours:.1f} ms | {result.percent:+.1f}% |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
