"""A host as the plan sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One machine and how many workers it takes.

    Attributes:
        name: host name or address as ssh takes it (IPv6 without brackets).
        slots: workers that it gets before the next host is used.
        max_slots: workers that it may get when oversubscribed; None for no bound of its own.
        user: login name on the host, where it isn't ssh's own choice.
    """

    name: str
    slots: int = 1
    max_slots: int | None = None
    user: str | None = None
