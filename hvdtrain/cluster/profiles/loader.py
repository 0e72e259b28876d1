"""From a file to a `Profile`, or to every fault at once."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.cluster.profiles.models import Profile
from hvdtrain.errors import Problem
from hvdtrain.spec.loader import read_model, refuse
from hvdtrain.spec.yaml_reader import FileKind, read_document

_PROFILE = FileKind("cluster profile", "one expectation", "hosts: 8 to 64")


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        InputError: all faults of the file.
    """
    problems: list[Problem] = []
    document = read_document(path, problems, _PROFILE)
    profile = read_model(Profile, document, (), problems)
    refuse(problems, path)
    if not profile.model_fields_set - {"name", "description"}:
        refuse([Problem(str(path), 0, 0, "it expects nothing: give it a key such as 'hosts' or 'gpu'")], path)
    return profile if profile.name else profile.model_copy(update={"name": path.stem})
