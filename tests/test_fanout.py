"""Dialogues with many processes at once, some of which don't behave. Plain commands stand for ssh."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.remote.bootstrap import NO_PYTHON, probe_command, probe_sources
from hvdtrain.remote.fanout import HostFailure, Session, clock_offsets

LIMIT_S = 180.0
GOOD = ["sh", "-c", probe_command(sys.executable)]
CLOCK = {"ask": "clock"}


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def failure(outcome: object) -> HostFailure:
    assert isinstance(outcome, HostFailure), outcome
    return outcome


def test_many_hosts_keep_a_dialogue_over_several_phases() -> None:
    names = [f"host{number}" for number in range(6)]
    seen: list[str] = []
    with Session(dict.fromkeys(names, GOOD), probe_sources(), max_starting=2) as session:
        first = session.ask({name: {"ask": "facts", "sections": ["limits"]} for name in names}, LIMIT_S,
                            lambda name, _: seen.append(name))  # fmt: skip
        second = session.ask({names[0]: CLOCK}, LIMIT_S)
        offsets = clock_offsets(session, names, LIMIT_S)
    assert sorted(seen) == names
    assert all(first[name]["facts"]["limits"]["nofile_soft"] > 0 for name in names)  # type: ignore[index]
    assert set(second) == {names[0]}
    assert all(abs(offsets[name]["offset_s"]) <= offsets[name]["error_s"] + 0.001 for name in names)


BAD = {
    "early": (shell("echo dead >&2; exit 7"), "ended"),
    "deaf": (shell("exec sleep 1000"), "timeout"),
    "liar": (shell("""while read -r line; do echo '{"id": 77, "time_unix_s": 1}'; done"""), "garbage"),
    "binary": (shell("exec cat /dev/urandom"), "garbage"),
    "huge": (shell("exec tr '\\0' x </dev/zero"), "too-much"),
    "missing": (["/nonexistent/ssh"], "start"),
}


def test_bad_hosts_cost_only_themselves() -> None:
    commands = {name: command for name, (command, _) in BAD.items()} | {"good": GOOD}
    done_after = {}
    began = time.monotonic()
    with Session(commands, probe_sources()) as session:
        assert isinstance(session.ask({"good": CLOCK}, LIMIT_S)["good"], dict)
        outcomes = session.ask(dict.fromkeys(commands, CLOCK), 4.0,
                               lambda name, _: done_after.update({name: time.monotonic() - began}))  # fmt: skip
        again = session.ask({"early": CLOCK}, LIMIT_S)
    assert {name: failure(outcomes[name]).kind for name in BAD} == {name: kind for name, (_, kind) in BAD.items()}
    assert outcomes["good"]["time_unix_s"] > 0  # type: ignore[index]
    assert done_after["good"] < done_after["deaf"]
    early = failure(again["early"])
    assert (early.exit_status, early.stderr) == (7, "dead")


def test_words_of_a_login_shell_are_passed_over() -> None:
    with Session(
        {"host": shell("echo Welcome; echo 12; " + probe_command(sys.executable))}, probe_sources()
    ) as session:
        outcome = session.ask({"host": CLOCK}, LIMIT_S)["host"]
    assert isinstance(outcome, dict)


def test_what_the_probe_cannot_do_is_told_and_ends_nothing() -> None:
    with Session({"host": GOOD}, probe_sources()) as session:
        refused = failure(session.ask({"host": {"ask": "dance"}}, LIMIT_S)["host"])
        outcome = session.ask({"host": CLOCK}, LIMIT_S)["host"]
    assert refused.kind == "refused"
    assert "dance" in refused.text
    assert isinstance(outcome, dict)


def test_the_end_of_the_session_ends_every_process() -> None:
    with Session({"host": shell("sleep 1000 & echo $! >&2; wait")}) as session:
        outcome = failure(session.ask({"host": CLOCK}, 2.0)["host"])
    child = int(outcome.stderr)
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_host_without_python(tmp_path: Path) -> None:
    # Its PATH has a shell only, and the usual places are replaced by ones that aren't there.
    command = probe_command("/nonexistent/python").replace("/usr/", "/nonexistent/")
    (tmp_path / "sh").symlink_to("/bin/sh")
    with Session({"host": ["env", f"PATH={tmp_path}", "/bin/sh", "-c", command]}, probe_sources()) as session:
        outcome = failure(session.ask({"host": CLOCK}, LIMIT_S)["host"])
    assert outcome.exit_status == NO_PYTHON
    assert "python3" in outcome.stderr


@pytest.mark.parametrize("busy", [False, True])
def test_the_probe_ends_with_its_input(busy: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "never"
    os.mkfifo(pipe)
    with subprocess.Popen(GOOD, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests = [{"id": 1, **CLOCK}]
        if busy:
            # Reading a pipe that nobody writes to lasts for ever.
            requests.append({"id": 2, "ask": "facts", "sections": ["software"], "files": [str(pipe)]})
        process.stdin.write(probe_sources() + b"".join(json.dumps(request).encode() + b"\n" for request in requests))
        process.stdin.flush()
        assert select.select([process.stdout], [], [], LIMIT_S)[0]
        process.stdin.close()
        try:
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()


def test_the_command_passes_through_a_shell_that_reads_it_twice() -> None:
    """As ssh to a host behind a forced command does."""
    with Session(
        {"host": shell(f"exec sh -c {shlex.quote(probe_command(sys.executable))}")}, probe_sources()
    ) as session:
        assert isinstance(session.ask({"host": CLOCK}, LIMIT_S)["host"], dict)
