"""``hvdtrain``: finds the command, imports only its file, and turns errors into messages and exit statuses."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from hvdtrain import __version__
from hvdtrain.errors import ExitStatus, HvdtrainError, InputError

# Command -> one-line help. Kept here so that `hvdtrain --help` imports no command.
COMMANDS = {
    "launch": "Run a training job from its spec.",
    "horovod": "Build Horovod against the installed frameworks, or check it.",
    "schema": "Print the JSON Schema or the reference of job specs.",
}


class LazyCommands(click.Group):
    """A group whose commands live in ``hvdtrain.cli.<name>`` as ``command`` and load when they're called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hvdtrain.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command list for ``--help``, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hvdtrain")
def cli() -> None:
    """Launch distributed training with Horovod from a YAML job file and a list of hosts."""


def show_error(error: HvdtrainError) -> None:
    """Print an error to standard error, one line per fault."""
    if isinstance(error, InputError):
        for problem in error.problems:
            click.echo(f"{click.style('error:', fg='red', bold=True)} {problem}", err=True)
    else:
        click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True)


def main() -> None:
    """Entry point of the console script."""
    try:
        status: Any = cli.main(standalone_mode=False)
    except HvdtrainError as error:
        show_error(error)
        status = error.exit_status
    except click.ClickException as error:
        error.show()
        status = ExitStatus.USAGE
    except (click.Abort, KeyboardInterrupt):
        status = ExitStatus.INTERRUPTED
    sys.exit(int(status or 0))
