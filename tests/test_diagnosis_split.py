"""Taking the prefixes of horovodrun, mpirun and hvdtrain off again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.diagnosis.split import split

# What ranks write: anything on a line that isn't itself a prefix or a colour.
LINES = st.lists(st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="[<\u2028\u2029\x85")))
RANKS = st.dictionaries(st.integers(0, 300), LINES, max_size=5)
FORMS = {
    "gloo": "[{rank}]<stderr>:{line}",
    "gloo with time": "Tue Nov 10 10:05:04 2026[{rank}]<stdout>:{line}",
    "mpirun": "[1,{rank}]<stderr>:{line}",
    "mpirun with time": "Tue Nov  1 10:05:04 2026[1,{rank}]<stdout>:{line}",
    "hvdtrain": "[{rank}] {line}",
    "hvdtrain, padded": "[{rank:>4}] {line}",
    "hvdtrain, coloured": "\x1b[36m[{rank}]\x1b[0m {line}",
    "torch": "[rank{rank}]:{line}",
}


def by_rank(lines: list[str]) -> dict[int | None, list[str]]:
    found: dict[int | None, list[str]] = {}
    for rank, line in split(lines):
        found.setdefault(rank, []).append(line)
    return found


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(ranks=RANKS, data=st.data())
def test_ranks_lines_come_back_in_their_order(form: str, ranks: dict[int, list[str]], data: st.DataObject) -> None:
    """However the ranks' lines are interleaved."""
    turns = data.draw(st.permutations([rank for rank, lines in ranks.items() for _ in lines]))
    left = {rank: iter(lines) for rank, lines in ranks.items()}
    written = [form.format(rank=rank, line=next(left[rank])) for rank in turns]
    assert by_rank(written) == {rank: lines for rank, lines in ranks.items() if lines}


@given(ranks=RANKS, data=st.data())
def test_lines_that_mpirun_tears_come_back_whole(ranks: dict[int, list[str]], data: st.DataObject) -> None:
    """mpirun prefixes each piece that a process writes, and pieces of several ranks may share a line."""
    pieces = {rank: [piece for line in lines for piece in torn(line, data)] for rank, lines in ranks.items()}
    turns = data.draw(st.permutations([rank for rank, own in pieces.items() for _ in own]))
    left = {rank: iter(own) for rank, own in pieces.items()}
    written = "".join(f"[1,{rank}]<stderr>:{next(left[rank])}" for rank in turns)
    assert by_rank(written.split("\n")[:-1]) == {rank: lines for rank, lines in ranks.items() if lines}


def torn(line: str, data: st.DataObject) -> list[str]:
    cut = data.draw(st.integers(0, len(line)))
    return [f"{line}\n"] if cut in (0, len(line)) else [line[:cut], f"{line[cut:]}\n"]


def test_what_has_no_prefix_is_the_launchers() -> None:
    lines = ["Process 1 exit with status code 1.", "[node1:4711] 3 more processes", "", "[INFO] x", "[1,2] y"]
    assert list(split(lines)) == [(None, line) for line in lines]


def test_a_line_without_end_comes_last() -> None:
    assert list(split(["[1,0]<stderr>:half[1,1]<stderr>:whole"])) == [(1, "whole"), (0, "half")]


def test_streams_of_one_rank_are_put_together_apart() -> None:
    lines = ["[1,0]<stdout>:loss [1,0]<stderr>:warning", "[1,0]<stdout>:0.5"]
    assert list(split(lines)) == [(0, "warning"), (0, "loss 0.5")]
