"""``python -m hvdtrain.drill.on_host``: does a fault on the host on which it runs, and undoes it.

A dialogue over standard input and output, which may be an ssh connection: it gets a request, says ``ready`` once it has
found what the request is about, does it at the next line, says ``done``, and undoes what lasts as soon as its input
ends. So whatever becomes of the drill, nothing stays stopped or slowed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from hvdtrain import contract, heartbeat

# What the dialogue's lines begin with: a login may say things of its own.
MARK = "hvdtrain-drill: "
_WORKER, _AGENT = "hvdtrain.worker", "hvdtrain.worker.agent"
# Short against the computation of a step, in which the rank has to be stopped.
_LOOK_S = 0.0005
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

Request = dict[str, Any]
# What is done at the word; its value goes back to the drill.
Deed = Callable[[], Any]


class GoneError(Exception):
    """The process isn't there any more, or isn't one of this run."""


class RefusedError(Exception):
    """It can't be done on this host, and why."""


# --- ranks ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _kill_command(request: Request) -> Iterator[Deed]:
    command = _command(_wrapper(request))
    yield command.kill


@contextlib.contextmanager
def _kill_wrapper(request: Request) -> Iterator[Deed]:
    yield _wrapper(request).kill


@contextlib.contextmanager
def _stop_command(request: Request) -> Iterator[Deed]:
    # The wrapper gives the command a session of its own.
    group = _command(_wrapper(request)).pid
    yield lambda: os.killpg(group, signal.SIGSTOP)


@contextlib.contextmanager
def _slow_command(request: Request) -> Iterator[Deed]:
    command, over = _command(_wrapper(request)), threading.Event()
    arguments = (_heartbeat(command), command.pid, request["stop_s"], over)
    thread = threading.Thread(target=_stop_in_each_step, args=arguments, name="slow", daemon=True)
    try:
        yield thread.start
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _stop_in_each_step(page: mmap.mmap, group: int, stop_s: float, over: threading.Event) -> None:
    """While the rank computes: in a collective it would look as if it waited for the others."""
    stopped_in = -1
    with contextlib.suppress(ProcessLookupError):
        while not over.wait(_LOOK_S):
            beat = heartbeat.read(page)
            if beat.step == stopped_in or beat.waiting:
                continue
            stopped_in = beat.step
            os.killpg(group, signal.SIGSTOP)
            over.wait(stop_s)
            os.killpg(group, signal.SIGCONT)


def _wrapper(request: Request) -> psutil.Process:
    """The wrapper of the rank, which must be this run's: its number may be another process's by now."""
    try:
        wrapper = psutil.Process(request["pid"])
        if _WORKER in wrapper.cmdline() and _is_of(wrapper, request["run_directory"]):
            return wrapper
    except (psutil.Error, ValueError, TypeError):
        pass
    raise GoneError


def _command(wrapper: psutil.Process) -> psutil.Process:
    """The rank's command: its wrapper's first child."""
    try:
        return min(wrapper.children(), key=psutil.Process.create_time)
    except (psutil.NoSuchProcess, ValueError) as error:
        raise GoneError from error


def _heartbeat(command: psutil.Process) -> mmap.mmap:
    """The page in which the rank's command says what it is doing."""
    try:
        with Path(command.environ()[contract.HEARTBEAT]).open("rb") as file:
            return mmap.mmap(file.fileno(), heartbeat.PAGE, prot=mmap.PROT_READ)
    except (psutil.Error, KeyError, OSError) as error:
        raise GoneError from error


def _is_of(process: psutil.Process, run_directory: str) -> bool:
    return bool(process.environ().get(contract.RUN_DIRECTORY) == run_directory)


# --- hosts ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _freeze(request: Request) -> Iterator[Deed]:
    """Stop the host's agent and all that it has started: connections stay open, and nothing is said any more."""
    agents = [process for process in _wrapper(request).parents() if _AGENT in process.cmdline()]
    if not agents:
        raise GoneError
    frozen: list[psutil.Process] = []

    def freeze() -> None:
        # Until no new one is found: one may just have been starting another.
        while found := [each for each in _family(agents[0]) if each not in frozen]:
            frozen.extend(found)
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()

    try:
        yield freeze
    finally:
        for process in reversed(frozen):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess as error:
        raise GoneError from error


@contextlib.contextmanager
def _may_slow_link(request: Request) -> Iterator[Deed]:
    _tc()
    yield lambda: None


def _tc() -> str:
    """Path of the tool that slows links."""
    tc = shutil.which("tc", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if tc is None:
        raise RefusedError("it has no tc (install iproute2)")
    if os.geteuid() != 0:
        raise RefusedError("the user isn't root there, and only root may slow a link")
    return tc


@contextlib.contextmanager
def _slow_link(request: Request) -> Iterator[Deed]:
    """Let the interface send no more than the rate."""
    tc = _tc()
    interface = request["interface"] or _interface_of_the_login()
    for queue in json.loads(_run(tc, "-j", "qdisc", "show", "dev", interface)):
        # The kernel's own have no number.
        if queue.get("root") and queue["handle"] != "0:":
            raise RefusedError(f"{interface} has a qdisc already ({queue['kind']} {queue['handle']}), which stays")
    shape = ["root", "tbf", "rate", request["rate"], "burst", "256kb", "latency", "50ms"]
    slowed = []

    def slow() -> str:
        _run(tc, "qdisc", "add", "dev", interface, *shape)
        slowed.append(interface)
        return interface

    try:
        yield slow
    finally:
        for name in slowed:
            _run(tc, "qdisc", "del", "dev", name, "root")


def _interface_of_the_login() -> str:
    """The interface by which ssh has come."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    for name, addresses in psutil.net_if_addrs().items():
        if len(words) == 4 and words[2] in [address.address for address in addresses]:
            return str(name)
    raise RefusedError("nobody knows which of its interfaces the job uses; try --rank with one on another host")


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    except subprocess.CalledProcessError as error:
        words = " ".join(error.stderr.split())
        raise RefusedError(f"'{' '.join(argv)}' failed: {words}") from error
    return done.stdout or "[]"


@contextlib.contextmanager
def _what_is_left(request: Request) -> Iterator[Deed]:
    """Tell which processes of the run live on after so many seconds; sooner where none does."""

    def wait() -> list[str]:
        deadline = time.monotonic() + request["wait_s"]
        while (left := _processes_of(request["run_directory"])) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    yield wait


def _processes_of(run_directory: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_alive and _is_of(process, run_directory):
                found.append(f"{process.pid} {' '.join(process.cmdline()) or process.name()}")
    return found


# --- the dialogue --------------------------------------------------------------------------------------------------

ACTIONS: dict[str, Callable[[Request], AbstractContextManager[Deed]]] = {
    "kill-command": _kill_command,
    "kill-wrapper": _kill_wrapper,
    "stop-command": _stop_command,
    "slow-command": _slow_command,
    "freeze": _freeze,
    "may-slow-link": _may_slow_link,
    "slow-link": _slow_link,
    "left": _what_is_left,
}


def main() -> None:
    """Answer one request; see the module's own words."""
    for number in _SIGNALS:
        signal.signal(number, _end)
    # Whoever listens may be gone, and what was done has to be undone all the same.
    with contextlib.suppress(BrokenPipeError):
        try:
            request = json.loads(sys.stdin.readline())
            with ACTIONS[request["action"]](request) as act:
                _say("ready")
                if sys.stdin.readline():
                    _say("done", act())
                    sys.stdin.read()
                _be_deaf()
        except (GoneError, psutil.NoSuchProcess, ProcessLookupError):
            _say("gone")
        except RefusedError as error:
            _say("refused", str(error))
        else:
            _say("undone")


def _say(word: str, value: object = None) -> None:
    sys.stdout.write(MARK + json.dumps({"word": word, "value": value}) + "\n")
    sys.stdout.flush()


def _end(*_: object) -> None:
    _be_deaf()
    sys.exit(1)


def _be_deaf() -> None:
    """Undoing takes its time."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
