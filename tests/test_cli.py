"""The command line as a whole: what it imports, how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import __version__
from hvdtrain.cli.main import COMMANDS

FRAMEWORKS = ("torch", "tensorflow", "keras", "horovod", "numpy")
# Runs hvdtrain and says at its end which of the frameworks were imported.
SPY = f"""
import atexit, sys
atexit.register(lambda: print("imported:", [name for name in {FRAMEWORKS!r} if name in sys.modules], file=sys.stderr))
from hvdtrain.cli.main import main
main()
"""


def hvdtrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hvdtrain", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_no_framework(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SPY, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "imported: []\n"


def test_the_list_of_commands_is_true() -> None:
    shown = hvdtrain("--help").stdout
    for name, summary in COMMANDS.items():
        assert f"{name} " in shown
        assert summary[:30] in shown
        assert hvdtrain(name, "--help").stdout.startswith(f"Usage: python -m hvdtrain {name}")


def test_version() -> None:
    assert hvdtrain("--version").stdout == f"hvdtrain, version {__version__}\n"


@pytest.mark.parametrize("arguments", [["lunch"], ["launch"], ["launch", "--no-such-option"], ["--no-such-option"]])
def test_bad_usage(arguments: list[str]) -> None:
    done = hvdtrain(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Usage: " in done.stderr
    assert "Traceback" not in done.stderr


def test_json_needs_a_dry_run() -> None:
    done = hvdtrain("launch", "job.yaml", "--format", "json")
    assert done.returncode == 2
    assert "--format json shows a plan: it goes with --dry-run" in done.stderr


def test_a_reader_that_leaves_is_not_told_of_in_a_traceback() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m hvdtrain schema | true; true"],
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


def test_diagnose_of_a_saved_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[1]<stderr>:Traceback (most recent call last):\n[1]<stderr>:ModuleNotFoundError: No module named 'x'\n"
    )
    done = subprocess.run([sys.executable, "-m", "hvdtrain", "diagnose", str(log)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cause: the Python that rank 1 runs has no module 'x'" in done.stdout
    missing = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "diagnose", "no-such-run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert missing.returncode == 2
    assert "there is no run 'no-such-run'" in missing.stderr
