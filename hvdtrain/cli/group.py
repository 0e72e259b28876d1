"""The click group of all commands, which imports a command's file only when it's called."""

from __future__ import annotations

import importlib
from typing import Any

import click

from hvdtrain import __version__
from hvdtrain.cli.main import COMMANDS, Loading
from hvdtrain.errors import ExitStatus


class LazyCommands(click.Group):
    """A group whose commands live in ``hvdtrain.cli.<name>`` as ``command`` and load when they're called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        with Loading():
            module = importlib.import_module(f"hvdtrain.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ctrl-C ends it silently; click itself would write an empty line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(ExitStatus.INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command list for ``--help``, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hvdtrain")
def cli() -> None:
    """Launch distributed training with Horovod from a YAML job file and a list of hosts."""
