"""How long the probe takes on many hosts at once, against a bare parallel ``ssh HOST true``, paired.

Without ``--hosts``, plain local processes stand for ssh: what is left is the cost of the fan-out and the probe itself.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.hosts.models import Host
from hvdtrain.remote.bootstrap import probe_command, probe_sources
from hvdtrain.remote.fanout import HostFailure, Session
from hvdtrain.remote.ssh import SshSettings, ssh_command

TIMEOUT_S = 300.0


def commands(names: list[str], command: str, settings: SshSettings | None) -> dict[str, list[str]]:
    """The argv for each host."""
    if settings is None:
        return {name: ["sh", "-c", command] for name in names}
    return {name: ssh_command(Host(name), settings, command) for name in names}


def bare(argvs: dict[str, list[str]]) -> float:
    """Seconds of all at once."""
    began = time.perf_counter()
    started = [subprocess.Popen(argv, stdin=subprocess.DEVNULL) for argv in argvs.values()]
    statuses = [process.wait() for process in started]
    if any(statuses):
        sys.exit(f"{sum(map(bool, statuses))} hosts can't be reached")
    return time.perf_counter() - began


def probe(argvs: dict[str, list[str]]) -> float:
    """Seconds until every host has told all its facts."""
    began = time.perf_counter()
    with Session(argvs, probe_sources()) as session:
        answers = session.ask({name: {"ask": "facts", "paths": ["/tmp"]} for name in argvs}, TIMEOUT_S)  # noqa: S108
    seconds = time.perf_counter() - began
    failures = [f"{name}: {answer}" for name, answer in answers.items() if isinstance(answer, HostFailure)]
    if failures:
        sys.exit("\n".join(failures))
    return seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", help="names, comma-separated")
    parser.add_argument("--ssh-config", type=Path)
    parser.add_argument("--count", type=int, default=64, help="of processes that stand for hosts")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = options.hosts.split(",") if options.hosts else [f"host{number}" for number in range(options.count)]
    settings = SshSettings(config=options.ssh_config) if options.hosts else None
    bare_argvs = commands(names, "true", settings)
    probe_argvs = commands(names, probe_command(sys.executable), settings)
    pairs = [(bare(bare_argvs), probe(probe_argvs)) for _ in range(options.rounds)]
    bare_s, probe_s = (statistics.median(values) for values in zip(*pairs, strict=True))
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{'hosts':>6} {'bare s':>8} {'probe s':>8} {'bar s':>8} {'memory MiB':>11}")
    print(f"{len(names):6} {bare_s:8.2f} {probe_s:8.2f} {1.3 * bare_s + 2:8.2f} {memory_mib:11.1f}")


if __name__ == "__main__":
    main()
