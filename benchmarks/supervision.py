"""What supervision takes from a training: CPU time of the supervisor and the ranks' wrappers, and of the heartbeats.

Usage: python benchmarks/supervision.py [SECONDS]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hvdtrain.heartbeat import Heartbeat

TICKS = os.sysconf("SC_CLK_TCK")
# A step of hvdtrain's loop: its end, the loading of data, the step, a collective with its end.
WRITES_OF_A_STEP = 5


def cpu_s(pid: int) -> float:
    """CPU time that a process itself has used, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def status(folder: Path) -> dict[str, Any]:
    """``status.json`` of the newest run; empty before there is one."""
    try:
        return dict(json.loads((folder / "runs/job/latest/status.json").read_text()))
    except FileNotFoundError:
        return {}


def share(controller: str, seconds: float, folder: Path) -> tuple[float, float]:
    """CPU time of supervisor and wrappers over that of the ranks, and milliseconds of a step."""
    spec = {
        "task": "hvdtrain.tasks.digits_torch:Digits",
        "options": {"epochs": 100_000},
        "processes": 2,
        "hosts": {"list": ["localhost:2"]},
        "controller": controller,
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "hvdtrain", "launch", "job.yaml"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while status(folder).get("step", 0) < 100:
            if process.poll() is not None:
                sys.exit("the job has ended")
            time.sleep(0.2)
        wrappers = [rank["pid"] for rank in status(folder)["ranks"]]
        ranks = [int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]) for pid in wrappers]
        pids = [process.pid, *wrappers]
        before, step = (sum(map(cpu_s, pids)), sum(map(cpu_s, ranks))), status(folder)["step"]
        time.sleep(seconds)
        after = (sum(map(cpu_s, pids)), sum(map(cpu_s, ranks)))
        steps = status(folder)["step"] - step
        return (after[0] - before[0]) / (after[1] - before[1]), 1000 * seconds / steps
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def heartbeat_us(writes: int = 200_000) -> float:
    """Microseconds of one write."""
    heartbeat = Heartbeat.connect({})
    started = time.perf_counter()
    for _ in range(writes):
        heartbeat.doing("gradients")
    return (time.perf_counter() - started) / writes * 1e6


def main() -> None:
    """Print the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    beat = heartbeat_us()
    print("| two ranks of digits-torch | step | supervisor and wrappers, of the ranks' CPU | a step's heartbeats |")
    print("|---|---|---|---|")
    for controller in ("gloo", "mpi"):
        with tempfile.TemporaryDirectory() as name:
            part, step_ms = share(controller, seconds, Path(name))
        beats = WRITES_OF_A_STEP * beat / 1000 / step_ms
        print(f"| {controller} | {step_ms:.1f} ms | {100 * part:.2f}% | {100 * beats:.3f}% ({beat:.2f} us each) |")


if __name__ == "__main__":
    main()
