"""``hvdtrain``: runs the command, and turns errors into messages and exit statuses."""

# Only what costs nothing is imported here: Ctrl-C while the rest loads must find `main` to catch it.
from __future__ import annotations

import errno
import os
import sys

_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}
# Command -> one-line help. Kept here so that `hvdtrain --help` imports no command.
COMMANDS = {
    "launch": "Run a training job from its spec.",
    "validate-cluster": "Check that hosts are reachable, alike and fit for training.",
    "ps": "List runs.",
    "status": "Show where a run stands, and each of its ranks.",
    "logs": "Show what a run's ranks have written.",
    "stop": "End a run.",
    "resume": "Go on with a run that has ended.",
    "checkpoint": "List a run's checkpoints, or take the model out of one.",
    "diagnose": "Say why a run or a saved log failed.",
    "drill": "Kill, stop and slow parts of a job, and measure how it copes.",
    "horovod": "Build Horovod against the installed frameworks, or check it.",
    "schema": "Print the JSON Schema or the reference of job specs.",
}


class Loading:
    """Inside, Ctrl-C ends the process at once: Python swallows what is raised at some moments of an import."""

    def __enter__(self) -> None:
        import signal

        self._former = signal.getsignal(signal.SIGINT)
        if self._former is signal.default_int_handler:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))

    def __exit__(self, *_: object) -> None:
        import signal

        signal.signal(signal.SIGINT, self._former)


def main() -> None:
    """Entry point of the console script."""
    try:
        status = _run()
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _run() -> int:
    with Loading():
        import contextlib

        import click

        from hvdtrain.cli.group import cli
        from hvdtrain.errors import ExitStatus, HvdtrainError

    try:
        status = cli.main(standalone_mode=False)
        # What is still to be written fails here, where it can be told, and not at the interpreter's end.
        if sys.stdout is not None:
            sys.stdout.flush()
    except HvdtrainError as error:
        _show(error)
        return error.exit_status
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        return ExitStatus.USAGE
    except click.Abort:
        return ExitStatus.INTERRUPTED
    except OSError as error:
        return _environment_failed(error)
    return int(status or 0)


def _show(error: Exception) -> None:
    """Print an error to standard error, one line per fault."""
    import contextlib

    import click

    from hvdtrain.errors import InputError

    problems = error.problems if isinstance(error, InputError) else [error]
    with contextlib.suppress(OSError):
        for problem in problems:
            click.echo(f"{click.style('error:', fg='red', bold=True)} {problem}", err=True)


def _environment_failed(error: OSError) -> int:
    """Tell of a current directory or an output that can't be used; any other error is a defect and goes on."""
    from hvdtrain.errors import StartError

    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        _show(StartError("the current directory doesn't exist any more", fix="cd to one that does"))
        return StartError.exit_status
    # Errors of named files carry the name; standard output has none.
    if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
        raise error
    # What wasn't written would fail once more at the interpreter's end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return 1
    _show(StartError(f"can't write to standard output: {error.strerror}", fix="choose another place for it"))
    return StartError.exit_status
