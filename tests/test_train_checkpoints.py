"""Checkpoints: whole or not there, the newest kept, faults told and nothing lost."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdtrain import contract
from hvdtrain.errors import HvdtrainError
from hvdtrain.train.checkpoints import MANIFEST_FILE, STATE_FILE, Checkpoints


def save(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"weights" * 1000)
    (folder / "nested").mkdir()
    (folder / "nested" / "part").write_text("more")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 1,000 bytes: the write fails as on a full disk.

    pytest's own output may be such a file, so it's for the code under test alone.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_has_the_state_and_what_was_saved(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path / "checkpoints", keep=3).write(7, {"step": 7, "epoch": 1}, save)
    assert folder == tmp_path / "checkpoints" / "step-0000000007"
    assert names(folder) == [MANIFEST_FILE, "model.bin", "nested", STATE_FILE]
    assert json.loads((folder / STATE_FILE).read_text()) == {"step": 7, "epoch": 1}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 20, 100, 1000):
        checkpoints.write(step, {"step": step}, save)
    assert names(tmp_path) == ["step-0000000100", "step-0000001000"]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.write(5, {"try": 1}, save)
    folder = checkpoints.write(5, {"try": 2}, save)
    assert json.loads((folder / STATE_FILE).read_text()) == {"try": 2}
    assert names(tmp_path) == ["step-0000000005"]


def test_what_a_killed_rank_left_is_removed_and_never_counted(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-0000000003").mkdir()
    (tmp_path / ".tmp-step-0000000003" / "model.bin").write_text("half")
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.all() == []
    checkpoints.write(4, {}, save)
    assert names(tmp_path) == ["step-0000000004"]


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    old = checkpoints.write(1, {"step": 1}, lambda folder: None)
    fault = "can't write the checkpoint of step 2: File too large"
    with full_disk(), pytest.raises(HvdtrainError, match=fault) as caught:
        checkpoints.write(2, {"step": 2}, save)
    assert caught.value.where == str(tmp_path / "step-0000000002")
    assert caught.value.fix
    assert names(tmp_path) == [old.name]


def test_a_task_that_can_not_be_saved_keeps_its_error(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise TypeError("can't pickle this")

    with pytest.raises(TypeError, match="can't pickle this"):
        Checkpoints(tmp_path, keep=1).write(2, {}, fail)
    assert Checkpoints(tmp_path, keep=1).all() == []


def truncate(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def flip_a_bit(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def lose(file: Path, chance: random.Random) -> None:
    file.unlink()


def test_after_any_of_100_damages_the_checkpoint_before_is_taken(tmp_path: Path) -> None:
    """Real checkpoints of PyTorch, the newest damaged; and the one before it too, in every third."""
    torch = pytest.importorskip("torch")
    from hvdtrain.train.torch import files

    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3))
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = Checkpoints(tmp_path / "original", keep=3)
    for step in (1, 2, 3):
        model(torch.randn(8, 20)).sum().backward()
        optimizer.step()

        def write(folder: Path) -> None:
            files.save(model.state_dict(), folder / "model.pt")
            files.save(optimizer.state_dict(), folder / "optimizer.pt")
            (folder / "random.json").write_text("[1, 2, 3]")

        checkpoints.write(step, {"step": step, "options": {"lr": 0.1}}, write)
    chance = random.Random(6)  # noqa: S311
    for number in range(100):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "original", folder)
        damaged = [contract.checkpoint_name(step) for step in ((3, 2) if number % 3 == 0 else (3,))]
        for name in damaged:
            file = chance.choice(sorted((folder / name).iterdir()))
            chance.choice([truncate, flip_a_bit, lose])(file, chance)
        told: list[str] = []
        whole = Checkpoints(folder, keep=3).newest_whole(told.append)
        assert whole == folder / contract.checkpoint_name(3 - len(damaged)), (number, told)
        assert [line.partition(":")[0] for line in told] == [f"checkpoint {name} is passed over" for name in damaged]


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.write(step, {}, save)
    os.truncate(tmp_path / "step-0000000003" / "model.bin", 5)
    checkpoints.write(4, {}, save)
    assert names(tmp_path) == [contract.checkpoint_name(step) for step in (2, 3, 4)]
    told: list[str] = []
    assert checkpoints.newest_whole(told.append) == tmp_path / "step-0000000004"
    assert told == []


def test_one_that_was_passed_over_goes_when_the_run_has_gone_on(tmp_path: Path) -> None:
    for step in (1, 20, 30):
        Checkpoints(tmp_path, keep=3).write(step, {}, save)
    os.truncate(tmp_path / "step-0000000030" / "model.bin", 5)
    resumed = Checkpoints(tmp_path, keep=3)
    assert resumed.newest_whole(lambda _: None) == tmp_path / "step-0000000020"
    resumed.write(25, {}, save)
    assert names(tmp_path) == [contract.checkpoint_name(step) for step in (1, 20, 25)]


def test_torch_saves_say_the_systems_own_error(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from hvdtrain.train.torch import files

    with full_disk(), pytest.raises(OSError, match="File too large"):
        files.save({"weights": torch.zeros(10_000)}, tmp_path / "model.pt")
