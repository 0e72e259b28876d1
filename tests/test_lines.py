"""Lines reach the screen and the logs whole, however the bytes arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.supervise import lines
from hvdtrain.supervise.lines import LineAssembler


def assemble(*pieces: bytes) -> list[str]:
    assembler = LineAssembler()
    found = [line for piece in pieces for line in assembler.feed(piece)]
    return [*found, *assembler.close()]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))), st.data())
def test_any_pieces_give_the_same_lines(texts: list[str], data: st.DataObject) -> None:
    stream = "".join(f"{text}\n" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert assemble(*pieces) == texts


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((b"a\r\nb\r\n",), ["a", "b"]),
        ((b"a\r", b"\nb"), ["a", "b"]),
        ((b"10%\r20%\r100%\ndone\n",), ["100%", "done"]),
        ((b"\r10%", b"\r20%", b"\r100%\n"), ["100%"]),
        ((b"10%\r", b"20%\r", b"100%\r", b"\n"), ["100%"]),
        ((b"no end",), ["no end"]),
        ((b"\n\n",), ["", ""]),
        ((b"\xff\xfe\n",), ["\ufffd\ufffd"]),
        (("é".encode()[:1], "é".encode()[1:] + b"\n"), ["é"]),
    ],
)
def test_line_ends(pieces: tuple[bytes, ...], expected: list[str]) -> None:
    assert assemble(*pieces) == expected


def test_a_progress_bar_is_seen_while_it_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now[0])
    assembler = LineAssembler()
    shown = []
    for percent in range(40):
        now[0] += 0.25
        shown += assembler.feed(f"\r{percent}%".encode())
    assert [int(line.rstrip("%")) for line in shown] == [6, 14, 22, 30, 38]


@pytest.mark.parametrize("separator", [b"", b"\r"])
def test_a_line_without_end_does_not_fill_memory(separator: bytes) -> None:
    assembler = LineAssembler()
    longest = 0
    for _ in range(100):
        list(assembler.feed(b"x" * 100_000 + separator))
        longest = max(longest, len(assembler._buffer))
    assert longest <= lines.MAX_LINE + 100_001
