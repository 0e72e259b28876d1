"""Which rank wrote which line: takes the prefixes of horovodrun, mpirun and hvdtrain off again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# `horovodrun --prefix-output-with-timestamp` and `mpirun --timestamp-output` put it before the rest.
_TIME = r"(?:[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4})?"
# mpirun --tag-output: job, rank, stream. It prefixes what a process writes in one piece, so these stand in the middle
# of lines too, also of other ranks' lines.
_MPIRUN = re.compile(_TIME + r"\[\d+,(?P<rank>\d+)\]<(?P<stream>std[a-z]+)>:")
_GLOO = re.compile(_TIME + r"\[(?P<rank>\d+)\]<std[a-z]+>:")
# hvdtrain's own, padded to the widest rank; and what PyTorch puts before a traceback.
_BARE = re.compile(r"\[ *(?P<rank>\d+)\] |\[rank(?P<torch>\d+)\]:")


class Splitter:
    """Gives each rank its lines back. What has no prefix is the launcher's: rank None."""

    def __init__(self) -> None:
        # What a rank has written on a stream and not ended yet.
        self._open: dict[tuple[int, str], str] = {}

    def feed(self, line: str) -> Iterator[tuple[int | None, str]]:
        """Take one line of the file; yield the lines that are whole now, each with its rank."""
        line = line.rstrip("\r\n")
        if "\x1b" in line:
            line = _COLOURS.sub("", line)
        if "]<std" in line:
            if match := _GLOO.match(line):
                text = _seen(line[match.end() :])
                # After a carriage return horovodrun puts its prefix once more.
                again = _GLOO.match(text)
                yield int(match["rank"]), text[again.end() :] if again else text
                return
            if match := _MPIRUN.search(line):
                yield from self._pieces(line, match)
                return
        elif line.startswith("[") and (match := _BARE.match(line)):
            yield int(match["rank"] or match["torch"]), _seen(line[match.end() :])
            return
        yield None, _seen(line)

    def close(self) -> Iterator[tuple[int | None, str]]:
        """What was never ended."""
        for (rank, _), text in self._open.items():
            if text:
                yield rank, text
        self._open.clear()

    def _pieces(self, line: str, first: re.Match[str]) -> Iterator[tuple[int | None, str]]:
        if first.start():
            yield None, line[: first.start()]
        found = list(_MPIRUN.finditer(line, first.start()))
        for match, following in zip(found, [*found[1:], None], strict=True):
            key = int(match["rank"]), match["stream"]
            text = self._open.pop(key, "") + line[match.end() : following.start() if following else None]
            if following is None:
                yield key[0], _seen(text)
            else:
                self._open[key] = text


def _seen(text: str) -> str:
    """What a terminal shows of a line that was written over, as progress bars do."""
    return text.rpartition("\r")[2] if "\r" in text else text


def split(lines: Iterable[str]) -> Iterator[tuple[int | None, str]]:
    """Each line with its rank, in the order in which the lines were ended; None for the launcher's."""
    splitter = Splitter()
    for line in lines:
        yield from splitter.feed(line)
    yield from splitter.close()
