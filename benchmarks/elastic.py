"""An elastic job of three workers: from the SIGKILL of one to the next step, and samples after kills at random moments.

Usage: python benchmarks/elastic.py [ROUNDS] [KILLS] [SEED]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VISITS = Path(__file__).parents[1] / "tests" / "visits.py"
STEPS, EPOCHS = 200, 4
# A newcomer needs some seconds to import PyTorch; kills that come faster than that leave nobody.
PAUSE_S = (2.0, 14.0)


class Job:
    """A job that counts how often each sample was trained."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder = folder
        shutil.copy(VISITS, folder)
        spec = {
            "task": "visits:Visits",
            "options": {"epochs": EPOCHS, "batch_size": 8, "lr": 0.5, "evaluate_every_epochs": None, **options},
            "hosts": {"list": ["localhost:3"]},
            "elastic": {"min": 2, "max": 3, "cooldown_s": 1, "batch": "keep_global"},
            "restarts": {"max": 50, "backoff_s": 0.1},
            "checkpoint": {"every_steps": 20},
        }
        (folder / "job.yaml").write_text(json.dumps(spec))

    @contextmanager
    def running(self, status: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """The launch, once it trains. It must end with that status."""
        command = [sys.executable, "-m", "hvdtrain", "launch", "job.yaml"]
        with (self._folder / "output").open("w") as output:
            process = subprocess.Popen(command, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT)
            try:
                while not self._status().get("step"):
                    self._check(process)
                yield process
                if process.wait() != status:
                    sys.exit((self._folder / "output").read_text())
            finally:
                process.kill()
                process.wait()

    def kill_one(self, process: subprocess.Popen[bytes]) -> float | None:
        """SIGKILL of a random worker's command. Returns the time; None where no worker was there."""
        running = [rank for rank in self._status()["ranks"] if rank["state"] == "running"]
        if not running:
            return None
        wrapper = random.choice(running)["pid"]
        try:
            children = Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        except (OSError, IndexError):
            return None
        return time.time()

    def records(self) -> list[dict[str, Any]]:
        """``metrics.jsonl``, without a line that is being written."""
        lines = (self._folder / "runs/job/latest/metrics.jsonl").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def next_step(self, killed: float, process: subprocess.Popen[bytes]) -> float:
        """Seconds from the kill to the end of the first step that was taken without the lost worker."""
        while True:
            resized = False
            for record in self.records():
                resized = resized or (record.get("event") == "resized" and record["time"] > killed)
                if resized and "loss" in record:
                    return float(record["time"]) - killed
            self._check(process)

    def _status(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self._folder / "runs/job/latest/status.json").read_text()))
        except FileNotFoundError:
            return {}

    def _check(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            sys.exit((self._folder / "output").read_text())
        time.sleep(0.05)


def recovery(rounds: int) -> list[float]:
    """Seconds to the next step, of each round."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            job = Job(Path(name), step_s=0.05, log_every_steps=1, epochs=2)
            with job.running(status=143) as process:
                killed = None
                while killed is None:
                    killed = job.kill_one(process)
                found.append(job.next_step(killed, process))
                process.terminate()
    return found


def kills_at_random(kills: int) -> tuple[int, dict[str, Any], int]:
    """How many hit, the last evaluation, and how many starts it took."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), step_s=0.5)
        hits = 0
        with job.running() as process:
            while hits < kills and process.poll() is None:
                time.sleep(random.uniform(*PAUSE_S))
                hits += job.kill_one(process) is not None
        results = next(record for record in reversed(job.records()) if "eval_wrong" in record)
        return hits, results, int(results["attempt"]) + 1


def main() -> None:
    """Print both tables."""
    rounds, kills, seed = (int(text) for text in [*sys.argv[1:], *["5", "10", "1"][len(sys.argv) - 1 :]])
    random.seed(seed)
    seconds = recovery(rounds)
    print("| SIGKILL of one of three workers, to the end of the next step | median | slowest |")
    print("|---|---|---|")
    print(f"| {rounds} rounds | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s |\n")
    hits, results, starts = kills_at_random(kills)
    print(f"| {STEPS} steps in {EPOCHS} epochs | workers killed | starts | visits of a sample | samples with others |")
    print("|---|---|---|---|---|")
    wrong = round(results["eval_wrong"] * 1200)
    print(f"| at random moments | {hits} | {starts} | {results['eval_visits']:.6f} | {wrong} of 1200 |")


if __name__ == "__main__":
    main()
