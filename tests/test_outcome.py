"""Who is named as the cause of a failed run, told from how its processes ended."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hvdtrain import contract
from hvdtrain.errors import ExitStatus
from hvdtrain.supervise.channel import End, Report
from hvdtrain.supervise.outcome import Ending, Outcome, RankEnd, outcome_of
from hvdtrain.supervise.watch import Hang

SHUT_DOWN = "HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of the ranks"


def report(time: float, exception: str) -> Report:
    return Report(time, exception, ("Traceback (most recent call last):", '  File "train.py", line 1', exception))


def rank(number: int, code: int | None, reported: Report | None = None, **end: Any) -> RankEnd:
    told = end.pop("ending", False)
    ended = None if code is None else End(code, end.get("stopped", False), end.get("oom", False), reported)
    lines, heard = end.get("lines", ("a line",)), end.get("heard", 0.0)
    return RankEnd(number, f"node{number}", ended, told, lines, end.get("host_fault"), heard)


def outcome(*failures: RankEnd, **facts: Any) -> Outcome:
    known: dict[str, Any] = {
        "signals": (),
        "hang": None,
        "hung": None,
        "launcher_lines": ("launcher says",),
        "launcher_code": 1 if failures else 0,
        "launcher_ended_first": False,
        "missing": (),
        "size": 3,
        "start_timeout_s": None,
    }
    return outcome_of(Ending(failures=failures, **known | facts))


def named(found: Outcome) -> tuple[int, int | None, str | None]:
    return (
        int(found.status),
        found.failure.rank if found.failure else None,
        found.failure.kind if found.failure else None,
    )


def test_all_is_well() -> None:
    assert outcome() == Outcome(ExitStatus.DONE, "done")


def test_the_earliest_exception_counts_and_not_the_earliest_end() -> None:
    """A rank that raises winds up while the others, who lost it, already end."""
    found = outcome(rank(0, 1, report(10.2, "ConnectionError: lost")), rank(1, 1, report(10.1, "ValueError: bad")))
    assert named(found) == (4, 1, "exception")
    assert found.failure
    assert found.failure.exception == "ValueError: bad"
    assert found.evidence[-1] == "ValueError: bad"


def test_a_crash_after_an_exception_is_not_the_cause_and_one_before_it_is() -> None:
    raised = rank(1, 1, report(10.1, "ValueError: bad"), heard=12.0)
    assert named(outcome(rank(0, -6, heard=11.0), raised)) == (4, 1, "exception")
    assert named(outcome(rank(0, -11, heard=9.0), raised)) == (4, 0, "signal")


def test_a_lost_host_is_told_with_its_rank() -> None:
    found = outcome(rank(2, None, host_fault="nothing has been heard of it for 15 s"))
    assert named(found) == (5, 2, "lost_host")
    assert found.summary == "rank 2 on node2 was lost: its host is lost, nothing has been heard of it for 15 s"


def test_a_host_that_is_lost_before_its_workers_came() -> None:
    found = outcome(missing=(1, 2), lost_hosts={"far": "its connection has ended"}, launcher_code=1)
    assert named(found) == (5, None, "lost_host")
    assert found.summary == "far was lost: its connection has ended"


def test_consequences_are_not_causes() -> None:
    assert named(outcome(rank(0, 1, report(1, SHUT_DOWN)), rank(1, 1, report(2, "ValueError: bad"))))[1] == 1
    assert named(outcome(rank(0, 1, lines=(SHUT_DOWN,)), rank(2, 3)))[1] == 2


def test_who_was_told_to_end_is_not_the_cause() -> None:
    assert named(outcome(rank(0, -15, stopped=True), rank(1, 3)))[1] == 1
    assert named(outcome(rank(0, None, ending=True), rank(1, 3)))[1] == 1
    assert (
        named(outcome(rank(0, -15, ending=True, stopped=True), rank(1, 1, report(1, "OSError: x"), stopped=True)))[1]
        == 1
    )


def test_a_rank_that_raised_and_was_then_told_to_end() -> None:
    found = outcome(rank(1, -15, report(1, "OSError: x"), ending=True, stopped=True))
    assert named(found) == (4, 1, "exception")
    assert found.summary == "rank 1 on node1 raised an exception"
    assert found.failure
    assert found.failure.signal is None


@pytest.mark.parametrize(
    ("end", "expected", "words"),
    [
        (rank(1, 7), (4, 1, "exception"), "rank 1 on node1 ended with exit status 7"),
        (rank(1, -11), (4, 1, "signal"), "rank 1 on node1 was ended by SIGSEGV (Segmentation fault)"),
        (rank(1, -9), (5, 1, "signal"), "rank 1 on node1 was killed by SIGKILL"),
        (rank(1, -9, oom=True), (5, 1, "oom"), "rank 1 on node1 was killed by the kernel: its host's memory ran out"),
        (rank(1, 137, oom=True), (5, 1, "oom"), "rank 1 on node1 was killed by the kernel: its host's memory ran out"),
        (rank(1, 7, oom=True), (4, 1, "exception"), "rank 1 on node1 ended with exit status 7"),
        (rank(1, None), (5, 1, "lost_host"), "rank 1 on node1 was lost: it ended without a word"),
        (rank(1, contract.BAD_TASK_STATUS), (2, 1, "exception"), "the task can't be used"),
    ],
)
def test_ends_of_a_rank(end: RankEnd, expected: tuple[int, int, str], words: str) -> None:
    found = outcome(end)
    assert named(found) == expected
    assert found.summary == words


def test_a_launcher_that_ended_first_is_the_cause() -> None:
    told = rank(0, -15, stopped=True)
    found = outcome(told, launcher_code=-signal.SIGKILL, launcher_ended_first=True)
    assert named(found) == (5, None, "signal")
    assert found.summary == "horovodrun was ended by SIGKILL (Killed) before the job was done"
    assert named(outcome(launcher_code=1, missing=(0, 1, 2))) == (3, None, "setup")
    assert named(outcome(launcher_code=0, missing=(2,))) == (5, None, "setup")
    assert named(outcome(launcher_code=-9, missing=(2,), start_timeout_s=120.0)) == (3, None, "setup")


def test_the_users_wish_comes_before_everything() -> None:
    ends = [rank(0, 1, report(1, "ValueError: bad"))]
    assert outcome(*ends, signals=(signal.SIGINT, signal.SIGTERM)) == Outcome(
        ExitStatus.INTERRUPTED, "stopped by SIGINT"
    )
    assert outcome(*ends, signals=(signal.SIGHUP,)).status is ExitStatus.TERMINATED


def test_a_hang_names_the_rank_and_shows_its_stacks() -> None:
    lines = ("loss 0.1", "hvdtrain: process 7 (python): state S", "Current thread", '  File "train.py", line 5 in load')
    hung = rank(1, -15, stopped=True, lines=lines)
    found = outcome(hang=Hang(1, "no progress for 5 s"), hung=hung)
    assert named(found) == (6, 1, "hang")
    assert found.summary == "rank 1 on node1 hung: no progress for 5 s"
    assert found.evidence == lines[1:]
    assert outcome(hang=Hang(None, "all wait")).summary == "the job hung: all wait"
