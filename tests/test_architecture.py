"""The rules of docs/architecture.md that a reader can't see by looking at one file."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hvdtrain"
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod"}
MAY_IMPORT_FRAMEWORKS = (
    "train/torch/", "train/keras/", "train/membership.py", "tasks/", "keras/",
    "parallel/groups.py", "parallel/torch/", "parallel/keras/",
)  # fmt: skip

# Part -> the parts that it may import. `errors` and `contract` are open to all, as is `hvdtrain` itself (its version).
ALLOWED = {
    "cli": {"cli", "cluster", "drill", "diagnosis", "supervise", "train", "horovod", "plan", "fabric", "hosts", "spec"},
    "cluster": {"cluster", "supervise", "horovod", "plan", "fabric", "remote", "hosts", "spec"},
    "drill": {"drill", "supervise", "plan", "hosts", "spec"},
    "supervise": {"supervise", "diagnosis", "horovod", "plan", "fabric", "remote", "hosts", "spec"},
    "diagnosis": {"diagnosis"},
    "horovod": {"horovod", "fabric"},
    "plan": {"plan", "parallel", "fabric", "remote", "hosts", "spec"},
    "fabric": {"fabric", "remote", "hosts", "spec"},
    "remote": {"remote", "hosts", "spec"},
    "probe": {"probe"},
    "hosts": {"hosts", "spec"},
    "spec": {"spec"},
    "worker": {"worker"},
    "parallel": {"parallel"},
    "train": {"train", "keras", "parallel"},
    "tasks": {"tasks", "train", "keras", "parallel"},
    "keras": {"keras", "parallel"},
    "errors": set(),
    "contract": set(),
    "frames": set(),
    "heartbeat": set(),
    "processes": set(),
    "__init__": set(),
    "__main__": {"cli"},
}
OPEN_TO_ALL = {"errors", "contract", "frames", "heartbeat", "processes", "__init__"}
# They must load on a host, and in a worker, before anything else is known to work there.
STANDARD_LIBRARY_ONLY = {"worker", "probe", "errors", "contract", "frames", "heartbeat", "processes"}


def modules() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def imported(source: str) -> set[str]:
    """Absolute names of everything a module imports, also inside functions; `TYPE_CHECKING` imports count too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(module: str) -> str:
    return module.split("/")[0].removesuffix(".py")


def violations(module: str, source: str) -> list[str]:
    part = part_of(module)
    found = []
    for name in sorted(imported(source)):
        top, *rest = name.split(".")
        if top == "hvdtrain":
            target = rest[0] if rest and (rest[0] in ALLOWED) else "__init__"
            if target not in ALLOWED[part] | OPEN_TO_ALL:
                found.append(f"{module} imports {name}: {part} may not import {target}")
        elif top in FRAMEWORKS and not module.startswith(MAY_IMPORT_FRAMEWORKS):
            found.append(f"{module} imports {top}")
        elif part in STANDARD_LIBRARY_ONLY and top not in {*sys.stdlib_module_names, "sitecustomize"}:
            found.append(f"{module} imports {top}: {part} uses the standard library only")
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module: str) -> None:
    assert violations(module, (PACKAGE / module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan/plan.py", "from hvdtrain.supervise import run"),
        ("plan/plan.py", "def f():\n    from hvdtrain.cli import launch"),
        ("spec/models.py", "import hvdtrain.hosts.hostfile"),
        ("horovod/check.py", "import torch"),
        ("cli/launch.py", "def f():\n    import horovod.torch as hvd"),
        ("worker/__main__.py", "import psutil"),
        ("train/loop.py", "import torch"),
        ("train/torch/backend.py", "from hvdtrain.spec.models import JobSpec"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    assert violations(module, source)


def test_every_part_has_a_rule() -> None:
    assert {part_of(module) for module in modules()} <= set(ALLOWED)


@pytest.mark.parametrize("module", modules())
def test_modules_stay_short(module: str) -> None:
    """Under about 400 lines: a longer one has two subjects."""
    assert len((PACKAGE / module).read_text().splitlines()) <= 450
