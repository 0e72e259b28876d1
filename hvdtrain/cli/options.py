"""Options and arguments that several commands share."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hvdtrain.errors import UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])
_RUNS = Path("runs")


def expanded(_: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A path with ``~`` replaced, as a shell does where it sees one: not in ``--runs=~/x``, nor in a container's file.

    Raises:
        UsageError: the user that it names isn't known.
    """
    try:
        return value and value.expanduser()
    except RuntimeError as error:
        raise UsageError(
            "there is no such user's home", where=f"{parameter.opts[-1]} {value}", fix="write the whole path"
        ) from error


def _existing(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path:
    folder = expanded(context, parameter, value)
    if folder is None:
        return _RUNS
    if not folder.is_dir():
        raise UsageError("this folder of runs doesn't exist", where=str(folder), fix="correct --runs or HVDTRAIN_RUNS")
    return folder


def job(command: _Command) -> _Command:
    """The job spec, and what a command line says over it."""
    return click.argument("job", type=click.Path(path_type=Path))(changes(command))


def changes(command: _Command) -> _Command:
    """What a command line says over a job's spec."""
    decorators = (
        click.option(
            "--set",
            "overrides",
            metavar="KEY=VALUE",
            multiple=True,
            help="Override a key of the spec: --set options.lr=0.1",
        ),
        click.option("--hosts", metavar="LIST", help="Hosts in place of the spec's: a:2,b:2 or node[01-04]:8"),
        click.option(
            "--hostfile",
            type=click.Path(path_type=Path),
            callback=expanded,
            help="Hostfile in place of the spec's hosts.",
        ),
        click.option("-n", "--processes", type=click.IntRange(min=1), help="How many workers; as --set processes=N."),
    )
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def with_processes(overrides: tuple[str, ...], processes: int | None) -> tuple[str, ...]:
    """The overrides with that of ``--processes``."""
    return overrides if processes is None else (*overrides, f"processes={processes}")


def subset(command: _Command) -> _Command:
    """``--include`` and ``--exclude``: some of the hosts."""
    include = click.option("--include", metavar="HOSTS", multiple=True, help="Use only these hosts.")
    exclude = click.option("--exclude", metavar="HOSTS", multiple=True, help="Leave these hosts out.")
    return include(exclude(command))


def new_runs(command: _Command) -> _Command:
    """``--runs`` of a command that makes a run directory."""
    return click.option(
        "--runs",
        type=click.Path(path_type=Path, file_okay=False),
        default=_RUNS,
        envvar="HVDTRAIN_RUNS",
        callback=expanded,
        show_default=True,
        show_envvar=True,
        help="Folder of the run directories.",
    )(command)


def runs(command: _Command) -> _Command:
    """``--runs`` of a command that looks for runs."""
    return click.option(
        "--runs",
        type=click.Path(path_type=Path),
        envvar="HVDTRAIN_RUNS",
        callback=_existing,
        show_default=str(_RUNS),
        show_envvar=True,
        help="Folder of the run directories.",
    )(command)


def run(command: _Command) -> _Command:
    """The run that a command is about, with ``--runs``."""
    argument = click.argument("wanted", metavar="[RUN]", required=False, callback=_expanded_name)
    return argument(runs(command))


def _expanded_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return os.fspath(expanded(context, parameter, Path(value)) or "") if value else None


def output_format(command: _Command) -> _Command:
    """``--format``: for people or for programs."""
    return click.option(
        "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
    )(command)


def detach(command: _Command) -> _Command:
    """``--detach``: let it run without this terminal."""
    return click.option("--detach", is_flag=True, help="Go on in the background, and return when it has begun.")(
        command
    )


def dry_run(command: _Command) -> _Command:
    """``--dry-run``, with ``--format``."""
    show = click.option("--dry-run", is_flag=True, help="Show the plan and the exact command, and start nothing.")
    form = click.option(
        "--format", "output_format", type=click.Choice(["text", "json"]), default="text", help="Format of --dry-run."
    )
    return show(form(command))


def check_dry_run(dry_run: bool, detach: bool, output_format: str) -> None:
    """Raises click.UsageError where options don't go together."""
    if output_format == "json" and not dry_run:
        raise click.UsageError("--format json shows a plan: it goes with --dry-run")
    if detach and dry_run:
        raise click.UsageError("--dry-run starts nothing that could be detached")


def show_detached(run_directory: Path) -> None:
    """Say how to reach a run in the background, from any folder."""
    path = shlex.quote(str(run_directory.absolute()))
    click.echo(f"{run_directory.parent.name}/{run_directory.name} has begun")
    for words in ("logs -f", "status", "stop"):
        click.echo(f"  hvdtrain {words} {path}")


def end_tidily() -> None:
    """Let SIGTERM and a closed terminal unwind, as Ctrl-C does, so that processes and temporary files go too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup's commands go on without their terminal.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
