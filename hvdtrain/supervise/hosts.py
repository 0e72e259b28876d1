"""All hosts of an attempt other than this one, and the programs by which horovodrun and mpirun reach them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain import contract, frames, processes
from hvdtrain.errors import StartError
from hvdtrain.horovod import programs
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.remote.ssh import tunnel
from hvdtrain.supervise.channel import SocketLine
from hvdtrain.supervise.events import EventLoop
from hvdtrain.supervise.remote import (
    ALIVE_INTERVAL_S,
    CONNECT_TIMEOUT_S,
    Handlers,
    RemoteHost,
    start_fault,
)
from hvdtrain.supervise.tools import ssh

_RENDEZVOUS_PORT = re.compile(r"HOROVOD_GLOO_RENDEZVOUS_PORT=(\d+)")
# What horovodrun has run on a host ends with horovodrun's own process for it, as with ssh: first politely.
_KILL_AFTER_S = 5.0
# For the agents to end everything on their hosts.
_CLOSE_PATIENCE_S = 8.0
# Variables that a login on a host has of its own.
_OF_THE_LOGIN = ("HOME", "LOGNAME", "SHELL", "USER", "XDG_RUNTIME_DIR")
_SSH = """\
#!/bin/sh
# As with ssh itself, options may also stand between the host and the command.
host=
while [ $# -gt 0 ]; do
    case $1 in
        -o | -p | -i) shift 2 ;;
        -*) shift ;;
        *)
            [ -z "$host" ] || break
            host=$1
            shift
            ;;
    esac
done
{variable}="$*" exec {command} "$host"
"""


class Hosts:
    """The other hosts' agents, and what horovodrun or mpirun has them run.

    Args:
        plan: of the launch.
        channel: name of the supervisor's own socket, which the agents' have too.
        loop: in which everything is handled.
        handlers: who is told of workers and lost hosts; what was run is told to horovodrun's own process for it.
        place: the host that horovodrun means by a name.
    """

    def __init__(
        self, plan: LaunchPlan, channel: str, loop: EventLoop, handlers: Handlers, place: Callable[[str], str]
    ) -> None:
        self._plan = plan
        self._channel = channel
        self._loop = loop
        self._place = place
        self._numbers = itertools.count()
        # Runs on other hosts: who waits for each, and where it runs.
        self._waiting: dict[int, tuple[SocketLine, RemoteHost]] = {}
        self._tunnels: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._handlers = dataclasses.replace(handlers, ran=self._ran)
        self._environment = remote_environment(plan.environment)
        self._hosts: dict[str, RemoteHost] = {}
        for name, argv in plan.agents.items():
            self.add(name, argv)
        loop.every(ALIVE_INTERVAL_S, self._tick)

    # --- beginning and end -------------------------------------------------------------------------------------

    def add(self, name: str, argv: tuple[str, ...]) -> None:
        """Begin to reach a host, by the ssh command that starts its agent; also one that was lost."""
        if before := self._hosts.get(name):
            before.close()
            before.wait(0)
        self._hosts[name] = host = RemoteHost(name, argv, self._loop, self._handlers)
        host.set_up(self._channel, self._plan.directory, self._environment, self.launcher_address)

    def connect(self, go_on: Callable[[], bool]) -> None:
        """Wait until each agent is ready, or can't be. ``go_on``: false once waiting has no use any more."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while go_on() and not all(host.ready or host.fault for host in self._hosts.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._loop.turn(min(left, 1.0))

    def require_all(self) -> None:
        """Check that all agents are ready.

        Raises:
            StartError: a host can't be used.
        """
        faults = [start_fault(host, self._plan.python) for host in self._hosts.values() if not host.ready]
        if len(faults) == 1:
            raise faults[0]
        if faults:
            listed = "; ".join(f"{fault.where}: {fault.what}" for fault in faults[:5])
            more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
            fix = f"try 'hvdtrain validate-cluster'; {faults[0].fix}"
            raise StartError(f"{len(faults)} hosts can't be used: {listed}{more}", fix=fix)

    @property
    def launcher_address(self) -> str | None:
        """This machine's address as the hosts see it, as the plan has it."""
        settings = (self._plan.environment, *self._plan.host_environment.values())
        return next((found for values in settings if (found := values.get(contract.GLOO_RENDEZVOUS))), None)

    def knows(self, name: str) -> bool:
        """Whether a host is reached, or about to be."""
        return name in self._hosts and self._hosts[name].fault is None

    @property
    def lost(self) -> dict[str, str]:
        """The hosts that are lost, and why."""
        return {name: host.fault for name, host in self._hosts.items() if host.fault is not None}

    def get(self, name: str) -> RemoteHost | None:
        """A host that is reached now."""
        host = self._hosts.get(name)
        return host if host and host.ready and host.fault is None else None

    def close(self) -> None:
        """End everything on the other hosts, and wait for it where they can still be reached."""
        for tunnel_ in self._tunnels.values():
            tunnel_.kill()
            tunnel_.wait()
        waited = [host for host in self._hosts.values() if host.fault is None]
        for host in self._hosts.values():
            host.close()
        deadline = time.monotonic() + _CLOSE_PATIENCE_S
        for host in waited:
            host.wait(deadline - time.monotonic())

    def _tick(self) -> None:
        now = time.monotonic()
        for host in self._hosts.values():
            host.tick(now)

    # --- horovodrun's commands ---------------------------------------------------------------------------------

    def run(self, line: SocketLine, payload: bytes) -> None:
        """Run a command on a host for what stands for ssh at the other end of the line."""
        message = json.loads(payload)
        name = self._place(str(message["host"]))
        host = self._hosts.get(name)
        if host is None:
            line.send(frames.pack(frames.HERE, b""))
            return
        if self.has_tunnels and (port := _RENDEZVOUS_PORT.search(str(message["command"]))):
            self._tunnel(host, int(port[1]))
        number = next(self._numbers)
        self._waiting[number] = line, host
        host.run(number, str(message["command"]))

    @property
    def has_tunnels(self) -> bool:
        """Whether workers reach horovodrun's rendezvous through ssh: Horovod 0.28.1 asks for it over IPv4 alone."""
        address = self.launcher_address
        return address is not None and ":" in address

    def _tunnel(self, host: RemoteHost, port: int) -> None:
        """Bring a host's connections to that port to horovodrun; Horovod tries again for long enough."""
        if (host.name, port) not in self._tunnels:
            self._tunnels[host.name, port] = subprocess.Popen(
                tunnel(host.argv, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=processes.end_with_parent(signal.SIGTERM),
            )

    def abandon(self, line: SocketLine) -> None:
        """Whoever waited for a run is gone: it ends."""
        for number, (waiting, host) in list(self._waiting.items()):
            if waiting is line:
                del self._waiting[number]
                host.signal(number, signal.SIGTERM)
                self._loop.after(_KILL_AFTER_S, functools.partial(host.signal, number, signal.SIGKILL))

    def _ran(self, number: int, output: bytes, code: int | None) -> None:
        if number not in self._waiting:
            return
        line, _ = self._waiting[number]
        if output:
            line.send(frames.pack(frames.OUT, output))
        if code is not None:
            del self._waiting[number]
            line.send(frames.pack_json(frames.EXIT, {"code": code}))


def remote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The plan's variables without those that a login on another host has of its own."""
    return {name: value for name, value in environment.items() if name not in _OF_THE_LOGIN}


def with_programs(plan: LaunchPlan, environment: Mapping[str, str], *, other_hosts: bool) -> dict[str, str]:
    """Write what stands for ssh and mpirun into the run directory; returns the variables by which horovodrun finds it.

    Args:
        plan: whose controller tells whether mpirun is needed.
        environment: horovodrun's variables.
        other_hosts: whether horovodrun has to reach other hosts, or what it takes for such.

    Raises:
        StartError: they can't be written.
    """
    if not other_hosts and plan.controller != "mpi":
        return dict(environment)
    folder = Path(plan.run_directory) / contract.PROGRAMS
    own = {"PATH": os.pathsep.join([str(folder), environment["PATH"]])}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if other_hosts:
            text = _SSH.format(variable=ssh.COMMAND, command=programs.script(ssh.__file__))
            programs.write(folder / "ssh", text)
        if plan.controller == "mpi":
            own |= programs.write_mpirun(folder, plan.mpirun or "mpirun", plan.mpi_parameters)
    except OSError as error:
        raise StartError(f"can't write the run directory: {error.strerror}", where=str(folder)) from error
    return {**environment, **own}
