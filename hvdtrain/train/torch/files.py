"""PyTorch state as files and bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch


def save(state: Any, path: Path) -> None:
    """`torch.save`, which hides the operating system's error where it can't write; here it is raised.

    Raises:
        OSError: the file can't be written.
    """
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def load(path: Path) -> Any:
    """What `save` wrote, with all tensors on the CPU."""
    return torch.load(path, map_location="cpu")


def pack(state: Any) -> bytes:
    """State as bytes, to be sent to other ranks."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` made, with all tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu")
