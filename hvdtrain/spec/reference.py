"""The reference page of job specs, docs/job-spec.md: its tables come from the model, so they're never out of date."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hvdtrain.spec.fields import RESERVED_VARIABLES
from hvdtrain.spec.models import JobSpec

_INTRODUCTION = """\
# Job spec

A job spec is a YAML file that says what to train, where and how. `hvdtrain launch job.yaml` runs it. Every key has a
default but one: give either `task` or `command`.

This page is made from the model that reads the specs: `hvdtrain schema --format markdown > docs/job-spec.md`.
`hvdtrain schema` prints the same as a JSON Schema, by which editors complete and check specs. With the YAML language
server, keep it next to the spec and make this the spec's first line:

```text
# yaml-language-server: $schema=hvdtrain.schema.json
```

## Examples

A script of your own, on this machine:

```yaml
command: [python, train.py, --lr, 0.10]   # arguments arrive as written: 0.10
processes: 4
oversubscribe: true                        # also where there are fewer cores than that
```

A built-in task, whose size comes from the environment where it is set:

```yaml
name: digits
task: hvdtrain.tasks.digits_torch:Digits
options:
  epochs: ${EPOCHS:-10}
  batch_size: 32
  lr: 5e-2
processes: ${NP:-2}
checkpoint: {every_steps: 50, keep: 2}
restarts: {max: 5, backoff_s: 10}
hang_timeout_s: 120
```

A job that goes on when a worker is lost, and takes up to eight where the hostfile, which may be edited while it runs,
has slots for them:

```yaml
task: hvdtrain.tasks.digits_torch:Digits
hosts: {file: ../hostfiles/localhost}
elastic: {min: 2, max: 8, batch: keep_global}
```

Several hosts, with variables for the workers and a token that is shown nowhere:

```yaml
command: [python, -m, my_project.train]
directory: ../code
hosts:
  list: ["node[01-04]:8", "user@gpu7 slots=4"]
  exclude: [node03]
controller: gloo
env:
  set: {OMP_NUM_THREADS: 4, TZ: UTC}
  forward: [HF_*]
  secrets: [WANDB_API_KEY]
```

A model that two processes share, on two copies:

```yaml
task: my_project.tasks:LanguageModel
processes: 4
hosts: {list: ['node[1-2]:2']}     # each copy on one host
parallelism: {tensor: 2, data: 2}
```

A hostfile, and Horovod's own settings:

```yaml
task: my_project.tasks:Classifier
hosts: {file: ../hostfiles/cluster}
horovod:
  fusion_threshold_mb: 64
  cycle_time_ms: 2.5
  compression: fp16
```

## Keys
"""

_RULES = """\
## How values are read

- YAML 1.2: only `true` and `false` are booleans, `1e-3` is a number, and `010` is ten. Where a key takes text, a value
  without quotes stays as it is written: `no`, `007`, `1.10`, `22:22` and `2024-01-31` are text.
- A key that is unknown or given twice, a value of another type or out of range, and keys that contradict each other are
  errors. All of them are shown at once, each with file, line and column, and exit status 2.
- A section that is left empty has its defaults. Anchors and merge keys (`<<: *name`) work; tags (`!name`) are refused.
- A spec is one document in UTF-8 of at most 1 MiB, 50,000 values and 50 levels.

## Variables

`${NAME}` in a value stands for the environment variable of the launcher. An unset one is an error; `${NAME:-default}`
gives the default in place of an unset or an empty one. `$${` gives the characters `${`, and `$NAME` without braces
stays as it is.

They're filled in after YAML was read, so their values can't add keys or items. Where a number or a boolean is expected,
`processes: ${NP}` is one. In `options`, quotes decide: `lr: ${LR}` can become a number, `lr: "${LR}"` is text. Inside
`[ ]` and `{ }` YAML needs the quotes. Error messages never show a variable's value. The resolved spec in the run
directory does, so pass secrets through `env.secrets`.

## Overrides

`hvdtrain launch job.yaml --set options.lr=1e-3 --set 'hosts.list=[a:2, b:2]' --set env.set.TAG=` sets single values
over the file, the last one for a key wins. A value in `[ ]`, `{ }` or quotes is read as YAML, any other as one YAML
value; `key=` sets empty text, and `key=null` takes a value back where the table says that null is possible. A list is
set as a whole.

## Paths

Relative paths count from the spec's folder, in `--set` from the current folder, and `~` is your home.

## What can't go together

- `task` and `command`; `hosts.file` and `hosts.list`.
- `options`, `checkpoint`, `horovod.compression` and what `parallelism` says beside the degrees are a task's: with
  `command` they're errors.
- A variable stands in one of `env.set`, `env.forward` and `env.secrets`. Those that Horovod or the launcher sets for
  each worker can't be given: {reserved}.
- `elastic` and `controller: mpi`; `processes`, with which an elastic job starts, lies between its `min` and `max`.
- `elastic` and a `parallelism` that gives each process a part of the model or of the optimizer's state: a lost process
  would take it along. Restarts from checkpoints work with every grid.
- `parallelism.shard_optimizer` and `horovod.compression` other than `none` and `auto`.
- A key of `horovod` and the variable of the same meaning in `env.set`, such as `HOROVOD_CYCLE_TIME`.
- `horovod.autotune` and both of the values that it searches; `horovod.hierarchical_allreduce: true` and Gloo, which an
  elastic job needs.
- `name` becomes a folder's: no `/`, no control characters, no `-` at its begin, not `.` or `..`.
"""


def reference() -> str:
    """The reference page, in Markdown."""
    schema = JobSpec.model_json_schema()
    sections = {
        key: schema["$defs"][value["$ref"].rpartition("/")[2]]
        for key, value in schema["properties"].items()
        if "$ref" in value
    }
    top = {key: value for key, value in schema["properties"].items() if key not in sections}
    parts = [_INTRODUCTION, _table(top, "")]
    for key, section in sections.items():
        parts.append(f"### {key}\n\n{section['description']}\n\n{_table(section['properties'], f'{key}.')}")
    reserved = ", ".join(f"`{name}`" for name in RESERVED_VARIABLES)
    return "\n".join([*parts, _RULES.replace("{reserved}", reserved)])


def _table(properties: dict[str, Any], prefix: str) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|", *_rows(properties, prefix)]
    return "\n".join(rows) + "\n"


def _rows(properties: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, schema in properties.items():
        meaning = schema["description"]
        yield f"| `{prefix}{key}` | {_values(schema)} | {_default(schema['default'])} | {meaning} |"


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (list, dict)):
        return "empty"
    return "see meaning" if value == "" else f"`{str(value).lower()}`"


def _values(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return "; ".join(_values(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{choice}`" for choice in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_values(schema['items'])}"
    if schema["type"] == "object":
        items = schema.get("additionalProperties", True)
        return "mapping" if items is True else f"mapping to {_values(items)}"
    if schema.get("format") == "path":
        return "path"
    names = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true` or `false`"}
    return f"{names.get(schema['type'], schema['type'])}{_range(schema)}"


def _range(schema: dict[str, Any]) -> str:
    limits = (("minimum", "at least"), ("exclusiveMinimum", "more than"), ("maximum", "at most"))
    return "".join(f", {words} {schema[name]:g}" for name, words in limits if name in schema)
