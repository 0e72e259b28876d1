"""Whether a run begins again, and how much of its time was of use."""

from __future__ import annotations

import pytest

from hvdtrain.errors import ExitStatus
from hvdtrain.supervise.goodput import Goodput
from hvdtrain.supervise.restarts import MAX_BACKOFF_S, AttemptEnd, Decision, decide


def lost(step: int) -> AttemptEnd:
    return AttemptEnd(ExitStatus.LOST, step, "signal None None SIGKILL")


def raised(step: int, what: str = "ValueError: x") -> AttemptEnd:
    return AttemptEnd(ExitStatus.TRAINING_FAILED, step, f"exception {what} 1 None")


@pytest.mark.parametrize("status", [ExitStatus.LOST, ExitStatus.HUNG, ExitStatus.TRAINING_FAILED])
def test_what_can_be_survived_begins_again(status: ExitStatus) -> None:
    decision = decide([AttemptEnd(status, 7, "x")], maximum=3, backoff_s=5)
    assert decision == Decision(5, "starting again in 5 s (restart 1 of 3)")


@pytest.mark.parametrize(
    "status",
    [
        ExitStatus.DONE,
        ExitStatus.USAGE,
        ExitStatus.CANNOT_START,
        ExitStatus.INTERRUPTED,
        ExitStatus.TERMINATED,
    ],
)
def test_what_needs_a_person_does_not(status: ExitStatus) -> None:
    assert decide([AttemptEnd(status, 0, "x")], maximum=3, backoff_s=5).wait_s is None


def test_a_restart_that_cannot_start_is_tried_again() -> None:
    """A port that is still taken, a host that is still booting."""
    ends = [lost(7), AttemptEnd(ExitStatus.CANNOT_START, 0, "setup")]
    assert decide(ends, maximum=3, backoff_s=1).wait_s == 2


def test_no_more_often_than_the_spec_says() -> None:
    assert decide([lost(7)], maximum=0, backoff_s=0) == Decision(None, "")
    assert decide([lost(7), lost(9)], maximum=1, backoff_s=0) == Decision(None, "not started again: restarts.max is 1")


def test_the_same_fault_at_the_same_step_is_the_tasks() -> None:
    assert decide([raised(57), raised(57)], maximum=9, backoff_s=0) == Decision(
        None, "not started again: it failed at step 57 twice, in the same way"
    )
    assert decide([raised(0), raised(0)], maximum=9, backoff_s=0) == Decision(
        None, "not started again: it failed before its first step twice, in the same way"
    )
    assert decide([raised(57), raised(58)], maximum=9, backoff_s=0).wait_s == 0
    assert decide([raised(57, "OSError: no data"), raised(57)], maximum=9, backoff_s=0).wait_s == 0


def test_waiting_times_double_up_to_a_limit() -> None:
    ends = [lost(step) for step in range(1, 12)]
    waits = [decide(ends[:count], maximum=99, backoff_s=5).wait_s for count in range(1, 12)]
    assert waits[:4] == [5, 10, 20, 40]
    assert waits[-1] == MAX_BACKOFF_S


# --- goodput -----------------------------------------------------------------------------------------------------


def train(goodput: Goodput, start: float, first: int, last: int) -> float:
    """One step a second."""
    for step in range(first, last + 1):
        goodput.step(start + step - first, step)
    return start + last - first


def test_an_undisturbed_run_loses_its_start_and_its_end() -> None:
    goodput = Goodput()
    goodput.begin(0)
    now = train(goodput, 10, 1, 81)
    goodput.end(now)
    assert goodput.fraction(100) == pytest.approx(0.8)


def test_steps_that_are_trained_again_are_lost() -> None:
    """Steps 1 to 51, then again from 41 to 81: 40 + 40 useful seconds of 200."""
    goodput = Goodput()
    goodput.begin(0)
    goodput.end(train(goodput, 10, 1, 51))
    goodput.begin(70)
    goodput.end(train(goodput, 100, 41, 81))
    assert goodput.fraction(200) == pytest.approx(0.4)


def test_an_attempt_that_never_trained_only_costs_time() -> None:
    goodput = Goodput()
    goodput.begin(0)
    goodput.end(10)
    goodput.begin(10)
    goodput.end(train(goodput, 20, 1, 31))
    assert goodput.fraction(60) == pytest.approx(0.5)


def test_nothing_is_claimed_where_no_step_is_known() -> None:
    goodput = Goodput()
    goodput.begin(0)
    goodput.end(10)
    assert goodput.fraction(10) is None


def test_what_comes_from_outside_is_tried_again_at_the_same_step() -> None:
    ends = [AttemptEnd(ExitStatus.LOST, 0, ""), AttemptEnd(ExitStatus.LOST, 0, "")]
    assert decide(ends, maximum=3, backoff_s=1).wait_s == 2
