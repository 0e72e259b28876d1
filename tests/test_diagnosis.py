"""From saved outputs, most of them recorded from real failures, to the cause, the rank and the fix."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from diagnosis_cases import CASES, FINE, UNKNOWN, Case, recorded

from hvdtrain.diagnosis import tracebacks
from hvdtrain.diagnosis.diagnose import diagnose, explain
from hvdtrain.diagnosis.models import Diagnosis, Rule
from hvdtrain.diagnosis.rules import RULES, SYMPTOMS
from hvdtrain.diagnosis.saved import diagnose_stream
from hvdtrain.diagnosis.split import split
from hvdtrain.diagnosis.text import known

ALL = (*RULES, *SYMPTOMS)
KINDS = {"exception", "signal", "oom", "hang", "lost_host", "setup"}
VALUE_ERROR = (
    "Traceback (most recent call last):",
    '  File "train.py", line 6, in <module>',
    '    raise ValueError("bad data")',
    "ValueError: bad data",
)
SHUT_DOWN = (
    "Traceback (most recent call last):",
    '  File "train.py", line 9, in <module>',
    '    hvd.allreduce(x, name="x")',
    "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception",
)


def found_in(text: str) -> Diagnosis | None:
    return diagnose_stream("-", io.BytesIO(text.encode())).diagnosis


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_right_rule_wins(case: Case) -> None:
    found = found_in(case.text)
    if case.rule == FINE:
        assert found is None
        return
    assert found is not None
    assert (found.rule or UNKNOWN, found.rank) == (case.rule, case.rank)
    assert found.kind in KINDS
    assert found.evidence
    if case.rule != UNKNOWN:
        assert found.cause
        assert "{" not in found.cause + (found.fix or "")


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_every_rule_has_an_example(rule: Rule) -> None:
    assert any(case.rule == rule.name for case in CASES)


def test_names_of_rules_are_unique() -> None:
    assert len({rule.name for rule in ALL}) == len(ALL)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_a_rules_needle_is_in_what_its_pattern_finds(rule: Rule) -> None:
    """Else the quick look would hide what the pattern finds."""
    pattern = re.compile(rule.pattern, re.MULTILINE)
    needles = (rule.needle,) if isinstance(rule.needle, str) else rule.needle
    texts = ["\n".join(line for _, line in split(case.text.splitlines())) for case in CASES]
    for match in (match for text in texts if (match := pattern.search(text))):
        assert any(needle in match.string for needle in needles)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shapes-gloo", ["[5]", "[4]", "ALLREDUCE"]),
        ("stall-gloo", ["1: [allreduce.gradient.fc2.weight]"]),
        ("nomodule-mpi", ["'wandbb'", "rank 1"]),
        ("host-unknown-gloo", ["nosuchhost"]),
        ("host-refused-mpi", ["127.0.0.2", "22"]),
        ("slots-gloo", ["4", "2"]),
        ("slots-mpi", ["4"]),
        ("syntax-gloo", ["/home/ann/train.py", "line 3", "expected ':'"]),
        ("nosuchprogram-mpi", ["pyton3", "node1"]),
        ("notfound-gloo", ["/data/imagenet/train.tfrecord"]),
        ("mpirun-twice", ["pml"]),
        ("bf16-mpi", ["BFloat16"]),
        ("nan-torch", ["the loss is nan in epoch 1"]),
        ("shadow-mpi", ["pickle.py"]),
    ],
)
def test_the_values_are_filled_in(name: str, words: list[str]) -> None:
    found = found_in(recorded(name).text)
    assert found
    assert found.cause
    for word in words:
        assert word in found.cause


@pytest.mark.parametrize("name", ["raise-gloo", "raise-mpi", "raise-hvdtrain"])
def test_the_rank_that_raised_is_named_with_its_traceback(name: str) -> None:
    """Also where mpirun tears lines, and where another rank ended first because of it."""
    found = found_in(recorded(name).text)
    assert found
    assert found.rank == 1
    assert found.exception == "ValueError: the data of rank 1 is bad"
    assert found.traceback == (
        "Traceback (most recent call last):",
        '  File "/home/ann/train.py", line 9, in <module>',
        '    raise ValueError("the data of rank 1 is bad")',
        "ValueError: the data of rank 1 is bad",
    )


def test_mpirun_names_rank_and_host() -> None:
    found = found_in(recorded("killed-mpi").text)
    assert found
    assert (found.rank, found.host, found.kind) == (1, "node1", "signal")


def test_a_crash_shows_the_python_line() -> None:
    found = found_in(recorded("segv-gloo").text)
    assert found
    assert found.exception == "Fatal Python error: Segmentation fault"
    assert any('train.py", line ' in line for line in found.traceback)


# --- with what a supervisor knows -------------------------------------------------------------------------------


def test_a_consequence_never_wins() -> None:
    for lines in ({0: SHUT_DOWN, 1: VALUE_ERROR}, {0: VALUE_ERROR, 1: SHUT_DOWN}):
        for first in (None, 0, 1):
            found = diagnose(lines, ["Process 0 exit with status code 1."], first=first)
            assert found
            assert found.exception == "ValueError: bad data"
            assert found.cause is None
            assert lines[found.rank or 0] == VALUE_ERROR


def test_the_first_of_two_that_raised() -> None:
    ranks = {0: VALUE_ERROR, 1: (*VALUE_ERROR[:-1], "KeyError: 'label'")}
    found = diagnose(ranks, [], first=1, hosts={0: "node1", 1: "node2"})
    assert found
    assert (found.rank, found.host, found.exception) == (1, "node2", "KeyError: 'label'")


def test_a_reported_traceback_counts_as_the_ranks_own() -> None:
    found = diagnose({0: SHUT_DOWN, 1: []}, [], first=1, traceback=VALUE_ERROR)
    assert found
    assert (found.rank, found.traceback) == (1, VALUE_ERROR)


def test_the_kernels_word_on_memory() -> None:
    found = diagnose({0: SHUT_DOWN, 1: ["step 3"]}, [], first=1, exit_code=-9, oom=True)
    assert found
    assert (found.kind, found.rank, found.rule) == ("oom", 1, "host-memory-kernel")


@pytest.mark.parametrize(
    ("code", "rule"), [(-9, "killed"), (137, "killed"), (-11, "segmentation-fault"), (-4, "illegal-instruction")]
)
def test_a_signal_alone(code: int, rule: str) -> None:
    found = diagnose({0: [], 1: ["step 3"]}, [], first=1, exit_code=code)
    assert found
    assert (found.rank, found.rule, found.evidence) == (1, rule, ("step 3",))


def test_a_hang_has_horovods_words() -> None:
    ranks = {0: ["Missing ranks:", "2: [allreduce.a, allreduce.b]", "3!: [allreduce.b]"], 2: [], 3: []}
    found = diagnose(ranks, [], first=2, hang="no heartbeat for 30 s")
    assert found
    assert (found.kind, found.rank) == ("hang", 2)
    assert found.cause
    assert "2: [allreduce.a, allreduce.b] 3!: [allreduce.b]" in found.cause


def test_a_hang_that_nobody_speaks_of() -> None:
    found = diagnose({0: ["step 1"], 1: []}, [], first=1, hang="no heartbeat for 30 s")
    assert found == Diagnosis("hang", 1, evidence=("no heartbeat for 30 s",))


def test_nothing_is_found_where_nothing_is() -> None:
    assert diagnose({0: ["step 1", "done"]}, ["I0000 00:00:1796145677.9 28006 port.cc:153] oneDNN"]) is None


def test_an_earlier_trouble_that_was_handled_is_not_blamed() -> None:
    early = ["[Errno 28] No space left on device", *(f"step {step}" for step in range(100))]
    found = diagnose({0: [*early, *VALUE_ERROR]}, [])
    assert found
    assert (found.rule, found.exception) == (None, "ValueError: bad data")


def test_a_warning_just_before_explains_a_generic_error() -> None:
    lines = ["node1:1:2 [0] NCCL WARN Bootstrap : no socket interface found", *VALUE_ERROR[:-1]]
    found = diagnose({0: [*lines, "RuntimeError: ncclCommInitRank failed: unhandled system error"]}, [])
    assert found
    assert found.rule == "nccl-interface"


def test_explain_takes_one_ranks_lines() -> None:
    cause, fix = explain([*VALUE_ERROR[:-1], "torch.OutOfMemoryError: CUDA out of memory. Tried"]) or ("", "")
    assert cause == "the memory of the GPU of this rank ran out"
    assert fix
    assert "options.batch_size" in fix
    assert explain(VALUE_ERROR) is None


def test_it_is_quick_for_many_ranks() -> None:
    """The bar is 50 ms for 64 ranks with 200 lines each, on an idle machine; a test must also pass on a busy one."""
    lines = [f"epoch {i // 40}/20  step {i}/46000  loss 0.{i:04}  lr 0.02117  9,999 samples/s" for i in range(196)]
    ranks = {rank: [*lines, *SHUT_DOWN] for rank in range(64)}
    times = []
    for _ in range(5):
        begin = time.process_time()
        assert diagnose(ranks, [], first=3)
        times.append(time.process_time() - begin)
    assert min(times) < 0.2


# --- tracebacks -------------------------------------------------------------------------------------------------


def test_a_chain_is_one_traceback() -> None:
    lines = [*VALUE_ERROR, "", "During handling of the above exception, another exception occurred:", "", *SHUT_DOWN]
    (trace,) = tracebacks.find(["step 1", *lines, "step 2"])
    assert trace.lines[:4] == VALUE_ERROR
    assert trace.exception == SHUT_DOWN[-1]


def test_a_text_of_several_lines_belongs_to_its_exception() -> None:
    lines = [
        *VALUE_ERROR[:-1],
        "AttributeError: in user code:",
        "",
        "    File 'a'",
        "",
        "    AttributeError: x",
        "",
        "y",
    ]
    (trace,) = tracebacks.find(lines)
    assert trace.lines[-1] == "    AttributeError: x"


def test_other_threads_are_left_out_of_a_crash() -> None:
    lines = [
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x01 (most recent call first):",
        '  File "a.py", line 1 in f',
        "",
        "Current thread 0x02 (most recent call first):",
        '  File "b.py", line 2 in g',
        "",
        "Extension modules: numpy.core (total: 1)",
    ]
    (trace,) = tracebacks.find(lines)
    assert trace.fatal
    assert trace.lines == (lines[0], lines[5], lines[6])


# --- the documentation ------------------------------------------------------------------------------------------


def test_the_documentation_lists_every_rule() -> None:
    """docs/failures.md has `hvdtrain diagnose --known`."""
    assert known() in (Path(__file__).parents[1] / "docs/failures.md").read_text()
    assert all(f"| `{rule.name}` |" in known() for rule in ALL)
