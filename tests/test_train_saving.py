"""Saving behind the training: how often, and what a write that fails does."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError
from hvdtrain.train.checkpoints import Checkpoints
from hvdtrain.train.interval import (
    LONGEST_S,
    PRIOR_HOST_MTBF_S,
    SHORTEST_S,
    History,
    best_interval_s,
    mean_time_between_failures_s,
    read_history,
)
from hvdtrain.train.saving import Writer


def write(checkpoints: Checkpoints, step: int, save: Callable[[Path], object]) -> Callable[[], object]:
    return lambda: checkpoints.write(step, {"step": step}, lambda folder: save(folder) and None)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    may_end = threading.Event()
    writer = Writer()
    writer.begin(write(Checkpoints(tmp_path, keep=1), 1, lambda folder: may_end.wait(180)))
    writer.check()
    assert Checkpoints(tmp_path, keep=1).all() == []
    may_end.set()
    writer.wait()
    assert [path.name for path in Checkpoints(tmp_path, keep=1).all()] == [contract.checkpoint_name(1)]


def test_a_write_that_has_failed_is_told_at_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder would be")
    writer = Writer()
    writer.begin(write(Checkpoints(tmp_path / "checkpoints", keep=1), 7, lambda folder: None))
    assert writer._thread
    writer._thread.join()
    with pytest.raises(HvdtrainError, match="can't write the checkpoint of step 7") as caught:
        writer.check()
    assert caught.value.fix


def test_a_write_that_has_failed_is_told_at_the_end(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise TypeError("can't pickle this")

    writer = Writer()
    writer.begin(write(Checkpoints(tmp_path, keep=1), 7, fail))
    with pytest.raises(TypeError, match="can't pickle this"):
        writer.wait()


def test_the_interval_is_youngs_within_bounds() -> None:
    assert best_interval_s(0.5, 3600.0) == math.sqrt(2 * 0.5 * 3600)
    assert best_interval_s(1e-6, 60.0) == SHORTEST_S
    assert best_interval_s(600.0, 1e6) == LONGEST_S
    assert best_interval_s(0.5, 3600.0, write_s=100.0) == 100.0


def test_failures_are_assumed_until_they_are_observed() -> None:
    assert mean_time_between_failures_s(History(0, 50.0), hosts=4) == PRIOR_HOST_MTBF_S / 4
    assert mean_time_between_failures_s(History(3, 600.0), hosts=4) == 200.0


@pytest.mark.parametrize(
    ("events", "history"),
    [
        ([], History(0, 0)),
        ([(100, "attempt_started"), (101, "rank_started")], History(0, 900)),
        # Failed after 50 s, and begun again after 10 s.
        ([(100, "attempt_started"), (150, "attempt_failed"), (160, "attempt_started")], History(1, 50 + 840)),
        # Stopped by the user, and gone on with after a pause: no failure.
        ([(100, "attempt_started"), (150, "ended", 143), (900, "attempt_started")], History(0, 50 + 100)),
        ([(100, "attempt_started"), (150, "ended", 5), (900, "attempt_started")], History(1, 50 + 100)),
        # The launcher was killed: nobody has written the end.
        ([(100, "attempt_started"), (120, "rank_started"), (900, "attempt_started")], History(1, 20 + 100)),
    ],
)
def test_the_history_of_a_run(tmp_path: Path, events: list[tuple[float | str, ...]], history: History) -> None:
    records = [json.dumps(dict(zip(("time", "event", "exit_status"), event, strict=False))) + "\n" for event in events]
    if records:
        (tmp_path / contract.EVENTS_FILE).write_text("".join(records) + '{"time": 99')
    assert read_history(tmp_path, now=1000) == history
