"""``hvdtrain horovod``: build Horovod, or check what is installed."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from hvdtrain.cli import options
from hvdtrain.errors import ExitStatus


@click.group()
def command() -> None:
    """Build Horovod against the installed frameworks, or check it."""


@command.command()
@click.option(
    "--with",
    "frameworks",
    metavar="NAMES",
    default="",
    help="torch, tensorflow, or torch,tensorflow. Default: all that are installed.",
)
@click.option("--without-mpi", is_flag=True, help="Leave MPI out, even where it is found.")
@click.option("--sdist", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Horovod's source package.")
@click.option("--rebuild", is_flag=True, help="Build even if the cache has this wheel.")
@click.option("--verbose", is_flag=True, help="Also show what the compiler and pip print.")
def build(frameworks: str, without_mpi: bool, sdist: Path | None, rebuild: bool, verbose: bool) -> int:
    """Build Horovod 0.28.1, install it into this interpreter's environment, and prove it.

    Built with Gloo, with MPI where an MPI is found, and with NCCL where a CUDA build of a framework, CUDA and NCCL
    are found. The wheel is cached under everything that it was compiled against. Exit status: 0 done, 1 the build or
    its proof failed, 3 something is missing.
    """
    from hvdtrain.horovod.build import Request
    from hvdtrain.horovod.build import build as run

    names = tuple(name.strip() for name in frameworks.split(",") if name.strip())
    if unknown := set(names) - {"torch", "tensorflow"}:
        raise click.BadParameter(f"unknown framework '{min(unknown)}'", param_hint="--with")
    options.end_tidily()
    started = time.monotonic()
    horovod = run(Request(names, not without_mpi, sdist, rebuild), _Screen(verbose))
    parts = ", ".join([*horovod.frameworks, *horovod.controllers, *(["nccl"] if horovod.nccl else [])])
    click.echo(f"Horovod {horovod.version} is ready: {parts} ({time.monotonic() - started:.0f} s)", err=True)
    return ExitStatus.DONE


@command.command()
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--run", is_flag=True, help="Also prove each framework and controller by an allreduce of two processes.")
def check(output_format: str, run: bool) -> int:
    """Show what Horovod is built with, what it was built against, and what no longer matches.

    Exit status: 0 if all is well, 1 if something has to be done.
    """
    from hvdtrain.horovod.check import check as look
    from hvdtrain.horovod.installed import installed
    from hvdtrain.horovod.toolchain import inspect_toolchain

    options.end_tidily()
    findings = look(installed(), inspect_toolchain(), run=run)
    failed = any(finding.ok is False for finding in findings)
    if output_format == "json":
        click.echo(
            json.dumps({"python": sys.executable, "ok": not failed, "parts": [asdict(each) for each in findings]})
        )
        return ExitStatus.CHECK_FAILED if failed else ExitStatus.DONE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Horovod in {sys.executable}", title_justify="left", box=None, pad_edge=False)
    for heading in ("part", "built", "now", "", "what to do"):
        table.add_column(heading)
    words = {True: "[green]ok[/]", False: "[red]FAIL[/]", None: "[dim]-[/]"}
    for each in findings:
        table.add_row(each.part, escape(each.built), escape(each.now), words[each.ok], escape(each.advice))
    Console().print(table)
    return ExitStatus.CHECK_FAILED if failed else ExitStatus.DONE


class _Screen:
    """Progress on standard error: one line that counts on a terminal, a line now and then elsewhere."""

    # Elsewhere: after this many percent, or after this time.
    STEP_PERCENT = 10
    STEP_S = 30.0

    def __init__(self, verbose: bool) -> None:
        self._started = self._told = time.monotonic()
        self._verbose = verbose
        self._terminal = sys.stderr.isatty() and not verbose
        self._counting = False
        self._last = 0

    def step(self, text: str) -> None:
        """Something begins, or is done."""
        if self._counting:
            click.echo(err=True)
            self._counting = False
        click.echo(f"{click.style('horovod', bold=True)}: {text}", err=True)

    def percent(self, value: int) -> None:
        """How much is compiled."""
        now = time.monotonic()
        text = f"compiled {value}% after {now - self._started:.0f} s"
        if self._terminal:
            click.echo(f"\r{text}", nl=False, err=True)
            self._counting = True
        elif value >= self._last + self.STEP_PERCENT or now >= self._told + self.STEP_S:
            self._last, self._told = value, now
            self.step(text)

    def output(self, line: str) -> None:
        """A line of the build's own output."""
        if self._verbose:
            click.echo(line, nl=False, err=True)
