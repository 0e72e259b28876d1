"""How the plan's sentences count."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Such as ``1 process`` and ``2 processes``."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
