"""Good job specs: YAML's traps, variables, overrides, paths, and the way back to YAML."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hvdtrain.spec.loader import load_spec, resolved_yaml
from hvdtrain.spec.models import Environment, Hosts, JobSpec


def load(text: str, *overrides: str, folder: Path, environ: dict[str, str] | None = None) -> JobSpec:
    path = folder / "job.yaml"
    path.write_bytes(text.encode())
    return load_spec(path, overrides, environ or {})


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 0.001), ("1E3", 1000.0), (".5", 0.5), ("5.", 5.0), ("+1.5e+2", 150.0), ("-0", 0), ("12", 12),
        ("010", 10), ("0o17", 15), ("0x1F", 31), (".inf", math.inf), ("-.INF", -math.inf), ("+.inf", math.inf),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("Off", "Off"), ("y", "y"), ("22:22", "22:22"),
        ("1:30:00", "1:30:00"), ("1_000", "1_000"), ("2024-01-31", "2024-01-31"), ("0b11", "0b11"), ("1e", "1e"),
        ("1.2.3", "1.2.3"), ("=", "="), ("nan", "nan"), ("inf", "inf"), ("'1'", "1"), ('"true"', "true"),
        ("!!str 5", "5"), ("|-\n    5", "5"), ("[1, a, [null, 2.5]]", [1, "a", [None, 2.5]]),
        ("{a: {1: no}}", {"a": {"1": "no"}}),
        ("$HOME", "$HOME"), ("$$", "$$"),
    ],
)  # fmt: skip
def test_values_of_any_type_follow_yaml_1_2(written: str, value: Any, tmp_path: Path) -> None:
    found = load(f"task: a:B\noptions:\n  x: {written}\n", folder=tmp_path).options["x"]
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_is_one(tmp_path: Path) -> None:
    assert math.isnan(load("task: a:B\noptions: {x: .nan}\n", folder=tmp_path).options["x"])


@pytest.mark.parametrize(
    "written",
    ["1", "1.10", "007", "no", "off", "on", "yes", "true", "False", "22:22", "2024-01-31", "1e-3", "0x1F", "0o7",
     ".inf", "1_000", "$HOME", "$X and $Y", "a=b", "C:\\data", "it's", "<<", "=", "12345678901234567890", "1e9"],
)  # fmt: skip
def test_text_stays_as_it_is_written(written: str, tmp_path: Path) -> None:
    spec = load(f"command: [python, {written}]\nenv:\n  set:\n    X: {written}\n", folder=tmp_path)
    assert spec.command == ("python", written)
    assert spec.env.set == {"X": written}
    assert load(f"task: a:B\nname: {written}\n", folder=tmp_path).name == written


def test_keys_that_yaml_1_1_takes_for_booleans(tmp_path: Path) -> None:
    spec = load("task: a:B\nenv: {set: {NO: 1, on: 2, y: 3}}\noptions: {no: 1, 1: 2}\n", folder=tmp_path)
    assert spec.env.set == {"NO": "1", "on": "2", "y": "3"}
    assert spec.options == {"no": 1, "1": 2}


def test_numbers(tmp_path: Path) -> None:
    text = "task: a:B\nprocesses: 1e1\ncheckpoint: {every_steps: ~, keep: 0x10}\nhorovod: {cycle_time_ms: 1e-3}\n"
    spec = load(text, folder=tmp_path)
    assert spec.processes == 10
    assert spec.checkpoint.every_steps is None
    assert spec.checkpoint.keep == 16
    assert spec.horovod.cycle_time_ms == 0.001


def test_defaults(tmp_path: Path) -> None:
    spec = load("task: a.b:C", folder=tmp_path)
    assert spec == JobSpec(task="a.b:C", name="job", directory=tmp_path)


def test_empty_sections_have_their_defaults(tmp_path: Path) -> None:
    text = "task: a:B\noptions:\nhosts:\nenv:\n  set:\ncheckpoint: ~\nhorovod: null\ncommand:\nprocesses:\ndirectory:\n"
    assert load(text, folder=tmp_path) == load("task: a:B", folder=tmp_path)


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = """\
task: a:B
options:
  small: &small {lr: 1, width: 2}
  wide: &wide {width: 8}
  one: {<<: *small, lr: 3}
  two: {depth: 1, <<: [*wide, *small]}
  copy: *small
"""
    options = load(text, folder=tmp_path).options
    assert options["one"] == {"lr": 3, "width": 2}
    assert options["two"] == {"width": 8, "lr": 1, "depth": 1}
    assert options["copy"] == {"lr": 1, "width": 2}


def test_an_anchor_changed_in_one_place_stays_in_the_other(tmp_path: Path) -> None:
    text = "task: a:B\noptions: {a: &a {x: 1}, b: *a}\n"
    assert load(text, "options.b.x=2", folder=tmp_path).options == {"a": {"x": 1}, "b": {"x": 2}}


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    assert load("\ufefftask: a:B\r\nname: x\r\n", folder=tmp_path).name == "x"


@pytest.mark.parametrize("start", ["---\n", "%YAML 1.2\n---\n", "# comment\n\n"])
def test_starts_of_documents(start: str, tmp_path: Path) -> None:
    assert load(f"{start}task: a:B\n", folder=tmp_path).task == "a:B"


# --- variables -----------------------------------------------------------------------------------------------------


def test_variables(tmp_path: Path) -> None:
    text = """\
command: [python, "${SCRIPT}", "--name=${USER_NAME:-nobody}-${N}", "$${N}", $N, "${EMPTY}", "${EMPTY:-full}"]
processes: ${N}
oversubscribe: "${FLAG}"
horovod: {cycle_time_ms: "${MS:-2.5}", fusion_threshold_mb: "${NONE:-null}"}
env:
  set: {A: "${N}", B: "${WORD:-null}"}
"""
    spec = load(text, folder=tmp_path, environ={"SCRIPT": "a b.py", "N": "2", "EMPTY": "", "FLAG": "true"})
    assert spec.command == ("python", "a b.py", "--name=nobody-2", "${N}", "$N", "", "full")
    assert spec.processes == 2
    assert spec.oversubscribe is True
    assert spec.horovod.cycle_time_ms == 2.5
    assert spec.horovod.fusion_threshold_mb is None
    assert spec.env.set == {"A": "2", "B": "null"}


def test_quotes_decide_the_type_of_a_variable_in_options(tmp_path: Path) -> None:
    text = 'task: a:B\noptions:\n  a: ${X}\n  b: "${X}"\n  c: ${X}1\n  d: $${X}\n'
    options = load(text, folder=tmp_path, environ={"X": "1e-3"}).options
    assert options == {"a": 0.001, "b": "1e-3", "c": 1e-31, "d": "${X}"}


@pytest.mark.parametrize("value", ["a: b", "[1, 2]", "*x", "# no", "x\ny: z", "'", "!!python/object:x y", "${OTHER}"])
def test_a_variable_never_becomes_structure(value: str, tmp_path: Path) -> None:
    spec = load("task: a:B\noptions:\n  x: ${X}\n", folder=tmp_path, environ={"X": value})
    assert spec.options == {"x": value}


def test_an_overridden_variable_need_not_be_set(tmp_path: Path) -> None:
    text = "task: a:B\nprocesses: ${NP}\nhosts: {list: ['${HOST}']}\n"
    spec = load(text, "processes=3", "hosts={list: [a]}", folder=tmp_path)
    assert spec.processes == 3
    assert spec.hosts.list == ("a",)


# --- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "options"),
    [
        ("options.lr=1e-3", {"lr": 0.001, "deep": {"a": 1}}),
        ("options.deep.a=x", {"lr": 1, "deep": {"a": "x"}}),
        ("options.deep.b.c=no", {"lr": 1, "deep": {"a": 1, "b": {"c": "no"}}}),
        ("options.new=", {"lr": 1, "deep": {"a": 1}, "new": ""}),
        ("options.deep=[1, {x: null}]", {"lr": 1, "deep": [1, {"x": None}]}),
        ("options.lr='1'", {"lr": "1", "deep": {"a": 1}}),
        ("options.lr=a: b # c", {"lr": "a: b # c", "deep": {"a": 1}}),
        ("options.lr=*x=y", {"lr": "*x=y", "deep": {"a": 1}}),
        ("options.lr=null", {"lr": None, "deep": {"a": 1}}),
        ("options.lr=${LR}", {"lr": 7, "deep": {"a": 1}}),
        ('options={"a": 2}', {"a": 2}),
    ],
)
def test_override(override: str, options: dict[str, Any], tmp_path: Path) -> None:
    text = "task: a:B\noptions: {lr: 1, deep: {a: 1}}\n"
    assert load(text, override, folder=tmp_path, environ={"LR": "7"}).options == options


def test_overrides_make_sections_and_the_last_one_wins(tmp_path: Path) -> None:
    overrides = ["env.set.X=", "env.set.Y=1.10", "hosts.list=[a:2, 'b[1-2]:2']", "processes=2", "processes=4", "name=n"]
    spec = load("task: a:B\nenv:\n", *overrides, folder=tmp_path)
    assert spec.env.set == {"X": "", "Y": "1.10"}
    assert spec.hosts.list == ("a:2", "b[1-2]:2")
    assert spec.processes == 4
    assert spec.name == "n"


def test_an_override_repairs_the_file(tmp_path: Path) -> None:
    text = "task: a:B\nprocesses: two\ncommand: [x]\nhosts: {lists: 3}\n"
    assert load(text, "processes=2", "command=null", "hosts={}", folder=tmp_path).processes == 2


# --- names and paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"), [("digits.yaml", "digits"), ("a.b.yml", "a.b"), ("job", "job"), ("é x.yaml", "é x")]
)
def test_the_name_comes_from_the_file(file: str, name: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("task: a:B")
    assert load_spec(tmp_path / file).name == name


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("task: a:B\nhosts: {file: ../hosts}\ndirectory: src\n")
    (tmp_path / "jobs" / "bare.yaml").write_text("task: a:B\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    spec = load_spec(Path("../jobs/job.yaml"))
    assert spec.directory is not None
    assert spec.hosts.file is not None
    assert spec.directory.resolve() == tmp_path / "jobs" / "src"
    assert spec.hosts.file.resolve() == tmp_path / "hosts"
    bare = load_spec(Path("../jobs/bare.yaml")).directory
    assert bare is not None
    assert bare.is_absolute()
    assert bare.resolve() == tmp_path / "jobs"

    spec = load_spec(Path("../jobs/job.yaml"), ["directory=code", "hosts={file: x}"])
    assert spec.directory == tmp_path / "here" / "code"
    assert spec.hosts.file == tmp_path / "here" / "x"
    for written in ("~", "'~'", "~/"):
        assert load_spec(Path("../jobs/job.yaml"), [f"directory={written}"]).directory == tmp_path / "home"
    assert load_spec(Path("../jobs/job.yaml"), ["directory=/abs"]).directory == Path("/abs")


# --- back to YAML --------------------------------------------------------------------------------------------------

TRAPS = ["1", "no", "1e-3", "0o7", "~", "", "null", "${X}", "$${X}", "$", "{{", " a ", "a\nb\n", "\x85", "\u2028", "\r",
         "\ufeff", "<<", "=", ".inf", "- a", "a: b", "#", "!x", "&a", "*a", "'", '"', "\\", "\x7f"]  # fmt: skip
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12) | st.sampled_from(TRAPS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXTS.filter(lambda key: key and "${" not in key), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.from_regex(r"\A[A-Z_][A-Z0-9_]{0,8}\Z")


@settings(deadline=2000, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=VALUES.map(lambda value: {"x": value}), text=TEXTS, variables=st.dictionaries(NAMES, TEXTS, max_size=3))
@example(options={"x": 1e-05, "y": 1e20, "z": -0.0}, text="x", variables={"NO": "no"})
def test_what_was_resolved_loads_again(
    options: dict[str, Any], text: str, variables: dict[str, str], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"name": "n", "directory": tmp_path, "env": Environment(set=variables, forward=("HF_*",))}
    task = JobSpec(task="a:B", options=options, hosts=Hosts(list=("a", text)), processes=3, **common)
    command = JobSpec(command=("x", text, "${X}"), hosts=Hosts(file=tmp_path / "h ${x}"), **common)
    for spec in (task, command):
        assert load(resolved_yaml(spec), folder=tmp_path) == spec


def test_the_resolved_spec_is_easy_to_read(tmp_path: Path) -> None:
    text = "command: [python, t.py, 0.10]\nhorovod: {cycle_time_ms: 2}\nenv: {set: {A: no}, secrets: [TOKEN]}\n"
    shown = resolved_yaml(load(text, "directory=/code", folder=tmp_path))
    assert (
        shown
        == """\
name: job
command:
- python
- t.py
- '0.10'
directory: /code
python: null
processes: null
oversubscribe: false
hosts:
  file: null
  list: []
  include: []
  exclude: []
  drop_failing: false
ssh:
  user: null
  port: null
  identity_file: null
  config: null
network:
  fabric: auto
  interfaces: []
  hcas: []
  rank_order: given
validate: quick
controller: auto
env:
  set:
    A: 'no'
  forward: []
  secrets:
  - TOKEN
elastic:
  min: null
  max: null
  batch: keep_per_worker
  discovery: null
  cooldown_s: 10.0
  timeout_s: 600
restarts:
  max: null
  backoff_s: 5.0
hang_timeout_s: 600.0
stop_grace_s: 30.0
parallelism:
  data: auto
  tensor: 1
  pipeline: 1
  embedding: 1
  shard_optimizer: false
  micro_batches: null
  schedule: 1f1b
  cut_by: parameters
  recompute: false
horovod:
  fusion_threshold_mb: null
  cycle_time_ms: 2.0
  compression: none
  autotune: false
  tuned: null
  hierarchical_allreduce: null
  adasum: false
"""
    )


def test_the_loader_imports_little() -> None:
    heavy = ("rich", "click", "psutil", "ClusterShell")
    code = f"import sys, hvdtrain.spec.loader; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
