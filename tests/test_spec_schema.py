"""What is said about job specs: the JSON Schema for editors, the reference page, `hvdtrain schema`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.spec.loader import load_spec
from hvdtrain.spec.messages import dotted, key_paths
from hvdtrain.spec.reference import reference
from hvdtrain.spec.schema import json_schema

PAGE = Path(__file__).parents[1] / "docs" / "job-spec.md"
EXAMPLES = re.findall(r"```yaml\n(.*?)```", reference(), flags=re.DOTALL)
SECTIONS = {"hosts", "ssh", "network", "env", "checkpoint", "elastic", "restarts", "parallelism", "horovod"}


def test_the_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run: hvdtrain schema --format markdown > docs/job-spec.md"


def test_the_reference_page_has_every_key() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \|", reference(), flags=re.MULTILINE)
    assert rows == [dotted(path) for path in sorted(key_paths(), key=len) if dotted(path) not in SECTIONS]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_load(example: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(example)
    spec = load_spec(path, (), {})
    assert spec.task or spec.command


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


def hvdtrain_schema(*arguments: str) -> str:
    command = [sys.executable, "-m", "hvdtrain", "schema", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_command_prints_both() -> None:
    assert json.loads(hvdtrain_schema()) == json_schema()
    assert hvdtrain_schema("--format", "markdown") == reference()


def test_every_key_is_described() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        for key, value in section["properties"].items():
            assert value["description"], key
            assert "default" in value, key


GOOD = [
    *EXAMPLES,
    "task: a:B",
    "task: ${TASK}\nprocesses: ${NP}\noversubscribe: ${O}\ncontroller: ${C}",
    "command: [python, 0.1, true]\ntask: null",
    "command: [ls]\nenv: {set: {A: 1, B: true}}\nhosts:\noptions:",
    "task: a:B\nprocesses: null\ncheckpoint: {every_steps: null}\nname: 007",
]
BAD = [
    "{}",
    "task: null",
    "task: a:B\ncommand: [ls]",
    "task: a.B",
    "task: a:B\nproceses: 2",
    "task: a:B\nprocesses: 0",
    "task: a:B\nprocesses: two",
    "task: a:B\ncommand: ls",
    "task: a:B\ncontroller: mpl",
    "task: a:B\ncheckpoint: {keep: 0}",
    "task: a:B\nhorovod: {cycle_time_ms: 0}",
    "task: a:B\nenv: {set: [A]}",
    "task: a:B\nhosts: {lists: []}",
]


def faults(spec: str) -> list[Any]:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks the JSON Schema")
    validator = jsonschema.Draft202012Validator
    validator.check_schema(json_schema())
    return list(validator(json_schema()).iter_errors(yaml.safe_load(spec)))


@pytest.mark.parametrize("spec", GOOD)
def test_editors_accept_good_specs(spec: str) -> None:
    assert faults(spec) == []


@pytest.mark.parametrize("spec", BAD)
def test_editors_refuse_bad_specs(spec: str) -> None:
    assert faults(spec)
