"""Where the random streams of Python and numpy stand, as JSON: each rank's goes into the checkpoint."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np


def capture() -> dict[str, Any]:
    """Both generators' states."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = np.random.get_state(legacy=False)
    key = state["state"]["key"]
    return {
        "python": [version, list(words), gauss],
        "numpy": {**state, "state": {**state["state"], "key": key.tolist()}},
    }


def restore(state: dict[str, Any]) -> None:
    """Go on where `capture` was called."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_state = state["numpy"]
    key = np.array(numpy_state["state"]["key"], np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})


def to_text(data: bytes) -> str:
    """Bytes as text for JSON."""
    return base64.b64encode(data).decode()


def to_bytes(text: str) -> bytes:
    """What `to_text` was given."""
    return base64.b64decode(text)
