"""Runs as other commands find and see them: names, dead supervisors, damaged files, tables and JSON."""

from __future__ import annotations

import dataclasses
import fcntl
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
from real_processes import wait_until_gone

from hvdtrain import contract
from hvdtrain.cli.tables import duration
from hvdtrain.errors import CheckFailedError, UsageError
from hvdtrain.supervise.follow import Choice, Line, lines
from hvdtrain.supervise.records import RankStatus, Status, StatusFile, Supervisor, boot_id, start_time
from hvdtrain.supervise.runs import all_runs, find, look, require_ended, taken, unfinished
from hvdtrain.supervise.stop import stop

PATIENCE_S = 180
HERE = socket.gethostname()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until the test ends it."""
    started = subprocess.Popen(["sleep", "1000"])
    yield started
    started.kill()
    started.wait()


def supervisor(pid: int) -> Supervisor:
    started = start_time(pid)
    assert started is not None
    return Supervisor(pid, HERE, boot_id(), started)


def make_run(runs: Path, name: str, identifier: str, status: Status | None = None, **changes: Any) -> Path:
    """A run directory; of one that has ended, unless ``changes`` of its status say otherwise."""
    path = runs / name / identifier
    path.mkdir(parents=True)
    (path / contract.PLAN_FILE).write_text("{}")
    now = time.time()
    status = Status(
        name=name,
        state="finished",
        controller="gloo",
        supervisor=Supervisor(1, HERE, boot_id(), 1),
        started=now - 100,
        updated=now,
        ranks=(RankStatus(0, "localhost"), RankStatus(1, "localhost")),
    )
    StatusFile(path / contract.STATUS_FILE).write(dataclasses.replace(status, **changes))
    return path


def hvdtrain(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("HVDTRAIN_RUNS", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", *arguments],
        cwd=folder,
        env=own | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


# --- finding ---------------------------------------------------------------------------------------------------------


def test_a_run_is_found_by_each_of_its_names(runs: Path, tmp_path: Path) -> None:
    old = make_run(runs, "a", "20260101T000000Z-aaaaaa")
    new = make_run(runs, "a", "20260102T000000Z-bbbbbb")
    other = make_run(runs, "b", "20260103T000000Z-cccccc")
    (runs / "a" / "latest").symlink_to(new.name)
    for wanted, path in {
        None: other,
        "a": new,
        "a/": new,
        "b": other,
        "a/20260101T000000Z-aaaaaa": old,
        "a/latest": new,
        "20260101": old,
        "aaaa": old,
        "a/20260101": old,
        "a/bbb": new,
        str(old): old,
        f"{old}/": old,
        str(runs / "a" / "latest"): new,
    }.items():
        assert find(wanted, runs).path == path, wanted
    assert [str(run) for run in all_runs(runs)] == [f"{path.parent.name}/{path.name}" for path in (other, new, old)]


def test_a_path_counts_from_where_one_is(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(runs, "a", "20260101T000000Z-aaaaaa")
    monkeypatch.chdir(path)
    assert find(".", Path("runs")).path == path
    monkeypatch.chdir(tmp_path)
    # A folder of the job's name that is no run.
    (tmp_path / "a").mkdir()
    assert find("a", Path("runs")).path == path


def test_what_is_not_a_run_is_not_listed(runs: Path) -> None:
    (runs / "file").write_text("")
    (runs / "a" / "empty").mkdir(parents=True)
    assert all_runs(runs) == []
    assert all_runs(runs / "nowhere") == []
    assert all_runs(runs / "file") == []


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("c", "there is no run 'c'"),
        ("a/2027", "there is no run 'a/2027'"),
        ("2026", "'2026' may be any of 2 runs: b/20260102T000000Z-bbbbbb, a/20260101T000000Z-aaaaaa"),
        ("nul\0", "there is no run"),
        ("..", "there is no run '..'"),
    ],
)
def test_a_run_that_is_not_there_or_not_the_only_one(runs: Path, wanted: str, words: str) -> None:
    make_run(runs, "a", "20260101T000000Z-aaaaaa")
    make_run(runs, "b", "20260102T000000Z-bbbbbb")
    with pytest.raises(UsageError, match=re.escape(words)):
        find(wanted, runs)


def test_no_runs_at_all(runs: Path) -> None:
    with pytest.raises(UsageError, match="there are no runs"):
        find(None, runs)


# --- the truth -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["planned", "starting", "running", "restarting"])
def test_a_killed_supervisor_is_lost(runs: Path, process: subprocess.Popen[bytes], state: str) -> None:
    make_run(runs, "a", "1", state=state, supervisor=supervisor(process.pid))
    run = find("a", runs)
    assert (look(run).state, look(run).note) == (state, "")
    os.kill(process.pid, signal.SIGKILL)
    # It isn't reaped: also a zombie supervises nothing.
    wait_until_gone([process.pid], PATIENCE_S)
    assert (look(run).state, look(run).note) == ("lost", f"its supervisor, process {process.pid}, is gone")


def test_an_ended_run_needs_no_supervisor(runs: Path) -> None:
    for state in ("finished", "failed", "stopped"):
        make_run(runs, state, "1", state=state)
        assert look(find(state, runs)).state == state


def test_another_process_with_the_number_is_not_the_supervisor(runs: Path, process: subprocess.Popen[bytes]) -> None:
    before = dataclasses.replace(supervisor(process.pid), start_time=supervisor(process.pid).start_time - 1)
    make_run(runs, "a", "1", state="running", supervisor=before)
    assert look(find("a", runs)).state == "lost"


def test_a_machine_that_was_started_again(runs: Path, process: subprocess.Popen[bytes]) -> None:
    before = dataclasses.replace(supervisor(process.pid), boot_id="another")
    make_run(runs, "a", "1", state="running", supervisor=before, updated=time.time() - 60)
    sight = look(find("a", runs))
    assert sight.state == "lost"
    assert f"{HERE} was started again" in sight.note


@pytest.mark.parametrize(
    ("state", "silent_s", "seen"),
    [("running", 5, "running"), ("running", 60, "lost"), ("restarting", 60, "restarting"), ("restarting", 999, "lost")],
)
def test_a_supervisor_on_another_host(runs: Path, state: str, silent_s: float, seen: str) -> None:
    elsewhere = Supervisor(1, "node7", "another", 1)
    make_run(runs, "a", "1", state=state, supervisor=elsewhere, updated=time.time() - silent_s)
    sight = look(find("a", runs))
    assert sight.state == seen
    assert not sight.is_here
    assert ("its supervisor on node7 was not heard of since 20" in sight.note) == (seen == "lost")


def test_a_supervisor_that_is_silent_is_told(runs: Path, process: subprocess.Popen[bytes]) -> None:
    make_run(runs, "a", "1", state="running", supervisor=supervisor(process.pid), updated=time.time() - 60)
    sight = look(find("a", runs))
    assert sight.state == "running"
    assert sight.note == "its supervisor has written nothing for 60 s"


def test_a_launch_that_has_not_come_to_its_first_status(runs: Path) -> None:
    path = make_run(runs, "a", "1")
    (path / contract.STATUS_FILE).unlink()
    assert look(find("a", runs)).state == "planned"
    os.utime(path / contract.PLAN_FILE, (0, time.time() - 120))
    assert (look(find("a", runs)).state, look(find("a", runs)).note) == (
        "lost",
        "its launch ended before it wrote a status",
    )


# --- damaged files ---------------------------------------------------------------------------------------------------


def damaged() -> dict[str, bytes]:
    whole = json.loads(
        json.dumps(
            dataclasses.asdict(Status("a", "running", "gloo", Supervisor(1, HERE, "b", 1), 1, 1, (RankStatus(0, "h"),)))
        )
    )

    def changed(**values: object) -> bytes:
        return json.dumps(whole | values).encode()

    text = json.dumps(whole).encode()
    return {
        "empty": b"",
        "torn": text[: len(text) // 2],
        "binary": b"\xff\xfe\x00",
        "other": b'{"a": 1}',
        "list": b"[]",
        "deep": b"[" * 100_000,
        "step": changed(step="7"),
        "ranks": changed(ranks=[{"rank": 0}]),
        "rank": changed(ranks=[{"rank": "x", "host": "h"}]),
        "no supervisor": changed(supervisor=None),
        "pid": changed(supervisor={"pid": "1", "host": "h", "boot_id": "b", "start_time": 1}),
        "infinite": changed(eta_s=float("inf")),
        "nan": changed(updated=float("nan")),
        "late": changed(started=1e300),
    }


@pytest.mark.parametrize("content", damaged().values(), ids=damaged().keys())
def test_a_damaged_status_is_told(runs: Path, content: bytes) -> None:
    path = make_run(runs, "a", "1")
    (path / contract.STATUS_FILE).write_bytes(content)
    sight = look(find("a", runs))
    assert (sight.state, sight.status) == ("unknown", None)
    assert sight.note == "this is no status of a run, or one of another version of hvdtrain"
    with pytest.raises(UsageError, match="whether this run still lives can't be told"):
        require_ended(find("a", runs))


def test_commands_at_a_damaged_status(runs: Path, tmp_path: Path) -> None:
    path = make_run(runs, "a", "1")
    (path / contract.STATUS_FILE).write_text("{")
    for command in ("status", "stop", "resume"):
        done = hvdtrain(command, "a", folder=tmp_path)
        assert done.returncode == 2
        assert str(path / contract.STATUS_FILE) in done.stderr
        assert "Traceback" not in done.stderr
    assert re.search(r"^a +1 +unknown$", hvdtrain("ps", folder=tmp_path).stdout, re.M)


# --- stopping and resuming -------------------------------------------------------------------------------------------


def quiet(_: str) -> None:
    pass


def test_only_the_supervisor_is_stopped(runs: Path, process: subprocess.Popen[bytes]) -> None:
    other = dataclasses.replace(supervisor(process.pid), start_time=1)
    make_run(runs, "a", "1", state="running", supervisor=other)
    assert stop(find("a", runs), kill=True, timeout_s=None, tell=quiet).state == "lost"
    assert process.poll() is None


@pytest.mark.parametrize("silent_s", [0, 1000])
def test_a_run_on_another_host_is_stopped_there(runs: Path, silent_s: float) -> None:
    elsewhere = Supervisor(os.getpid(), "node7", "another", 1)
    make_run(runs, "a", "1", state="running", supervisor=elsewhere, updated=time.time() - silent_s)
    with pytest.raises(UsageError, match="the run's supervisor is on node7"):
        stop(find("a", runs), kill=False, timeout_s=None, tell=quiet)


# Counts SIGTERMs into a file, and writes into `events.jsonl` what a supervisor does.
STUBBORN = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def stopping(*_):
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": time.time(), "event": "stopping"}) + "\\n")
signal.signal(signal.SIGTERM, stopping)
print("ready", flush=True)
while True:
    time.sleep(1000)
"""


@pytest.fixture
def stubborn(runs: Path) -> Iterator[Path]:
    """Run directory whose supervisor never ends."""
    path = runs / "a" / "1"
    path.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", STUBBORN, str(path)], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    path.rmdir()
    make_run(runs, "a", "1", state="running", supervisor=supervisor(process.pid))
    yield path
    process.kill()
    process.communicate()


def signals_seen(path: Path, count: int) -> int:
    """How many the supervisor has seen, once there are so many or the time is over."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        events = path / contract.EVENTS_FILE
        seen = len(events.read_text().splitlines()) if events.exists() else 0
        if seen >= count or time.monotonic() > deadline:
            return seen
        time.sleep(0.02)


def test_asking_twice_to_stop_does_not_kill(runs: Path, stubborn: Path) -> None:
    run, told = find("a", runs), list[str]()
    with pytest.raises(CheckFailedError, match=r"the run hasn't ended within 0 s"):
        stop(run, kill=False, timeout_s=0, tell=told.append)
    assert signals_seen(stubborn, 1) == 1
    with pytest.raises(CheckFailedError):
        stop(run, kill=False, timeout_s=0.3, tell=told.append)
    assert told == ["stopping a/1", "a/1 was asked to stop before; waiting for it"]
    assert signals_seen(stubborn, 1) == 1
    with pytest.raises(CheckFailedError):
        stop(run, kill=True, timeout_s=0, tell=told.append)
    assert signals_seen(stubborn, 2) == 2


def test_killing_sends_two_signals(runs: Path, stubborn: Path) -> None:
    with pytest.raises(CheckFailedError):
        stop(find("a", runs), kill=True, timeout_s=0, tell=quiet)
    assert signals_seen(stubborn, 2) == 2


def test_what_cannot_be_resumed(runs: Path, process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = make_run(runs, "a", "1", state="running", supervisor=supervisor(process.pid))
    done = hvdtrain("resume", "a", folder=tmp_path)
    assert done.returncode == 2
    assert f"the run still lives: it is running, by process {process.pid} on {HERE}" in done.stderr
    process.kill()
    wait_until_gone([process.pid], PATIENCE_S)
    require_ended(find("a", runs))
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    done = hvdtrain("resume", "a", folder=tmp_path)
    assert done.returncode == 2
    assert "somebody else goes on with this run just now" in done.stderr
    os.close(descriptor)
    with taken(find("a", runs)):
        pass
    # Nobody holds it any more: it fails for its job, which isn't there.
    for option in ([], ["--detach"]):
        done = hvdtrain("resume", "a", *option, folder=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"error: {path / contract.JOB_FILE}: can't read the job spec")


# --- logs ------------------------------------------------------------------------------------------------------------


def write_logs(path: Path, attempt: int, *ranks: str) -> None:
    folder = path / contract.attempt_logs(attempt)
    folder.mkdir(parents=True)
    for rank, text in enumerate(ranks):
        (folder / contract.rank_log(rank)).write_bytes(text.encode())
    (folder / contract.LAUNCHER_LOG).write_text("words\n")


def texts(path: Path, choice: Choice, *, follow: bool = False) -> list[str]:
    return [line.text for line in lines(find(str(path), path.parent.parent), choice, follow=follow)]


def test_lines_of_the_chosen_logs(runs: Path) -> None:
    path = make_run(runs, "a", "1")
    write_logs(path, 0, "old\n")
    write_logs(path, 1, "a\nb\nc\n", "d\n\nf")
    run = find("a", runs)
    assert list(lines(run, Choice(), follow=False)) == [
        *(Line(0, 1, text) for text in "abc"),
        *(Line(1, 1, text) for text in ("d", "", "f")),
    ]
    assert texts(path, Choice(ranks=(1,))) == ["d", "", "f"]
    assert texts(path, Choice(attempt=0)) == ["old"]
    assert list(lines(run, Choice(launcher=True), follow=False)) == [Line(None, 1, "words")]
    assert texts(path, Choice(attempt=0), follow=True) == ["old"]


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001])
@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_the_last_lines(runs: Path, count: int, size: int) -> None:
    """Of logs shorter and longer than what is read at once."""
    path = make_run(runs, "a", "1")
    written = [f"{number} {'x' * size}" for number in range(1000)]
    write_logs(path, 0, "".join(f"{line}\n" for line in written))
    assert texts(path, Choice(last=count)) == written[len(written) - min(count, 1000) :]


def test_a_log_that_is_no_text(runs: Path) -> None:
    path = make_run(runs, "a", "1")
    write_logs(path, 0, "")
    (path / contract.attempt_logs(0) / contract.rank_log(0)).write_bytes(b"\xff\xfe\x00 x\n")
    assert texts(path, Choice()) == ["\ufffd\ufffd\0 x"]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice(attempt=3), "there is no attempt 3: it has 0"),
        (Choice(ranks=(7,)), "rank 7 has no log in attempt 0: ranks 0 to 1 have one"),
    ],
)
def test_logs_that_are_not_there(runs: Path, choice: Choice, words: str) -> None:
    path = make_run(runs, "a", "1")
    write_logs(path, 0, "a\n", "b\n")
    with pytest.raises(UsageError, match=re.escape(words)):
        texts(path, choice)


def test_following_goes_on_until_the_supervisor_is_gone(runs: Path, process: subprocess.Popen[bytes]) -> None:
    path = make_run(runs, "a", "1", state="running", supervisor=supervisor(process.pid))
    write_logs(path, 0, "1\n2\n3\nhalf")
    log = path / contract.attempt_logs(0) / contract.rank_log(0)
    following = lines(find("a", runs), Choice(last=2), follow=True)
    assert [next(following).text for _ in range(2)] == ["2", "3"]
    with log.open("a") as file:
        file.write(" a line\n")
    assert next(following).text == "half a line"
    with log.open("a") as file:
        file.write("last of 0\ncut off")
    write_logs(path, 1, "first of 1\nsecond of 1\n", "third of 1\n")
    assert [next(following) for _ in range(2)] == [Line(0, 0, "last of 0"), Line(0, 0, "cut off")]
    assert [next(following) for _ in range(3)] == [
        Line(0, 1, "first of 1"),
        Line(0, 1, "second of 1"),
        Line(1, 1, "third of 1"),
    ]
    process.kill()
    with log.with_name("x").open("w"), (path / contract.attempt_logs(1) / contract.rank_log(1)).open("a") as file:
        file.write("torn")
    assert [line.text for line in following] == ["torn"]


def test_the_output_of_logs(runs: Path, tmp_path: Path) -> None:
    path = make_run(runs, "a", "1", ranks=tuple(RankStatus(rank, "h") for rank in range(11)))
    write_logs(path, 0, "zero\n", "one\n")
    assert hvdtrain("logs", folder=tmp_path).stdout == "[ 0] zero\n[ 1] one\n"
    assert hvdtrain("logs", "--rank", "1", folder=tmp_path).stdout == "one\n"
    assert hvdtrain("logs", "--rank", "1", "--rank", "0", folder=tmp_path).stdout == "[ 0] zero\n[ 1] one\n"
    done = hvdtrain("logs", "--format", "json", folder=tmp_path)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"rank": 0, "attempt": 0, "line": "zero"},
        {"rank": 1, "attempt": 0, "line": "one"},
    ]
    done = hvdtrain("logs", "--rank", "11", folder=tmp_path)
    assert done.returncode == 2
    assert "the run has ranks 0 to 10" in done.stderr


# --- tables and JSON -------------------------------------------------------------------------------------------------


def test_ps_shows_live_runs_first_and_the_newest_of_the_ended(
    runs: Path, tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    for number in range(7):
        make_run(runs, "ended", f"2026010{number + 1}T000000Z-aaaaa{number}", state="failed")
    name = "a-name-that-is-too-long-for-any-table-of-eighty-columns-but-not-for-a-pipe"
    live = {"state": "running", "supervisor": supervisor(process.pid)}
    make_run(runs, name, "20250101T000000Z-bbbbbb", step=1200, steps=5000, samples_per_s=4307.4, eta_s=125.0, **live)
    done = hvdtrain("ps", folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr == "2 more ended runs: --all shows them\n"
    headings, first, *rest = done.stdout.splitlines()
    assert headings.split() == ["name", "id", "state", "step", "throughput", "time", "left", "started", "host"]
    assert first.split()[:7] == [name, "20250101T000000Z-bbbbbb", "running", "1,200/5,000", "4,307", "samples/s", "2"]
    assert "2 min 05 s" in first
    assert [line.split()[1][-1] for line in rest] == ["6", "5", "4", "3", "2"]
    assert "\x1b" not in done.stdout
    assert len(hvdtrain("ps", "-a", folder=tmp_path).stdout.splitlines()) == 9


def test_ps_for_programs(runs: Path, tmp_path: Path) -> None:
    done = hvdtrain("ps", "--format", "json", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]\n")
    path = make_run(runs, "a", "1", state="running")
    broken = make_run(runs, "b", "1")
    (broken / contract.STATUS_FILE).write_text("")
    [broken_run, run] = sorted(
        json.loads(hvdtrain("ps", "--format", "json", folder=tmp_path).stdout),
        key=lambda run: run["state"],
        reverse=True,
    )
    assert (run["name"], run["id"], run["directory"], run["state"]) == ("a", "1", str(path), "lost")
    assert run["supervisor"]["host"] == HERE
    assert (broken_run["name"], broken_run["state"]) == ("b", "unknown")


def test_status(runs: Path, tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    now = time.time()
    ranks = (
        RankStatus(0, "node1", 11, "running", 230, "gradients", now - 4, None),
        RankStatus(1, "node2", 12, "running", 230, "", now - 4, 0.25),
    )
    make_run(
        runs, "a", "1", state="running", supervisor=supervisor(process.pid), ranks=ranks, step=230, steps=345, epoch=10,
        samples_per_s=99.95, eta_s=8.0, attempt=1,
    )  # fmt: skip
    done = hvdtrain("status", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("a/1  running\n", "230/345 (67%), epoch 10", "100.0 samples/s", "8.0 s", f"process {process.pid} on"):
        assert words in done.stdout
    assert re.search(r"^ +0 +node1 +11 +running +230 +gradients +\d\.\d s ago$", done.stdout, re.M)
    assert re.search(r"^ +1 +node2 +12 +running +230 +\d\.\d s ago +0\.25 s$", done.stdout, re.M)
    shown = json.loads(hvdtrain("status", "--format", "json", folder=tmp_path).stdout)
    assert (shown["state"], shown["step"], shown["ranks"][1]["lag_s"]) == ("running", 230, 0.25)
    process.kill()
    wait_until_gone([process.pid], PATIENCE_S)
    done = hvdtrain("status", folder=tmp_path)
    assert f"a/1  lost: its supervisor, process {process.pid}, is gone\n" in done.stdout
    assert re.search(r"^ +1 +node2 +12 +was running +230$", done.stdout, re.M)


def test_a_run_that_has_ended_is_not_stopped(runs: Path, tmp_path: Path) -> None:
    make_run(runs, "a", "1", state="failed", exit_status=4)
    done = hvdtrain("stop", "a", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "a/1 had ended before: failed, exit status 4\n")
    assert json.loads(hvdtrain("stop", "a", "--format", "json", folder=tmp_path).stdout)["state"] == "failed"


@pytest.mark.parametrize("command", ["status", "logs", "stop", "resume"])
def test_a_run_that_is_not_there(tmp_path: Path, command: str) -> None:
    for arguments in ([], ["a"]):
        done = hvdtrain(command, *arguments, folder=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert re.match(r"error: .*/runs: there (are no runs|is no run 'a')\n  fix: ", done.stderr)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (86400 * 3 + 3600 * 4, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- the command line as a whole -------------------------------------------------------------------------------------


def test_a_home_in_the_folder_of_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "x", "a", "1")
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({"command": ["true"], "processes": 1}))
    home = str(tmp_path)
    assert hvdtrain("ps", "--runs", "~/x", folder=tmp_path, HOME=home).stdout.splitlines()[1].startswith("a ")
    assert "a " in hvdtrain("ps", folder=tmp_path, HOME=home, HVDTRAIN_RUNS="~/x").stdout
    assert hvdtrain("status", "~/x/a/1", folder=tmp_path, HOME=home).returncode == 0
    done = hvdtrain("ps", "--runs", "~/y", folder=tmp_path, HOME=home)
    assert done.returncode == 2
    assert f"{tmp_path}/y: this folder of runs doesn't exist" in done.stderr
    done = hvdtrain("ps", "--runs", "~nobody-of-this-name/x", folder=tmp_path)
    assert done.returncode == 2
    assert "there is no such user's home" in done.stderr
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("arguments", ["ps", "status", "stop a", "launch {0}/job.yaml --dry-run"])
def test_a_current_folder_that_is_gone(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps({"command": ["true"], "processes": 1}))
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f"{sys.executable} -m hvdtrain {arguments.format(tmp_path)}"
    script = f"cd {folder} && rmdir {folder} && exec {command}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.stderr == "error: the current directory doesn't exist any more\n  fix: cd to one that does\n"
    assert done.returncode == 3


@pytest.mark.parametrize("arguments", ["schema", "--help", "ps", "status", "schema --format markdown"])
def test_output_that_cannot_be_written(runs: Path, tmp_path: Path, arguments: str) -> None:
    make_run(runs, "a", "1")
    command = f"{sys.executable} -m hvdtrain {arguments}"
    done = subprocess.run(["bash", "-c", f"{command} >/dev/full"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("error: can't write to standard output: No space left on device\n")
    for shell in (f"{command} | head -n 0", f"{command} >&-"):
        done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
        assert done.stderr == ""
    done = subprocess.run(["bash", "-c", f"{command} --nope 2>/dev/full"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2


# Sends itself SIGINT at the import of a module: long before a command could look out for it.
INTERRUPTED = """
import os, signal, sys
# A test run in a shell's background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
wanted = sys.argv[1]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
import runpy
sys.meta_path.insert(0, Finder())
sys.argv = ["hvdtrain", "schema"]
runpy.run_module("hvdtrain", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module", ["hvdtrain.cli.main", "click", "click.core", "hvdtrain.cli.group", "hvdtrain.cli.schema", "pydantic"]
)
def test_ctrl_c_while_it_loads(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("state", "goes_on"), [("failed", True), ("stopped", True), ("finished", False)])
def test_a_run_that_ended_too_early_is_known(runs: Path, state: str, goes_on: bool) -> None:
    make_run(runs, "a", "1", state="failed")
    path = make_run(runs, "a", "2", state=state)
    assert unfinished(runs, "a") is None
    (path / contract.CHECKPOINTS / "step-0000000004").mkdir(parents=True)
    assert unfinished(runs, "a") == (find("a/2", runs) if goes_on else None)
    assert unfinished(runs, "b") is None
