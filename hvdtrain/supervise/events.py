"""One thread's events: files that can be read, and moments that have come."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Action = Callable[[], None]


class EventLoop:
    """Calls what was registered for a file when it can be read, and what was set for a moment when it has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Action]] = []

    def on_readable(self, file: Any, action: Action) -> None:
        """From now on ``action`` is called whenever the file has something to read, or has ended."""
        self._selector.register(file, selectors.EVENT_READ, action)

    def forget(self, file: Any) -> None:
        """Undo `on_readable`, if that hasn't been done."""
        with suppress(KeyError):
            self._selector.unregister(file)

    def after(self, seconds: float, action: Action) -> None:
        """Call ``action`` once, in so many seconds."""
        self._timers.append((time.monotonic() + seconds, action))

    def every(self, seconds: float, action: Action) -> None:
        """Call ``action`` again and again."""

        def again() -> None:
            action()
            self.after(seconds, again)

        self.after(seconds, again)

    def turn(self, patience: float | None = None) -> None:
        """Wait for the next event, at most ``patience`` seconds, and handle all that is there."""
        waits = [max(0.0, when - time.monotonic()) for when, _ in self._timers]
        if patience is not None:
            waits.append(patience)
        for key, _ in self._selector.select(min(waits, default=None)):
            # One event may end what another of the same moment is about.
            if self._selector.get_map().get(key.fd) == key:
                key.data()
        due = [timer for timer in self._timers if timer[0] <= time.monotonic()]
        for timer in due:
            self._timers.remove(timer)
            timer[1]()

    def drain(self) -> None:
        """Handle what can be read now, without waiting."""
        while self._selector.select(0):
            self.turn(patience=0)

    def close(self) -> None:
        """Forget everything."""
        self._selector.close()
        self._timers.clear()
