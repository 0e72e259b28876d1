"""PyTorch state as files and bytes."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Iterator, Mapping
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


def to_host(state: Any) -> Any:
    """A copy of the state whose tensors are in the host's memory and share nothing with those given."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        # Of the same type, with the versions of its layers that a model's state carries.
        copied: Any = copy.copy(state)
        for name, value in state.items():
            copied[name] = to_host(value)
        return copied
    if type(state) in (list, tuple):
        return type(state)(to_host(value) for value in state)
    return copy.deepcopy(state)


def digest(state: Any) -> str:
    """Of all tensors, numbers and texts in the state, by their bits. Other objects needn't look the same twice."""
    found = hashlib.blake2b(digest_size=16)
    for value in _leaves(state):
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{list(value.shape)}".encode())
            found.update(memoryview(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            found.update(repr(value).encode())
    return found.hexdigest()


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for name, value in state.items():
            yield name
            yield from _leaves(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _leaves(value)
    else:
        yield state
