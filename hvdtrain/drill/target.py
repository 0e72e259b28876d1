"""The processes that a fault can get hold of: those of the launch that the drill started, and no others."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain import contract, heartbeat


class GoneError(Exception):
    """The process isn't there any more, or isn't one of this launch."""


@dataclass(frozen=True)
class Target:
    """A launch, and the rank of it that is to be hit.

    Attributes:
        supervisor: the process of `hvdtrain launch`.
        wrapper_pid: of the rank's wrapper; None before it came.
        step_s: seconds that a step takes; None where unknown.
    """

    supervisor: psutil.Process
    wrapper_pid: int | None
    step_s: float | None = None

    def launcher(self) -> psutil.Process:
        """Horovodrun: the supervisor's first child; later ones are orphans that it adopted.

        Raises:
            GoneError: it has none.
        """
        return _oldest_child(self.supervisor)

    def wrapper(self) -> psutil.Process:
        """The wrapper of the rank.

        Raises:
            GoneError: it has ended, and its number may be another process's by now.
        """
        try:
            wrapper = psutil.Process(self.wrapper_pid)
            if self.wrapper_pid is not None and self.supervisor in wrapper.parents():
                return wrapper
        except psutil.NoSuchProcess:
            pass
        raise GoneError

    def command(self) -> psutil.Process:
        """The rank's command: its wrapper's first child.

        Raises:
            GoneError: it has ended.
        """
        return _oldest_child(self.wrapper())

    def group(self) -> int:
        """The process group of the rank's command and of what it started.

        Raises:
            GoneError: it has ended.
        """
        # The wrapper gives the command a session of its own.
        return self.command().pid

    def heartbeat(self) -> mmap.mmap:
        """The page in which the rank's command says what it is doing.

        Raises:
            GoneError: it has ended.
        """
        try:
            path = self.command().environ()[contract.HEARTBEAT]
            with Path(path).open("rb") as file:
                return mmap.mmap(file.fileno(), heartbeat.PAGE, prot=mmap.PROT_READ)
        except (psutil.NoSuchProcess, FileNotFoundError) as error:
            raise GoneError from error


def _oldest_child(process: psutil.Process) -> psutil.Process:
    try:
        return min(process.children(), key=psutil.Process.create_time)
    except (psutil.NoSuchProcess, ValueError) as error:
        raise GoneError from error
