"""The channel's messages: one byte of kind, four of length (big-endian), then the payload.

A worker begins with HELLO, which the supervisor answers with START, or with STOP where the run is ending already.
Then the worker sends its command's OUT and ERR bytes as they come, a BEAT from time to time, ENDING when somebody else
than the supervisor tells it to end, and one EXIT. The supervisor says DUMP and STOP, or just closes the channel. HELLO,
START, BEAT, STOP and EXIT are JSON objects.

What stands for ssh on horovodrun's PATH begins with RUN, a JSON object. The answer is HERE, if the host is this
machine, or the command's OUT bytes and its EXIT.

An agent, which joins another host to the supervisor, is told SETUP first and answers READY. The supervisor says RUN and
SIGNAL, the agent OUT and EXIT, each with the number of the run. A worker of that host is a stream: OPEN and SHUT say
that it's there and gone, DATA carries its bytes both ways. Each end says ALIVE from time to time.
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
RUN = b"r"
HERE = b"l"
SETUP = b"u"
READY = b"y"
SIGNAL = b"k"
OPEN = b"p"
SHUT = b"z"
DATA = b"t"
ALIVE = b"a"
# An agent's first bytes: what comes before is its login shell's.
AGENT_MARK = b"\0hvdtrain agent 1\n"

_HEADER = struct.Struct(">cI")
_NUMBER = struct.Struct(">I")
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


def pack_numbered(kind: bytes, number: int, payload: bytes = b"") -> bytes:
    """A frame of one of several runs or streams."""
    return pack(kind, _NUMBER.pack(number) + payload)


def numbered(payload: bytes) -> tuple[int, bytes]:
    """The number in a frame of `pack_numbered`, and the rest.

    Raises:
        ChannelError: the frame is too short.
    """
    if len(payload) < _NUMBER.size:
        raise ChannelError("a frame without its number")
    return _NUMBER.unpack_from(payload)[0], payload[_NUMBER.size :]


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
