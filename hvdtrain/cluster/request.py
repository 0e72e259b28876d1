"""What is asked of the hosts of a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.cluster.models import Request
from hvdtrain.errors import UsageError
from hvdtrain.remote.ssh import SshSettings

if TYPE_CHECKING:
    from hvdtrain.spec.models import JobSpec


def make_request(
    spec: JobSpec | None,
    *,
    python: str | None = None,
    directory: str | None = None,
    paths: tuple[str, ...] = (),
    timeout_s: float = 30.0,
) -> Request:
    """What the spec says, if there is one, and over it the other arguments.

    Raises:
        UsageError: a path isn't absolute.
    """
    for name, value in (("--python", python), ("--directory", directory), *(("--path", path) for path in paths)):
        if value and not value.startswith("/"):
            raise UsageError("expected an absolute path, since it is one on the hosts", where=f"{name} {value}")
    if spec is None:
        return Request(SshSettings(), python or sys.executable, directory, paths, timeout_s=timeout_s)
    from hvdtrain.plan.plan import ssh_settings

    directory = directory or str(spec.directory)
    files = tuple(str(Path(directory, word)) for word in (spec.command or ())[1:] if word.endswith(".py"))
    python = python or spec.python or sys.executable
    return Request(
        ssh=ssh_settings(spec),
        python=python,
        directory=directory,
        paths=paths,
        files=files,
        interfaces=tuple(spec.network.interfaces),
        fabric=spec.network.fabric,
        hcas=tuple(spec.network.hcas),
        controller=spec.controller,
        timeout_s=timeout_s,
    )
