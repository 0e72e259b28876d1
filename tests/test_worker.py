"""The wrapper around each rank's command, as a real process, with this test as its supervisor."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_processes import is_running, wait_until_gone

from hvdtrain import contract, frames

PATIENCE_S = 60


class Supervisor:
    """Starts a wrapper and plays the supervisor's part of the channel."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str] | None = None) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "channel"))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        self.wrapper = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.worker", *command],
            env={**os.environ, contract.CHANNEL: str(folder / "channel"), "HOROVOD_RANK": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.channel, _ = listener.accept()
        listener.close()
        self.channel.settimeout(PATIENCE_S)
        self.hello = frames.receive(self.channel, frames.HELLO)
        self._reader = frames.FrameReader()
        self._waiting: list[tuple[bytes, bytes]] = []
        self.channel.sendall(frames.pack_json(frames.START, {"environment": environment or {}}))

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        while True:
            while self._waiting:
                yield self._waiting.pop(0)
            data = self.channel.recv(65536)
            if not data:
                return
            self._waiting += self._reader.feed(data)

    def line(self) -> str:
        """The next whole line of the command's output."""
        text = b""
        for kind, payload in self.frames():
            assert kind in (frames.OUT, frames.ERR)
            text += payload
            if text.endswith(b"\n"):
                return text.decode().strip()
        raise AssertionError("the channel closed")

    def rest(self) -> tuple[bytes, bytes, dict[str, Any]]:
        """Everything to the end: standard output, standard error, the exit message."""
        collected = {frames.OUT: b"", frames.ERR: b"", frames.EXIT: b""}
        for kind, payload in self.frames():
            collected[kind] += payload
        return collected[frames.OUT], collected[frames.ERR], json.loads(collected[frames.EXIT])

    def wait(self) -> int:
        return self.wrapper.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    started: list[Supervisor] = []

    def starter(command: list[str], environment: dict[str, str] | None = None) -> Supervisor:
        # Short, for the socket's path.
        folder = Path(tempfile.mkdtemp(prefix="hvdtest-"))
        started.append(Supervisor(folder, command, environment))
        (folder / "channel").unlink()
        folder.rmdir()
        return started[-1]

    yield starter
    for supervisor in started:
        supervisor.channel.close()
        supervisor.wrapper.kill()
        supervisor.wrapper.wait()
        assert supervisor.wrapper.stdout
        supervisor.wrapper.stdout.close()


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def test_output_end_and_identity_arrive(start: Any) -> None:
    supervisor = start(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"))
    assert supervisor.hello == {"rank": 3, "host": socket.gethostname(), "pid": supervisor.wrapper.pid}
    out, err, end = supervisor.rest()
    assert (out, err) == (b"out\n", b"err\n")
    assert (end["code"], end["stopped"]) == (7, False)
    assert supervisor.wait() == 7


def test_a_signal_is_told_as_shells_do(start: Any) -> None:
    supervisor = start(python("import os; os.kill(os.getpid(), 9)"))
    assert supervisor.rest()[2]["code"] == -9
    assert supervisor.wait() == 137


@pytest.mark.parametrize(
    "value",
    ["", " two  spaces ", 'quote\'s "x"', "line\nbreak\n", "$HOME `id` \\", "() { :; }; echo", "é ✓", "x" * 200_000],
)
@pytest.mark.parametrize("name", ["PLAIN", "BASH_FUNC_module%%", "with.dot"])
def test_environment_arrives_unchanged(start: Any, name: str, value: str) -> None:
    if len(value) > 100_000:
        value = value[:100_000]  # Linux takes 128 KiB for one variable
    code = f"import os, sys; sys.stdout.buffer.write(os.environb[{name.encode()!r}])"
    supervisor = start(python(code), {name: value})
    assert supervisor.rest()[0].decode() == value


def test_the_command_does_not_see_the_channel(start: Any) -> None:
    supervisor = start(python(f"import os; print(os.environ.get({contract.CHANNEL!r}))"))
    assert supervisor.rest()[0] == b"None\n"


def test_much_output_arrives_whole_and_in_order(start: Any) -> None:
    supervisor = start(python("for i in range(200000): print(i)"))
    assert supervisor.rest()[0] == b"".join(b"%d\n" % i for i in range(200_000))


def test_a_missing_program_is_named(start: Any) -> None:
    supervisor = start(["no-such-program"])
    _, err, end = supervisor.rest()
    assert err == b"no-such-program: No such file or directory\n"
    assert end["code"] == supervisor.wait() == 127


def test_nothing_that_the_command_started_lives_on(start: Any) -> None:
    """Neither a child in the background nor a daemon in a session of its own."""
    daemon = f"sleep 1{os.getpid()}.5"
    code = (
        "import subprocess; "
        "a = subprocess.Popen(['sleep', '1000']); "
        f"b = subprocess.Popen({['setsid', '-f', *daemon.split()]}); b.wait(); "
        "print(a.pid)"
    )
    supervisor = start(python(code))
    pid = int(supervisor.line())
    assert supervisor.rest()[2]["code"] == 0
    assert supervisor.wait() == 0
    wait_until_gone([pid], PATIENCE_S)
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert daemon not in listing


SLEEPER = "import os, time; print(os.getpid()); time.sleep(1000)"
# Ignores every polite request.
STUBBORN = f"import signal; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); {SLEEPER}"


def close(supervisor: Supervisor) -> None:
    supervisor.channel.close()


def say_stop(supervisor: Supervisor) -> None:
    supervisor.channel.sendall(frames.pack(frames.STOP, b"15"))


def say_kill(supervisor: Supervisor) -> None:
    supervisor.channel.sendall(frames.pack(frames.STOP, b"9"))


def terminate_wrapper(supervisor: Supervisor) -> None:
    supervisor.wrapper.terminate()


def kill_wrapper(supervisor: Supervisor) -> None:
    supervisor.wrapper.kill()


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (SLEEPER, close),
        (SLEEPER, say_stop),
        (SLEEPER, say_kill),
        (SLEEPER, terminate_wrapper),
        (SLEEPER, kill_wrapper),
        (STUBBORN, close),
        (STUBBORN, say_kill),
        (STUBBORN, kill_wrapper),
    ],
)
def test_the_command_ends_with_its_supervisor_or_wrapper(start: Any, code: str, end: Any) -> None:
    supervisor = start(python(code))
    pid = int(supervisor.line())
    assert is_running(pid)
    end(supervisor)
    supervisor.wait()
    wait_until_gone([pid], PATIENCE_S)


def test_the_channel_of_a_killed_supervisor_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    supervisor = Supervisor(folder, python(SLEEPER))
    supervisor.line()
    supervisor.channel.close()
    supervisor.wrapper.communicate(timeout=PATIENCE_S)
    assert not folder.exists()


def test_a_stopped_command_ends_too(start: Any) -> None:
    supervisor = start(python(SLEEPER))
    pid = int(supervisor.line())
    os.kill(pid, signal.SIGSTOP)
    say_stop(supervisor)
    end = supervisor.rest()[2]
    assert (end["code"], end["stopped"]) == (-signal.SIGTERM, True)
    wait_until_gone([pid], PATIENCE_S)


def test_without_a_supervisor_the_command_just_runs() -> None:
    environment = {name: value for name, value in os.environ.items() if name != contract.CHANNEL}
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.worker", *python("print('alone')")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "alone\n"


def test_a_dead_channel_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.worker", "true"],
        env={**os.environ, contract.CHANNEL: "/nonexistent/channel"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no supervisor at /nonexistent/channel: " in done.stderr
