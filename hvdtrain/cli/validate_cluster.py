"""``hvdtrain validate-cluster``: find what would keep a job from running well, before it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain.cli import options
from hvdtrain.errors import ExitStatus, UsageError

if TYPE_CHECKING:
    from hvdtrain.cluster.models import Level
    from hvdtrain.cluster.progress import Progress


@click.command()
@click.argument("job", type=click.Path(path_type=Path), required=False)
@click.option("--hosts", metavar="LIST", help="Hosts: a,b or node[01-64]")
@click.option("--hostfile", type=click.Path(path_type=Path), callback=options.expanded, help="Hostfile.")
@options.subset
@click.option("--level", type=click.Choice(["quick", "standard", "full"]), default="quick", show_default=True)
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    callback=options.expanded,
    help="Expectations that the hosts must meet, such as configs/cluster/small.yaml.",
)
@click.option(
    "--write-profile",
    "new_profile",
    type=click.Path(path_type=Path),
    callback=options.expanded,
    help="Write what the hosts have as a profile, if nothing failed.",
)
@click.option("--python", metavar="PATH", help="Python on the hosts. Default: the job's, or this one.")
@click.option("--directory", metavar="PATH", help="Working directory that must be there. Default: the job's.")
@click.option("--path", "paths", metavar="PATH", multiple=True, help="A data path that must be there.")
@click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(1, 3600), default=30.0, show_default=True
)
@click.option("--output", type=click.Path(path_type=Path), callback=options.expanded, help="Keep the report here.")
@click.option("--compare", "former", type=click.Path(path_type=Path), help="Show what changed since a kept report.")
@options.output_format
def command(
    job: Path | None,
    hosts: str | None,
    hostfile: Path | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    level: Level,
    profile_file: Path | None,
    new_profile: Path | None,
    python: str | None,
    directory: str | None,
    paths: tuple[str, ...],
    timeout_s: float,
    output: Path | None,
    former: Path | None,
    output_format: str,
) -> int:
    """Check that hosts are reachable, alike and fit for training.

    The hosts are those of --hosts or --hostfile, or of JOB, a job spec. Exit status: 0 nothing failed, 1 a check
    failed, 2 wrong usage.
    """
    from hvdtrain.cluster.kept import compare, keep, read_report
    from hvdtrain.cluster.levels import validate
    from hvdtrain.cluster.request import make_request
    from hvdtrain.hosts.resolve import default_slots, resolve_hosts

    options.end_tidily()
    if job is None and hosts is None and hostfile is None:
        raise UsageError("no hosts are given", fix="give --hosts, --hostfile or a job spec")
    _check_files(profile_file, output, new_profile)
    before = read_report(former) if former else None
    profile = None
    if profile_file:
        from hvdtrain.cluster.profiles.loader import load_profile

        profile = load_profile(profile_file)
    spec = None
    if job:
        from hvdtrain.spec.loader import load_spec

        spec = load_spec(job)
    where = resolve_hosts(
        spec.hosts if spec else None,
        hosts_option=hosts,
        hostfile_option=hostfile,
        include=include,
        exclude=exclude,
        default_slots=default_slots(),
    )
    request = make_request(spec, python=python, directory=directory, paths=paths, timeout_s=timeout_s)
    looked = validate(level, where, request, _progress(), profile)
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    report = looked.report
    if output:
        keep(report, output)
    changes = compare(before, report) if before else ()
    if output_format == "json":
        from dataclasses import asdict

        told = {"changes": [asdict(change) for change in changes]} if before else {}
        click.echo(json.dumps(report.to_json() | told, indent=2))
    else:
        from hvdtrain.cli.tables import show
        from hvdtrain.cluster.render import render, render_changes

        show(*render(report), *(render_changes(changes, str(former)) if before else ()))
    if new_profile and report.failed:
        click.echo(
            "no profile is written, since checks failed: it tells what a good cluster has. Mend what failed, or leave "
            "these hosts out with --exclude",
            err=True,
        )
    elif new_profile:
        from hvdtrain.cluster.profiles.written import write_profile

        write_profile(looked, new_profile)
    return ExitStatus.CHECK_FAILED if report.failed else ExitStatus.DONE


def _check_files(profile: Path | None, output: Path | None, new_profile: Path | None) -> None:
    """Find what can't be written before all the work, and what would be lost by it.

    Raises:
        UsageError: a file stands for two things, or is none that can be replaced.
    """
    written = {"--output": output, "--write-profile": new_profile}
    if output and new_profile and output.resolve() == new_profile.resolve():
        raise UsageError("--output and --write-profile name the same file", where=str(output), fix="give two files")
    if profile and new_profile and profile.resolve() == new_profile.resolve():
        raise UsageError("--write-profile would replace the --profile", where=str(profile), fix="write another file")
    for option, path in written.items():
        if path and (not path.name or (path.exists() and not path.is_file()) or not path.parent.is_dir()):
            raise UsageError("this can't be a file to write", where=f"{option} {path}", fix="name a file in a folder")


def _progress() -> Progress:
    """Sentences as lines; what is replaced in place, at a terminal only."""
    from hvdtrain.cluster.progress import Progress

    terminal = sys.stderr.isatty()

    def tell(text: str) -> None:
        click.echo(("\r\033[K" if terminal else "") + f"measuring {text}", err=True)

    def tick(text: str) -> None:
        if terminal:
            click.echo(f"\r\033[K{text}", nl=False, err=True)

    return Progress(tell, tick)
