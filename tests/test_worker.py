"""The wrapper around each rank's command, as a real process, with this test as its supervisor."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_processes import is_running, wait_until_gone

from hvdtrain import contract, frames
from hvdtrain.heartbeat import Heartbeat
from hvdtrain.supervise.channel import Listener

PATIENCE_S = 60


class Supervisor:
    """Starts a wrapper and plays the supervisor's part of the channel."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        listener = Listener()
        listener.socket.settimeout(PATIENCE_S)
        self.wrapper = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.worker", *command],
            env={**os.environ, contract.CHANNEL: listener.name, "HOROVOD_RANK": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        line = listener.accept()
        assert line
        self.channel = line.socket
        listener.close()
        self.channel.settimeout(PATIENCE_S)
        _, self.hello = frames.receive(self.channel)
        self.beats: list[dict[str, Any]] = []
        self._reader = frames.FrameReader()
        self.waiting: list[tuple[bytes, bytes]] = []
        if environment is not None:
            self.say(frames.START, {"environment": environment})

    def say(self, kind: bytes, message: dict[str, Any]) -> None:
        self.channel.sendall(frames.pack_json(kind, message))

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        while True:
            while self.waiting:
                yield self.waiting.pop(0)
            if not self.read():
                return

    def read(self) -> bool:
        """Take what has come, or wait for it; False when the channel has closed."""
        data = self.channel.recv(65536)
        for kind, payload in self._reader.feed(data):
            if kind == frames.BEAT:
                self.beats.append(json.loads(payload))
            else:
                self.waiting.append((kind, payload))
        return bool(data)

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
def start() -> Iterator[Any]:
    started: list[Supervisor] = []

    def starter(command: list[str], environment: dict[str, str] | None = None, *, go: bool = True) -> Supervisor:
        started.append(Supervisor(command, (environment or {}) if go else None))
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
    assert supervisor.hello == {"rank": 3, "host": socket.gethostname(), "pid": supervisor.wrapper.pid, "alias": ""}
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
    supervisor.say(frames.STOP, {"signal": 15, "grace_s": 3})


def say_kill(supervisor: Supervisor) -> None:
    supervisor.say(frames.STOP, {"signal": 9, "grace_s": 3})


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


def test_a_stopped_command_ends_too(start: Any) -> None:
    supervisor = start(python(SLEEPER))
    pid = int(supervisor.line())
    os.kill(pid, signal.SIGSTOP)
    say_stop(supervisor)
    end = supervisor.rest()[2]
    assert (end["code"], end["stopped"]) == (-signal.SIGTERM, True)
    wait_until_gone([pid], PATIENCE_S)


def test_a_run_that_is_ending_starts_nothing(start: Any, tmp_path: Path) -> None:
    supervisor = start(python(f"open({str(tmp_path / 'began')!r}, 'w')"), go=False)
    say_stop(supervisor)
    assert supervisor.wait() == 128 + signal.SIGTERM
    assert not (tmp_path / "began").exists()


def test_another_end_of_the_channel_that_is_no_supervisor(start: Any, tmp_path: Path) -> None:
    """A closed channel in place of an answer."""
    supervisor = start(python(f"open({str(tmp_path / 'began')!r}, 'w')"), go=False)
    supervisor.channel.close()
    assert supervisor.wait() == 1
    assert not (tmp_path / "began").exists()


def test_the_grace_period_is_the_supervisors(start: Any) -> None:
    slow = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(4), print('saved'), sys.exit(0)))"
    supervisor = start(python(f"{slow}\nprint('ready')\ntime.sleep(1000)"))
    assert supervisor.line() == "ready"
    supervisor.say(frames.STOP, {"signal": 15, "grace_s": PATIENCE_S})
    out, _, end = supervisor.rest()
    assert (out, end["code"], end["stopped"]) == (b"saved\n", 0, True)


def test_somebody_elses_wish_to_end_is_told_at_once(start: Any) -> None:
    """Who sends it, such as mpirun, may kill the wrapper before the command has ended."""
    supervisor = start(python(STUBBORN))
    supervisor.line()
    supervisor.wrapper.terminate()
    kind, _ = next(supervisor.frames())
    assert kind == frames.ENDING


# --- what the rank itself tells ----------------------------------------------------------------------------------


def test_an_exception_is_reported_before_the_interpreter_winds_up(start: Any) -> None:
    code = "import atexit\natexit.register(print, 'winding up')\ntry: 1 / 0\nexcept Exception: raise OSError('no data')"
    before = time.time()
    out, err, end = start(python(code)).rest()
    report = end["report"]
    assert report["exception"] == "OSError: no data"
    assert report["traceback"][0] == "Traceback (most recent call last):"
    assert "ZeroDivisionError: division by zero" in report["traceback"]
    assert before <= report["time"] <= time.time()
    # And the program behaves as ever.
    assert (out, end["code"]) == (b"winding up\n", 1)
    assert err.decode().splitlines() == report["traceback"]


def test_a_python_behind_a_shell_reports_too(start: Any) -> None:
    end = start(["sh", "-c", f"{sys.executable} -c 'raise KeyError(7)'; exit 9"]).rest()[2]
    assert (end["report"]["exception"], end["code"]) == ("KeyError: 7", 9)


def test_a_recursion_without_end_is_a_short_report(start: Any) -> None:
    report = start(python("def f(): g()\ndef g(): f()\nf()")).rest()[2]["report"]
    assert report["exception"].startswith("RecursionError")
    assert len(report["traceback"]) <= 200


def test_what_the_user_set_up_for_every_python_still_counts(start: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'from my sitecustomize'")
    code = "import os, sys; print(mine, os.environ['PYTHONPATH'], [p for p in sys.path if 'inject' in p])"
    out = start(python(code), {"PYTHONPATH": str(tmp_path)}).rest()[0]
    assert out.decode() == f"from my sitecustomize {tmp_path} []\n"
    out = start(python("import os; print([n for n in os.environ if n == 'PYTHONPATH' or n.startswith('HVD')])")).rest()[
        0
    ]
    assert out == b"['HVDTRAIN_HEARTBEAT']\n"


def test_a_crash_in_c_code_leaves_a_stack(start: Any) -> None:
    _, err, end = start(python("import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()")).rest()
    assert end["code"] == -signal.SIGSEGV
    assert b"Fatal Python error: Segmentation fault" in err
    assert b"in crash" in err


def test_heartbeats_arrive_also_from_a_rank_that_hangs(start: Any) -> None:
    code = (
        "import time; from hvdtrain.heartbeat import Heartbeat; h = Heartbeat.connect(); h.training(200, 2)\n"
        "h.step(7, 2, 448)\nwith h.collective('gradients'): print('in'); time.sleep(1000)"
    )
    supervisor = start(python(code))
    assert supervisor.line() == "in"
    while not supervisor.beats or not supervisor.beats[-1]["beat"]["waiting"]:
        supervisor.read()
    beat = supervisor.beats[-1]["beat"]
    assert (beat["step"], beat["steps"], beat["epoch"], beat["samples"]) == (7, 200, 2, 448)
    assert (beat["activity"], supervisor.beats[-1]["state"]) == ("gradients", "S")


def test_a_heartbeat_without_a_wrapper_goes_nowhere() -> None:
    Heartbeat.connect({}).step(1, 1, 1)
    Heartbeat.connect({contract.HEARTBEAT: "/nonexistent"}).step(1, 1, 1)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_hanging_rank_says_where_it_is(start: Any, stopped: bool) -> None:
    supervisor = start(python("import time\ndef wait_for_data(): print('in'); time.sleep(1000)\nwait_for_data()"))
    assert supervisor.line() == "in"
    while not supervisor.beats or supervisor.beats[-1]["state"] != "S":
        supervisor.read()
    if stopped:
        os.kill(supervisor.beats[-1]["pid"], signal.SIGSTOP)
        while supervisor.beats[-1]["state"] != "T":
            supervisor.read()
    supervisor.say(frames.DUMP, {})
    text = ""
    while "in wait_for_data" not in text:
        supervisor.read()
        text = b"".join(payload for kind, payload in supervisor.waiting if kind == frames.ERR).decode()
    assert re.search(rf"hvdtrain: process \d+ \(python\S*\): state {'T' if stopped else 'S'}", text)


def test_a_program_without_a_handler_survives_the_question(start: Any) -> None:
    supervisor = start(["sh", "-c", "sleep 1000 & echo in; wait"])
    assert supervisor.line() == "in"
    supervisor.say(frames.DUMP, {})
    text = ""
    while text.count("hvdtrain: process ") < 2:
        supervisor.read()
        text = b"".join(payload for kind, payload in supervisor.waiting if kind == frames.ERR).decode()
    say_stop(supervisor)
    assert supervisor.rest()[2]["code"] == -signal.SIGTERM


def test_the_names_in_inject_are_the_contracts() -> None:
    source = (Path(contract.__file__).parent / "worker" / "inject" / "sitecustomize.py").read_text()
    assert set(re.findall(r'"(HVDTRAIN_\w+)"', source)) == {contract.REPORT, contract.DUMP}


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
