"""Python's ways of saying that it ends: tracebacks of exceptions, and faulthandler's of signals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_START = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FATAL = re.compile(r"Fatal Python error: (?P<what>.*)")
_LOG_LINE = re.compile(
    r"\[?\d{4}-\d\d-\d\d|[IWEF]\d{4} |-{20}|terminate called|\[[\w.-]+:\d+\]|Exception ignored|hvdtrain: "
    # What a shell says of a command that a signal ended.
    r"|(?:Terminated|Killed|Aborted|Segmentation fault)(?: \(core dumped\))?$"
)
_SYNTAX_FRAME = re.compile(r'  File ".*", line \d+$')
# After an exception's first line, as many more may belong to its text.
_MOST_TEXT = 40


@dataclass(frozen=True)
class Trace:
    """One end as Python tells it.

    Attributes:
        start: index of its first line.
        end: index after its last.
        exception: the line that names it; of a chain, the last one.
        lines: all of it.
        fatal: whether a signal in C code ended the interpreter.
    """

    start: int
    end: int
    exception: str
    lines: tuple[str, ...]
    fatal: bool = False


def find(lines: Sequence[str]) -> list[Trace]:
    """All tracebacks in these lines, chained ones as one, in their order."""
    found: list[Trace] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.endswith(_START) or _SYNTAX_FRAME.match(line):
            trace = _exception(lines, index)
        elif "Fatal Python error: " in line:
            trace = _fatal(lines, index)
        else:
            index += 1
            continue
        if found and not found[-1].fatal and _is_chained(lines[found[-1].end : trace.start]):
            first = found.pop()
            trace = Trace(first.start, trace.end, trace.exception, tuple(lines[first.start : trace.end]))
        found.append(trace)
        index = max(trace.end, index + 1)
    return found


def _is_chained(between: Sequence[str]) -> bool:
    return any(line in _CHAINED for line in between) and all(not line or line in _CHAINED for line in between)


def _exception(lines: Sequence[str], start: int) -> Trace:
    """Frames are indented, and what follows them without indent names the exception."""
    indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())] if lines[start].endswith(_START) else ""
    index = start + 1
    while index < len(lines) and lines[index].startswith((f"{indent} ", f"{indent}\t")):
        index += 1
    if index >= len(lines):
        return Trace(start, index, "", tuple(lines[start:index]))
    end = _end_of_text(lines, index)
    return Trace(start, end, lines[index].strip(), tuple(lines[start:end]))


def _end_of_text(lines: Sequence[str], index: int) -> int:
    """Where an exception's text ends: at a traceback, a log line, or a blank line that nothing indented follows."""
    end = index + 1
    while end < len(lines) and end - index < _MOST_TEXT:
        line = lines[end]
        following = lines[end + 1] if end + 1 < len(lines) else ""
        if line.endswith(_START) or line in _CHAINED or _LOG_LINE.match(line):
            break
        if not line.strip() and not following.startswith("    "):
            break
        end += 1
    return end


def _fatal(lines: Sequence[str], start: int) -> Trace:
    """`Fatal Python error: Segmentation fault` and the stack of the thread where it was; other threads are left out."""
    index = start + 1
    kept = [lines[start]]
    current = False
    while index < len(lines):
        line = lines[index]
        if line.startswith(("Current thread ", "Thread ")):
            current = line.startswith("Current")
        elif line.startswith("Extension modules:") or (line.strip() and not line.startswith("  ")):
            break
        if current and line.strip():
            kept.append(line)
        index += 1
    match = _FATAL.search(lines[start])
    assert match
    return Trace(start, index, f"Fatal Python error: {match['what']}", tuple(kept), fatal=True)
