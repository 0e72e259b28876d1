"""``validate-cluster --level quick`` on many hosts, against as many bare parallel ``ssh HOST true``, in pairs.

Hosts are network namespaces with an sshd each (tests/namespace_hosts.py), all on this machine, so what is measured is
also the work of every host's sshd and probe, which a cluster's hosts do for themselves. The order of a pair alternates.
The bar: 1.3 times the bare time plus 2 s, and 150 MB.

    .venv/bin/python benchmarks/validate_quick.py [--counts 16,64,256] [--rounds 5]      (root)
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespace_hosts import Cluster, why_no_hosts

_BARE = """
import subprocess, sys
started = [subprocess.Popen(["ssh", host, "true"], stdin=subprocess.DEVNULL) for host in sys.argv[1:]]
sys.exit(max(process.wait() for process in started))
"""


def _timed(cluster: Cluster, argv: list[str], log: Path) -> tuple[float, float]:
    """Seconds and the peak of the process's own memory, MB."""
    began = time.perf_counter()
    with log.open("wb") as output:
        process = cluster.hosts[0].popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    # 1: a check failed, which on one machine full of hosts may be the load.
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        sys.exit(log.read_text())
    return time.perf_counter() - began, used.ru_maxrss * 1024 / 1e6


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="16,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if reason := why_no_hosts():
        sys.exit(reason)
    print("| hosts | bare ssh | validate-cluster | of the bar | memory |\n|---|---|---|---|---|")
    for count in map(int, options.counts.split(",")):
        with tempfile.TemporaryDirectory() as folder, Cluster(count) as cluster:
            log = Path(folder) / "log"
            names = cluster.names
            argv = [sys.executable, "-m", "hvdtrain", "validate-cluster", "--hosts", ",".join(names)]
            bare, ours = [], []
            for number in range(options.rounds + 1):
                pair = [(bare, [sys.executable, "-c", _BARE, *names]), (ours, argv)]
                for times, command in pair if number % 2 else reversed(pair):
                    measured = _timed(cluster, command, log)
                    # The first pair fills caches.
                    times += [measured] * (number > 0)
        bare_s, ours_s = (statistics.median(seconds for seconds, _ in times) for times in (bare, ours))
        memory = max(megabytes for _, megabytes in ours)
        bar_s = 1.3 * bare_s + 2
        print(f"| {count} | {bare_s:.1f} s | {ours_s:.1f} s | {ours_s / bar_s:.0%} | {memory:.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
