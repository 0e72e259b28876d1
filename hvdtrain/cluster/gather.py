"""Asks all hosts at once for their facts and clocks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hvdtrain.cluster.checks.files import looked_at
from hvdtrain.cluster.models import Evidence, Request, Unreached
from hvdtrain.cluster.network import LAUNCHER, SECTIONS, look_at_network
from hvdtrain.cluster.progress import SILENT, Progress
from hvdtrain.cluster.told import sound
from hvdtrain.hosts.local import is_this_machine
from hvdtrain.hosts.models import Host
from hvdtrain.remote.bootstrap import NO_PYTHON, OLD_PYTHON, probe_command, probe_sources
from hvdtrain.remote.fanout import HostFailure, Session, clock_offsets
from hvdtrain.remote.ssh import SSH_FAILED, SshSettings, explain, mentions_host_key_checks, ssh_command

_SSH_CONFIG_TIMEOUT_S = 10.0
_SSH_CONFIG_THREADS = 4


def gather(hosts: Sequence[Host], request: Request, progress: Progress = SILENT) -> Evidence:
    """The facts of all hosts; one that is dead, slow or lies costs its timeout only."""
    by_name = {host.name: host for host in hosts}
    commands = probe_commands(by_name.values(), request)
    launcher = next((name for name in by_name if is_this_machine(name)), LAUNCHER)
    commands.setdefault(launcher, _probe_here(request))
    done: set[str] = set()

    def on_done(name: str, _: object) -> None:
        done.update({name} & by_name.keys())
        progress.tick(f"{len(done)} of {len(by_name)} hosts")

    question = {
        "ask": "facts",
        "python": request.python,
        "paths": [*looked_at(request.paths, request.directory), "/tmp"],  # noqa: S108
        "files": list(request.files),
    }
    if request.sections:
        question["sections"] = list(request.sections)
    questions = dict.fromkeys(by_name, question)
    questions.setdefault(launcher, {"ask": "facts", "sections": list(SECTIONS)})
    with ThreadPoolExecutor(1) as aside, Session(commands, probe_sources()) as session:
        unchecked = aside.submit(unchecked_keys, hosts, request.ssh)
        outcomes = session.ask(questions, request.timeout_s, on_done)
        facts = {
            name: found
            for name, outcome in outcomes.items()
            if not isinstance(outcome, HostFailure) and (found := sound(outcome.get("facts"))) is not None
        }
        answered = [name for name in by_name if name in facts]
        clocks = clock_offsets(session, answered, request.timeout_s)
        network = None
        if launcher in facts and answered not in ([], [launcher]):
            interfaces, timeout_s = request.interfaces, request.timeout_s
            network = look_at_network(session, answered, facts, launcher, interfaces=interfaces, timeout_s=timeout_s)
        return Evidence(
            hosts=tuple(by_name.values()),
            request=request,
            facts={name: facts[name] for name in answered},
            unreached={name: unreached for name in by_name if (unreached := _why(name, outcomes[name]))},
            clocks={
                name: (found["offset_s"], found["error_s"]) for name, found in clocks.items() if isinstance(found, dict)
            },
            unchecked_keys=unchecked.result(),
            network=network,
        )


def probe_commands(hosts: Iterable[Host], request: Request) -> dict[str, list[str]]:
    """The command that starts the probe on each host, by name; on this machine without ssh."""
    probe = probe_command(request.python)
    return {
        host.name: _probe_here(request) if is_this_machine(host.name) else ssh_command(host, request.ssh, probe)
        for host in hosts
    }


def _probe_here(request: Request) -> list[str]:
    return ["sh", "-c", probe_command(request.python)]


def _why(name: str, outcome: object) -> Unreached | None:
    if not isinstance(outcome, HostFailure):
        if isinstance(outcome, dict) and isinstance(outcome.get("facts"), dict):
            return None
        return Unreached("garbage", "its answer holds no facts", "see what its login shell does")
    if outcome.exit_status == SSH_FAILED and not is_this_machine(name):
        fault = explain(name, outcome.stderr)
        return Unreached(fault.kind, fault.what, fault.fix)
    if outcome.kind == "timeout":
        return Unreached("silent", "it didn't answer in time", f"see whether 'ssh {name} true' is slow; or --timeout")
    if outcome.exit_status == NO_PYTHON:
        return Unreached("no-python", "it has no Python", "install python3 there, or set 'python'")
    if outcome.exit_status == OLD_PYTHON:
        return Unreached("old-python", outcome.stderr or outcome.text, "install Python 3.8 or newer there")
    kind = "refused-probe" if outcome.kind == "refused" else outcome.kind
    last = outcome.stderr.splitlines()[-1:]
    return Unreached(kind, ": ".join([outcome.text, *last])[:300], f"see what 'ssh {name} python3 -V' says")


def unchecked_keys(hosts: Sequence[Host], settings: SshSettings) -> frozenset[str]:
    """The hosts for which the user's ssh configuration turns host-key checks off."""
    if not mentions_host_key_checks(settings.config):
        return frozenset()

    def is_unchecked(host: Host) -> bool:
        if is_this_machine(host.name):
            return False
        ssh, *options, _ = ssh_command(host, settings, "")
        try:
            done = subprocess.run(
                [ssh, "-G", *options],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SSH_CONFIG_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return any(
            line in done.stdout.splitlines() for line in ("stricthostkeychecking false", "stricthostkeychecking no")
        )

    with ThreadPoolExecutor(_SSH_CONFIG_THREADS) as pool:
        return frozenset(host.name for host, found in zip(hosts, pool.map(is_unchecked, hosts), strict=True) if found)
