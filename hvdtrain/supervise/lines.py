"""From bytes that arrive in pieces to whole lines."""

from __future__ import annotations

import time
from collections.abc import Iterator

# A line without end must not fill memory: it's cut here, which no reader of logs will mind.
MAX_LINE = 1 << 20
# A progress bar rewrites its line with carriage returns, many times a second, and may never end it.
REWRITE_INTERVAL_S = 2.0


class LineAssembler:
    """Whole lines of one stream of one rank.

    Text that a carriage return overwrites is dropped, as a terminal would, but the newest state of such a line is
    given every two seconds, so that progress bars are seen.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._rewritten_at = time.monotonic()

    def feed(self, data: bytes) -> Iterator[str]:
        """Take bytes in; yield each line that is now whole, without its end."""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            yield _visible(line)
        if b"\r" in self._buffer:
            yield from self._rewrite()
        while len(self._buffer) > MAX_LINE:
            yield _visible(self._buffer[:MAX_LINE])
            self._buffer = self._buffer[MAX_LINE:]

    def close(self) -> Iterator[str]:
        """The last line, if it had no end."""
        if self._buffer:
            yield _visible(self._buffer)
            self._buffer = b""

    def _rewrite(self) -> Iterator[str]:
        text = self._buffer.rstrip(b"\r")
        done, _, current = text.rpartition(b"\r")
        # A return at the end is kept: it may be the first half of "\r\n".
        self._buffer = current + b"\r" if len(text) < len(self._buffer) else current
        now = time.monotonic()
        if done and now - self._rewritten_at >= REWRITE_INTERVAL_S:
            self._rewritten_at = now
            yield _visible(done)


def _visible(line: bytes) -> str:
    """What a terminal shows of a line: the text after its last inner carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
