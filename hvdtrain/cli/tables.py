"""Tables, times and numbers as people read them, and runs as programs do."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from hvdtrain.supervise.runs import Sight

_STYLES = {
    "running": "green",
    "finished": "green",
    "planned": "yellow",
    "starting": "yellow",
    "restarting": "yellow",
    "failed": "red",
    "hung": "red",
    "lost": "red",
    "unknown": "red",
}
# Wide enough for everything: values stay whole, in a pipe and for who copies them from a narrow terminal.
_WIDE = 100_000


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> RenderableType:
    """A table without borders.

    Args:
        headings: of its columns; the cells of one called ``state`` get that state's colour.
        rows: their cells.
        right: headings of the columns whose cells stand at the right.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        # Where `Live` has to fit the terminal it's folded and not cut.
        made.add_column(heading, justify="right" if heading in set(right) else "left", overflow="fold")
    for row in rows:
        cells = zip(headings, row, strict=True)
        made.add_row(*(Text(cell, _STYLES.get(cell, "") if heading == "state" else "") for heading, cell in cells))
    return made


def show(*parts: RenderableType) -> None:
    """Print to standard output: coloured at a terminal, plain elsewhere; lines aren't folded."""
    from rich.console import Console

    console = Console(width=_WIDE, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    click.echo("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()), nl=False)


def facts(pairs: Iterable[tuple[str, str]]) -> RenderableType:
    """Names and what is known of them, a line each; what isn't known is left out."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            made.add_row(Text(f"  {name}"), Text(value))
    return made


def state_text(state: str) -> Text:
    """A state in its colour."""
    from rich.text import Text

    return Text(state, _STYLES.get(state, ""))


# --- words -----------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Such as ``0.4 s``, ``12 s``, ``3 min 05 s``, ``2 h 07 min`` or ``3 d 4 h``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return f"{minutes} min {whole % 60:02} s"
    if days < 2:
        return f"{hours} h {minutes % 60:02} min"
    return f"{days} d {hours % 24} h"


def moment(unix_s: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def progress(step: int, steps: int | None) -> str:
    """Steps done, of how many if that is known; nothing where no step was told."""
    if steps:
        return f"{step:,}/{steps:,}"
    return f"{step:,}" if step else ""


def speed(samples_per_s: float | None) -> str:
    """Samples per second, or nothing where that isn't known."""
    if samples_per_s is None:
        return ""
    digits = 0 if samples_per_s >= 100 else 1
    return f"{samples_per_s:,.{digits}f} samples/s"


def time_left(seconds: float | None) -> str:
    """The time that is left, or nothing where that isn't known."""
    return "" if seconds is None or not math.isfinite(seconds) else duration(seconds)


def as_json(sight: Sight) -> dict[str, Any]:
    """A run for programs: its status, where that could be read, with the state as it is, and where it was found."""
    found: dict[str, Any] = {
        "name": sight.run.name,
        "id": sight.run.id,
        "directory": str(sight.run.path.absolute()),
        "state": sight.state,
        "note": sight.note,
    }
    return (asdict(sight.status) if sight.status else {}) | found
