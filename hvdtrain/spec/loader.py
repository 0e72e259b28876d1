"""From a file, ``--set`` and variables to a `JobSpec`, or to every fault at once; and back to YAML."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from hvdtrain.errors import InputError, Problem
from hvdtrain.spec.checks import contradictions
from hvdtrain.spec.fields import UnfitError, check_name
from hvdtrain.spec.messages import dotted, faulty_paths, problems_of
from hvdtrain.spec.models import JobSpec, Section
from hvdtrain.spec.overrides import SOURCE, apply_override
from hvdtrain.spec.scalars import Kind, Scalar, core_kind
from hvdtrain.spec.substitution import substitute
from hvdtrain.spec.yaml_reader import Data, Document, KeyPath, read_document

MAX_PROBLEMS = 100
Model = TypeVar("Model", bound=Section)


def load_spec(path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> JobSpec:
    """Read a job spec.

    Args:
        path: the YAML file. Relative paths in it count from its folder.
        overrides: ``key=value`` each, over the file; relative paths in them count from the current folder, as all
            paths on a command line do.
        environ: variables for ``${NAME}``.

    Returns:
        The spec, with its name, and with absolute paths.

    Raises:
        InputError: all faults of the file and the overrides.
    """
    problems: list[Problem] = []
    document = read_document(path, problems)
    for override in overrides:
        try:
            apply_override(document, override)
        except InputError as error:
            problems += error.problems
    unfilled = substitute(document, environ)
    for faulty, messages in unfilled.items():
        problems += [document.problem(faulty, f"{dotted(faulty)}: {message}") for message in messages]
    spec = _validate(document, unfilled, problems)
    spec = _complete(spec, path, document, problems)
    refuse(problems, path)
    return spec


def refuse(problems: list[Problem], path: Path) -> None:
    """End with the faults of a file, or the first of them, if there are any.

    Raises:
        InputError: there are.
    """
    if problems:
        raise InputError(_first(problems, str(path)))


def resolved_yaml(spec: JobSpec) -> str:
    """The spec as YAML, with all defaults that apply to it, for `load_spec` to read again."""
    data = spec.model_dump(by_alias=True)
    left_out = ("command",) if spec.command is None else ("task", "options", "checkpoint")
    data = {key: value for key, value in data.items() if key not in left_out}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def read_model(model: type[Model], document: Document, known: Container[KeyPath], problems: list[Problem]) -> Model:
    """A model of a document, without its faulty values, whose faults are added to ``problems``.

    Args:
        model: what to read; everything in it has a default.
        document: what was read.
        known: paths of values whose faults are told already.
        problems: to be added to.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        problems += islice(problems_of(error, document, known, model), MAX_PROBLEMS + 1)
        return model.model_validate(_without(document.data, faulty_paths(error, document)))


def _validate(document: Document, unfilled: Container[KeyPath], problems: list[Problem]) -> JobSpec:
    """The spec without its faulty values, so that contradictions among the others are found at the same time."""
    spec = read_model(JobSpec, document, unfilled, problems)

    def given(path: KeyPath) -> bool:
        value = document.get(path)
        return value is not None and not (isinstance(value, Scalar) and value.kind is Kind.NULL)

    problems += [document.problem(place, message, at_key=True) for place, message in contradictions(spec, given)]
    return spec


def _without(data: Data, paths: Iterable[KeyPath]) -> Data:
    """The data less the values at the paths; a list with a faulty item goes as a whole."""
    data = _copy_mappings(data)
    for path in paths:
        node = data
        for depth, step in enumerate(path, start=1):
            inner = node.get(step)
            if depth == len(path) or not isinstance(inner, dict):
                node.pop(step, None)
                break
            node = inner
    return data


def _copy_mappings(data: Data) -> Data:
    return {key: _copy_mappings(value) for key, value in data.items()} if isinstance(data, dict) else data


def _complete(spec: JobSpec, path: Path, document: Document, problems: list[Problem]) -> JobSpec:
    """The spec with its name and with absolute paths."""
    folder = path.absolute().parent

    def absolute(relative: Path, key: KeyPath) -> Path:
        base = Path.cwd() if document.place(key).source == SOURCE else folder
        try:
            return base / relative.expanduser()
        except RuntimeError:  # no such user
            problems.append(document.problem(key, f"{dotted(key)}: no home folder is known for '~' in it"))
            return relative

    name = spec.name
    if document.get(("name",)) is None:
        try:
            name = check_name(path.stem)
        except UnfitError as error:
            message = f"the file's name can't be the job's name: {error}: give the spec a 'name'"
            problems.append(Problem(str(path), 0, 0, message))
    hosts = spec.hosts
    if hosts.file:
        hosts = hosts.model_copy(update={"file": absolute(hosts.file, ("hosts", "file"))})
    paths = {key: path for key in ("identity_file", "config") if (path := getattr(spec.ssh, key))}
    ssh = spec.ssh.model_copy(update={key: absolute(path, ("ssh", key)) for key, path in paths.items()})
    horovod = spec.horovod
    if horovod.tuned:
        horovod = horovod.model_copy(update={"tuned": absolute(horovod.tuned, ("horovod", "tuned"))})
    directory = absolute(spec.directory or Path(), ("directory",))
    update = {"name": name, "hosts": hosts, "directory": directory, "ssh": ssh, "horovod": horovod}
    return spec.model_copy(update=update)


def _first(problems: list[Problem], source: str) -> list[Problem]:
    problems = sorted(set(problems))
    if len(problems) <= MAX_PROBLEMS:
        return problems
    return [Problem(source, 0, 0, f"more than {MAX_PROBLEMS} faults, here are the first"), *problems[:MAX_PROBLEMS]]


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something else than text, and keeps ``${`` literal."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if kind is yaml.ScalarNode and implicit[0] and core_kind(value) is not Kind.TEXT and tag == _TEXT:
            return None
        return tag

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        # Only in double quotes does PyYAML escape the rarer line breaks, which it reads as plain ones.
        style = '"' if set(text) & set("\x85\u2028\u2029") else None
        return self.represent_scalar(_TEXT, text.replace("${", "$${"), style=style)


_TEXT = "tag:yaml.org,2002:str"
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_text(str(path)))
