"""Bad job specs: every fault at once, each in one sentence with its place."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.errors import ExitStatus, InputError
from hvdtrain.spec.loader import load_spec

TABLE = yaml.safe_load((Path(__file__).parent / "bad_specs.yaml").read_text())


def messages(content: str | bytes, overrides: list[str] | None = None, environ: dict[str, str] | None = None) -> str:
    Path("job.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        load_spec(Path("job.yaml"), overrides or [], environ or {})
    assert caught.value.exit_status == ExitStatus.USAGE
    return "\n".join(str(problem) for problem in caught.value.problems)


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", TABLE, ids=[case["title"] for case in TABLE])
def test_bad_spec(case: dict[str, Any]) -> None:
    assert messages(case["spec"], case.get("set"), case.get("environ")) == case["messages"].rstrip("\n")


def test_the_table_is_large_and_without_repetition() -> None:
    assert len(TABLE) >= 60
    assert len({case["title"] for case in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "job.yaml: the file is empty: a job spec has at least 'task' or 'command'"),
        (b"\xef\xbb\xbf", "job.yaml: the file is empty: a job spec has at least 'task' or 'command'"),
        (b"task: a:B\r\nprocesses: two\r\n", "job.yaml:2:12: processes: expected a whole number, found the text 'two'"),
        (b"\xef\xbb\xbftsk: a:B", "job.yaml:1:1: nothing to run: give 'task' or 'command'\n"
         "job.yaml:1:1: unknown key 'tsk'; did you mean 'task'?"),
        (b"task: a:B\nname: caf\xe9\n", "job.yaml:2:10: byte 0xe9 isn't UTF-8: save the file as UTF-8"),
        ("task: a:B".encode("utf-16"), "job.yaml: the file is in UTF-16: save it as UTF-8"),
        (b"task: a:B\nname: a\x07\n",
         "job.yaml:2:8: the character '\\x07' can't stand in YAML: in double quotes its escape can"),
        (b'task: a:B\nname: "\\ud800"\n', None),
    ],
)  # fmt: skip
def test_bad_bytes(content: bytes, message: str | None) -> None:
    # libyaml refuses half a surrogate pair itself, PyYAML's own scanner leaves it to hvdtrain.
    shown = messages(content)
    assert shown == message if message else shown.startswith("job.yaml:2:")


def test_places_that_hold_no_spec(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    for path, message in {
        "jobs": "jobs: this is a folder: give the job spec's YAML file in it",
        "none.yaml": "none.yaml: can't read the job spec: No such file or directory",
        "a\0b": "a\0b: can't read the job spec: embedded null byte",
    }.items():
        with pytest.raises(InputError) as caught:
            load_spec(Path(path))
        assert str(caught.value) == message


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("task: a:B")
    path.chmod(0)
    with pytest.raises(InputError, match="can't read the job spec: Permission denied"):
        load_spec(path)


@pytest.mark.parametrize("stem", ["-rf", " a", "a\tb", "x" * 201])
def test_a_file_name_that_is_no_job_name(stem: str, tmp_path: Path) -> None:
    path = tmp_path / f"{stem}.yaml"
    path.write_text("task: a:B\nprocesses: 0\n")
    with pytest.raises(InputError) as caught:
        load_spec(path)
    first, second = (problem.message for problem in caught.value.problems)
    assert first.startswith("the file's name can't be the job's name: expected a name ")
    assert first.endswith(": give the spec a 'name'")
    assert second == "processes: expected at least 1, found the number 0"
    assert load_spec(path, ["name=other", "processes=1"]).name == "other"


@pytest.mark.parametrize(
    "line",
    ["python train.py --lr 0.1 -n 2", "./run -x --name=a.b 'two words' it\\'s", "bash -c 'a; b' @x *.py null no - 1e3",
     "ls [a] {b} 'c, d' '#e' f: '' ~/x"],
)  # fmt: skip
def test_the_list_that_is_offered_for_a_shell_line_is_right(line: str, tmp_path: Path) -> None:
    (shown,) = messages(yaml.safe_dump({"command": line})).splitlines()
    _, _, offered = shown.rpartition("; write ")
    (tmp_path / "fixed.yaml").write_text(f"command: {offered}\n")
    assert load_spec(tmp_path / "fixed.yaml").command == tuple(shlex.split(line))


@pytest.mark.parametrize("line", ["", "echo 'x", "echo '\"'", "echo a\\\\b", "cd $DIR"])
def test_no_list_is_offered_for_a_line_that_needs_a_shell_or_escapes(line: str) -> None:
    assert "write" not in messages(f"command: {json.dumps(line)}\n")


def test_a_flood_of_faults_is_cut() -> None:
    shown = messages("".join(f"k{number}: 1\n" for number in range(1000))).splitlines()
    assert shown[0] == "job.yaml: more than 100 faults, here are the first"
    assert len(shown) == 101


def test_long_values_are_cut() -> None:
    (shown,) = messages(f"task: a:B\nprocesses: {'x' * 1000}\n").splitlines()
    assert shown == f"job.yaml:2:12: processes: expected a whole number, found the text '{'x' * 59}…'"


def test_the_command_line_shows_them_all() -> None:
    Path("job.yaml").write_text("taks: a:B\nprocesses: 0\n")
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "job.yaml", "--set", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: --set: expected KEY=VALUE, such as options.lr=0.1, found 'x'",
        "error: job.yaml:1:1: nothing to run: give 'task' or 'command'",
        "error: job.yaml:1:1: unknown key 'taks'; did you mean 'task'?",
        "error: job.yaml:2:12: processes: expected at least 1, found the number 0",
    ]
