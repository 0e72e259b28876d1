"""Checkpoints of a run: folders that are either whole or not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain import contract

STATE_FILE = "state.json"
_UNFINISHED = ".unfinished-"


def save_checkpoint(folder: Path, state: dict[str, Any], save: Callable[[Path], None], *, keep: int) -> Path:
    """Write ``state`` and what ``save`` writes into a new checkpoint, then remove all but the ``keep`` newest.

    The folder gets its name when it is complete, so a reader never sees half of one.

    Args:
        folder: where the run's checkpoints are.
        state: counters, at least ``step``.
        save: writes model and optimizer into the folder that it's given.
        keep: how many to keep.

    Returns:
        The checkpoint's folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / contract.checkpoint_name(state["step"])
    partial = folder / f"{_UNFINISHED}{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save(partial)
    (partial / STATE_FILE).write_text(json.dumps(state) + "\n")
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{STATE_FILE}"))
