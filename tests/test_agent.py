"""A host's agent and the supervisor's connection to it, without ssh between them."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_processes import is_running, wait_until_gone

from hvdtrain.supervise.channel import Worker
from hvdtrain.supervise.events import EventLoop
from hvdtrain.supervise.hosts import remote_environment
from hvdtrain.supervise.remote import Handlers, RemoteHost, start_fault

PATIENCE_S = 60
AGENT = (sys.executable, "-m", "hvdtrain.worker.agent")


class Supervisor:
    """The supervisor's part: what it was told, and a loop that waits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = EventLoop()
        self.channel = f"hvdtrain-test-{secrets.token_hex(8)}"
        self.workers: list[Worker] = []
        self.said = b""
        self.shut = 0
        self.output: dict[int, bytes] = {}
        self.codes: dict[int, int] = {}
        self.lost: list[str] = []
        self.hosts: list[RemoteHost] = []

    def host(self, *argv: str, directory: Path | None = None, **environment: str) -> RemoteHost:
        handlers = Handlers(self._said, self._shut, lambda host, why: self.lost.append(why), self._ran)
        host = RemoteHost("far", argv or AGENT, self.loop, handlers)
        self.hosts.append(host)
        host.set_up(self.channel, str(directory or self.folder), environment, "127.0.0.1")
        return host

    def _said(self, worker: Worker, data: bytes) -> None:
        self.said += data
        if worker not in self.workers:
            self.workers.append(worker)

    def _shut(self, worker: Worker) -> None:
        self.shut += 1

    def _ran(self, number: int, data: bytes, code: int | None) -> None:
        self.output[number] = self.output.get(number, b"") + data
        if code is not None:
            self.codes[number] = code

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, (self.lost, self.output, [host.words for host in self.hosts])
            self.loop.turn(0.2)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
            host.wait(PATIENCE_S)
        self.loop.close()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path)
    yield made
    made.close()


def test_commands_run_in_the_folder_with_their_environment(supervisor: Supervisor) -> None:
    host = supervisor.host(COLOUR="blue and green")
    supervisor.until(lambda: host.ready)
    host.run(1, 'pwd; echo "$COLOUR"; exit 3')
    host.run(2, "kill -9 $$")
    supervisor.until(lambda: len(supervisor.codes) == 2)
    assert supervisor.codes == {1: 3, 2: -9}
    assert supervisor.output[1].decode() == f"{supervisor.folder}\nblue and green\n"


def test_much_output_arrives_whole(supervisor: Supervisor) -> None:
    host = supervisor.host()
    supervisor.until(lambda: host.ready)
    host.run(7, "head -c 3000000 /dev/zero | tr '\\0' x; echo end >&2")
    supervisor.until(lambda: 7 in supervisor.codes)
    assert supervisor.output[7] == b"x" * 3_000_000 + b"end\n"


def test_what_a_login_shell_says_first_is_passed_over(supervisor: Supervisor) -> None:
    host = supervisor.host("sh", "-c", "echo Welcome to this host; printf '\\0\\1binary'; exec \"$@\"", "-", *AGENT)
    supervisor.until(lambda: host.ready)
    host.run(0, "echo here")
    supervisor.until(lambda: supervisor.codes == {0: 0})
    assert supervisor.output[0] == b"here\n"


def test_a_run_is_signalled_as_a_group(supervisor: Supervisor) -> None:
    host = supervisor.host()
    supervisor.until(lambda: host.ready)
    host.run(5, "sleep 1000 & echo $!; wait")
    supervisor.until(lambda: supervisor.output.get(5, b"").endswith(b"\n"))
    host.signal(5, signal.SIGTERM)
    host.signal(6, signal.SIGTERM)
    supervisor.until(lambda: 5 in supervisor.codes)
    wait_until_gone([int(supervisor.output[5])], PATIENCE_S)


@pytest.mark.parametrize("kill", [False, True])
def test_the_end_of_the_connection_ends_everything(supervisor: Supervisor, kill: bool) -> None:
    host = supervisor.host()
    supervisor.until(lambda: host.ready)
    # One that is no child of anybody's, and, where the agent is there to see to it, one that doesn't listen to SIGTERM.
    listens = "" if kill else "trap '' TERM; "
    host.run(0, f"{listens}(setsid sh -c 'echo $$; exec sleep 1000' &); exec sleep 1000")
    supervisor.until(lambda: supervisor.output.get(0, b"").endswith(b"\n"))
    pid = int(supervisor.output[0])
    assert is_running(pid)
    if kill:
        host._ssh.kill()
        supervisor.until(lambda: supervisor.lost)
        assert supervisor.lost == ["its connection has ended"]
        assert supervisor.codes == {0: 255}
        os.kill(pid, signal.SIGKILL)
    else:
        host.close()
        host.wait(PATIENCE_S)
    wait_until_gone([pid], PATIENCE_S)


def test_a_worker_of_the_host_is_a_stream(supervisor: Supervisor) -> None:
    host = supervisor.host()
    supervisor.until(lambda: host.ready)
    script = (
        "import os, socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + os.environ['HVDTRAIN_CHANNEL']); "
        "s.sendall(b'hello'); print(s.recv(100), flush=True); print(s.recv(100))"
    )
    host.run(0, f'{sys.executable} -c "{script}"')
    supervisor.until(lambda: supervisor.said == b"hello")
    (worker,) = supervisor.workers
    assert worker.is_remote
    assert worker.host == "far"
    worker.line.send(b"answer")
    supervisor.until(lambda: b"answer" in supervisor.output.get(0, b""))
    worker.line.close()
    supervisor.until(lambda: 0 in supervisor.codes)


def test_why_a_host_cannot_be_used(supervisor: Supervisor) -> None:
    cases = {
        "the working directory can't be used: No such file or directory: /no/such": {"directory": Path("/no/such")},
        "the folder for temporary files can't be used: TMPDIR=/no/such": {"TMPDIR": "/no/such"},
    }
    for text, settings in cases.items():
        host = supervisor.host(**settings)  # type: ignore[arg-type]
        supervisor.until(lambda host=host: host.fault)  # type: ignore[misc]
        assert text in (host.fault or "")
        assert text in str(start_fault(host, "/p"))


def test_two_names_of_one_host_are_noticed(supervisor: Supervisor) -> None:
    first = supervisor.host()
    supervisor.until(lambda: first.ready)
    second = supervisor.host()
    supervisor.until(lambda: second.fault)
    assert second.fault == "another name of this launch means this host, too"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("sh", "-c", "echo 'sh: /p: No such file or directory' >&2; exit 127"), "far:/p: the Python that the launch"),
        (("sh", "-c", "echo 'python: No module named hvdtrain' >&2; exit 1"), "far:/p: its Python has no hvdtrain"),
        (("sh", "-c", "echo 'Host key verification failed.' >&2; exit 255"), "its host key isn't known"),
        (("sh", "-c", "echo 'far: Permission denied (publickey).' >&2; exit 255"), "doesn't let this user in"),
        (("sh", "-c", "cat /dev/zero"), "it says what no agent says"),
        (("sh", "-c", "echo out of order >&2; exit 4"), "out of order"),
    ],
)
def test_what_keeps_an_agent_from_starting(supervisor: Supervisor, argv: tuple[str, ...], text: str) -> None:
    host = supervisor.host(*argv)
    supervisor.until(lambda: host.fault and host.ssh_status is not None)
    assert text in str(start_fault(host, "/p"))
    # Whoever has something run there now is told at once.
    host.run(3, "true")
    assert supervisor.codes == {3: 255}


def test_a_login_has_variables_of_its_own() -> None:
    assert remote_environment({"HOME": "/h", "USER": "u", "PATH": "/p", "A": "b"}) == {"PATH": "/p", "A": "b"}
