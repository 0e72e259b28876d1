"""What level standard measures on hosts, how much it varies from run to run, and how long it takes.

To see whether a host with a known limit is found, limit one first, such as with scripts/hosts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from hvdtrain.cluster import standard
from hvdtrain.cluster.gather import gather
from hvdtrain.cluster.groups import fold
from hvdtrain.cluster.measured import Measured, judge
from hvdtrain.cluster.models import Evidence, Request
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.ranges import expand, split_list
from hvdtrain.remote.bootstrap import probe_command, probe_sources
from hvdtrain.remote.fanout import Session
from hvdtrain.remote.ssh import SshSettings, ssh_command

_SHOWN = 16


def measured(evidence: Evidence) -> tuple[Measured, float]:
    """One run and its seconds, logins included."""
    request = evidence.request
    commands = {host.name: ssh_command(host, request.ssh, probe_command(request.python)) for host in evidence.hosts}
    began = time.perf_counter()
    with Session(commands, probe_sources()) as session:
        found = standard.measure(session, evidence.reached, standard.chosen_network(evidence), request)
    return found, time.perf_counter() - began


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", required=True, help="names, such as h1,h2 or h[1-4]")
    parser.add_argument("--ssh-config", type=Path)
    parser.add_argument("--directory", help="on the hosts: its disk is measured")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    hosts = [Host(name) for _, part in split_list(options.hosts) for name in expand(part)]
    ssh = SshSettings(config=str(options.ssh_config.absolute()) if options.ssh_config else None)
    request = Request(ssh, sys.executable, options.directory)
    evidence = gather(hosts, request)
    if len(evidence.reached) < len(hosts):
        sys.exit(f"not reached: {', '.join(evidence.unreached)}")
    runs = [measured(evidence) for _ in range(options.runs)]
    for number, (found, seconds) in enumerate(runs, 1):
        print(f"run {number}: {seconds:.1f} s, {len(found.bit_per_s)} directions, {len(found.failures)} pairs failed")
        for finding in judge(found):
            if finding.status in ("warn", "fail"):
                print(
                    f"  {finding.status} {fold(finding.hosts)}: {finding.check}: {finding.found} ({finding.expected})"
                )
    names = list(evidence.reached)[:_SHOWN]
    print("\nMbit/s, medians of the runs; rows send, columns receive")
    print(" " * 10 + "".join(f"{name:>10}" for name in names))
    for sender in names:
        row = [[found.bit_per_s[sender, to] for found, _ in runs if (sender, to) in found.bit_per_s] for to in names]
        print(f"{sender:>10}" + "".join(f"{statistics.median(v) / 1e6:10.1f}" if v else " " * 10 for v in row))


if __name__ == "__main__":
    main()
