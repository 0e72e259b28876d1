"""Who hangs and who is slow, told from heartbeats at made-up times."""

from __future__ import annotations

from hvdtrain.heartbeat import Beat
from hvdtrain.supervise.watch import Hang, Watch

STALL = (
    "[2026-05-01 10:00:00.1: W stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered or "
    "broadcasted by subset of ranks and are waiting for remainder of ranks for more than 2 seconds."
)


def beat(time: float, step: int, activity: str = "", *, waited_s: float = 0.0) -> Beat:
    return Beat(time, step, 100, 2, 1, step * 64, waited_s, bool(activity), activity)


def test_ranks_that_go_on_do_not_hang() -> None:
    watch = Watch(2, 5)
    for second in range(60):
        for rank in range(2):
            watch.beat(rank, beat(second, second), "S", second)
        assert watch.hang(second) is None


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    watch = Watch(3, 5)
    for rank in range(3):
        watch.beat(rank, beat(1, 7, "" if rank == 1 else "gradients"), "S", 1)
    assert watch.hang(5.9) is None
    assert watch.hang(6) == Hang(1, "no progress for 5 s, after step 7")


def test_of_two_that_are_not_waiting_the_one_behind_is_named() -> None:
    watch = Watch(3, 5)
    watch.beat(0, beat(1, 8, "gradients"), "S", 1)
    watch.beat(1, beat(1, 8), "S", 1)
    watch.beat(2, beat(1, 7), "S", 1)
    assert watch.hang(6) == Hang(2, "no progress for 5 s, after step 7")


def test_a_rank_that_never_began_to_train_is_named() -> None:
    watch = Watch(2, 5)
    watch.beat(0, beat(1, 0, "broadcast"), "S", 1)
    watch.beat(1, Beat(), "S", 1)
    assert watch.hang(6) == Hang(1, "no progress for 5 s")


def test_all_wait_in_one_collective() -> None:
    watch = Watch(2, 5)
    for rank in range(2):
        watch.beat(rank, beat(1, 7, "gradients"), "S", 1)
    assert watch.hang(6) == Hang(None, "no progress for 5 s, all ranks wait in 'gradients'")


def test_before_the_first_heartbeat_nothing_is_known() -> None:
    watch = Watch(2, 5)
    for rank in range(2):
        watch.beat(rank, Beat(), "S", 1)
    assert watch.hang(1000) is None


def test_a_stopped_process_is_named_also_without_heartbeats() -> None:
    watch = Watch(2, 5)
    watch.beat(1, Beat(), "T", 10)
    watch.beat(1, Beat(), "T", 14)
    assert watch.hang(14.9) is None
    assert watch.hang(15) == Hang(1, "its process is stopped (state T)")
    watch.beat(1, Beat(), "S", 15)
    watch.beat(1, Beat(), "T", 16)
    assert watch.hang(20.9) is None


def test_a_rank_that_is_stopped_in_a_collective_is_named_also_if_the_others_fell_silent_before() -> None:
    watch = Watch(2, 5)
    waits = Beat(time=1, step=7, steps=9, waiting=True, activity="gradients")
    watch.beat(0, waits, "R", 10)
    watch.beat(1, waits, "S", 10)
    watch.beat(0, waits, "R", 11)
    watch.beat(1, waits, "T", 11)
    assert watch.hang(14.9) is None
    assert watch.hang(15) == Hang(1, "its process is stopped (state T), after step 7, in 'gradients'")


def test_horovods_warning_names_who_does_not_join() -> None:
    watch = Watch(3, 5)
    for second in range(0, 8, 2):
        watch.line(STALL, second)
        watch.line("Missing ranks:", second)
        watch.line("1: [allreduce.a, allreduce.b]", second)
        watch.line("2: [allreduce.b]", second)
        hang = watch.hang(second)
        assert (hang is None) == (second < 5)
    assert hang == Hang(
        1,
        "the others wait in collectives that it didn't join (rank 1: allreduce.a, allreduce.b; rank 2: allreduce.b)",
    )


def test_a_stall_that_passed_and_another_one_later_are_two() -> None:
    watch = Watch(2, 5)
    watch.line(STALL, 0)
    watch.line(STALL, 1000)
    assert watch.hang(1000) is None


def test_lines_that_only_look_like_missing_ranks() -> None:
    watch = Watch(2, 5)
    watch.line("1: [not a warning]", 0)
    assert watch.hang(100) is None


def test_without_a_limit_nothing_hangs() -> None:
    watch = Watch(1, None)
    watch.beat(0, beat(1, 7), "T", 1)
    watch.line(STALL, 0)
    watch.line(STALL, 1e6)
    assert watch.hang(1e6) is None


def test_a_slow_rank_is_told_from_the_ranks_that_wait_for_it() -> None:
    """Two steps a second for all; rank 1 computes for 0.45 s of each, the others for 0.1 s."""
    watch = Watch(3, 600)
    for second in range(1, 30):
        for rank, busy in enumerate((0.1, 0.45, 0.1)):
            waited = (0.5 - busy) * 2 * second
            watch.beat(rank, beat(second, 2 * second, waited_s=waited), "S", second)
    lags = [watch.lag(rank) for rank in range(3)]
    assert lags[0] is None
    assert lags[2] is None
    assert lags[1] is not None
    assert abs(lags[1] - 0.35) < 1e-6


def test_ranks_that_do_not_tell_how_long_they_wait_are_not_called_slow() -> None:
    watch = Watch(2, 600)
    for second in range(1, 30):
        watch.beat(0, beat(second, second), "S", second)
        watch.beat(1, beat(second, second), "S", second)
    assert [watch.lag(0), watch.lag(1)] == [None, None]


def test_a_start_is_no_lag() -> None:
    """Ranks start at different times, and their first beats tell of no step."""
    watch = Watch(2, 600)
    for second in range(1, 30):
        watch.beat(0, beat(second, 2 * max(0, second - 5), waited_s=0.1 * second), "S", second)
        if second > 4:
            watch.beat(1, beat(second, 2 * max(0, second - 5), waited_s=0.1 * second), "S", second)
        assert [watch.lag(0), watch.lag(1)] == [None, None]


def test_data_that_take_long_to_make_are_no_hang() -> None:
    watch = Watch(2, 5)
    watch.beat(0, Beat(1, waiting=True, activity="broadcast"), "S", 1)
    watch.beat(1, Beat(1, activity="building"), "S", 1)
    assert watch.hang(1000) is None
    watch.beat(1, Beat(1000, steps=100, activity="restoring"), "S", 1000)
    assert watch.hang(1006) == Hang(1, "no progress for 5 s, after step 0, in 'restoring'")


def test_a_rank_that_is_stopped_again_and_again_but_goes_on_does_not_hang() -> None:
    watch = Watch(1, 5)
    for second in range(30):
        watch.beat(0, beat(second, second), "T", second)
        assert watch.hang(second) is None


def test_workers_come_and_go() -> None:
    watch = Watch(2, 5)
    for rank in range(2):
        watch.beat(rank, beat(1, 7), "S", 1)
    watch.leave(1)
    watch.beat(0, beat(5, 9), "S", 5)
    assert watch.hang(6) is None
    assert watch.newest().step == 9
    watch.join(1)
    watch.beat(1, beat(6, 9), "S", 6)
    assert watch.last(1).step == 9
    watch.leave(0)
    watch.leave(1)
    assert watch.newest().step == 9
