"""``hvdtrain schema``: what can stand in a job spec."""

from __future__ import annotations

import json

import click


@click.command()
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["json", "markdown"]),
    default="json",
    show_default=True,
    help="JSON Schema for editors, or the reference page.",
)
def command(output_format: str) -> None:
    """Print the JSON Schema or the reference of job specs."""
    if output_format == "json":
        from hvdtrain.spec.schema import json_schema

        click.echo(json.dumps(json_schema(), indent=2))
    else:
        from hvdtrain.spec.reference import reference

        click.echo(reference(), nl=False)
