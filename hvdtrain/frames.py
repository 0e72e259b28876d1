"""The channel's messages: one byte of kind, four of length (big-endian), then the payload.

The worker begins with HELLO, which the supervisor answers with START, or with STOP where the run is ending already.
Then the worker sends its command's OUT and ERR bytes as they come, a BEAT from time to time, ENDING when somebody else
than the supervisor tells it to end, and one EXIT. The supervisor says DUMP and STOP, or just closes the channel. HELLO,
START, BEAT, STOP and EXIT are JSON objects.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

HELLO = b"h"
START = b"s"
OUT = b"o"
ERR = b"e"
BEAT = b"b"
ENDING = b"g"
EXIT = b"x"
DUMP = b"d"
STOP = b"q"

_HEADER = struct.Struct(">cI")
# Larger than any message: output comes in pieces of at most 64 KiB, an environment is below Linux's 2 MiB or so.
_MAX_PAYLOAD = 16 * 1024 * 1024


class ChannelError(Exception):
    """What came over the channel isn't a frame."""


def pack(kind: bytes, payload: bytes) -> bytes:
    """A frame as it goes over the socket."""
    return _HEADER.pack(kind, len(payload)) + payload


def pack_json(kind: bytes, message: dict[str, Any]) -> bytes:
    """A frame that carries a JSON object."""
    return pack(kind, json.dumps(message).encode())


class FrameReader:
    """Puts frames together from bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take bytes in; yield each frame that is now complete as ``(kind, payload)``.

        Raises:
            ChannelError: a length that no frame has.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            if length > _MAX_PAYLOAD:
                raise ChannelError(f"a frame of {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, payload


def receive(channel: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """Wait for one JSON frame; the other end says no more before it has an answer.

    Raises:
        ChannelError: the channel closed.
    """
    reader = FrameReader()
    while data := channel.recv(65536):
        for kind, payload in reader.feed(data):
            return kind, json.loads(payload)
    raise ChannelError("closed")
