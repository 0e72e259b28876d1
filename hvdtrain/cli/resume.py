"""``hvdtrain resume``: go on with a run that has ended."""

from __future__ import annotations

from pathlib import Path

import click

from hvdtrain.cli import options


@click.command()
@options.run
@options.detach
def command(wanted: str | None, runs: Path, detach: bool) -> int:
    """Go on with RUN, which was stopped, failed or is lost, from its newest whole checkpoint.

    It runs by its first plan, in the same run directory, as another attempt. RUN is a job's name (its newest run),
    NAME/ID, the beginning of an ID, or a run directory. Default: the newest run.

    Exit status: as of 'hvdtrain launch'; 2 also if the run still lives, or has finished.
    """
    from hvdtrain.supervise.detach import detached
    from hvdtrain.supervise.launch import resume
    from hvdtrain.supervise.runs import find, require_resumable, taken

    run = find(wanted, runs)
    require_resumable(run)
    with taken(run) as held:
        # Somebody else may have been faster.
        require_resumable(run)
        if not detach:
            return resume(run.path)
        status = detached(run.path, lambda: resume(run.path), keep=(held,))
    if status == 0:
        options.show_detached(run.path)
    return status
