"""A whole drill: for each fault a launch of its own, so that none spoils the next."""

from __future__ import annotations

import dataclasses
import select
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain import processes
from hvdtrain.drill.exercise import Exercise, Times
from hvdtrain.drill.faults import FAULTS, Fault, Recovery
from hvdtrain.drill.hand import Hand, held
from hvdtrain.drill.job import GONE_S, DrilledJob
from hvdtrain.drill.judge import judge
from hvdtrain.drill.models import SKIPPED, Limits, Report, Result, Subject
from hvdtrain.drill.on_host import RefusedError
from hvdtrain.errors import StartError
from hvdtrain.spec.models import JobSpec
from hvdtrain.supervise.preflight import check_before_start

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StoppedError(Exception):
    """A signal wants the drill's end."""

    def __init__(self, number: int) -> None:
        self.number = number


class Drill:
    """What all faults of a drill have in common.

    Args:
        subject: the job.
        arguments: of `hvdtrain launch` for it, without ``--runs``.
        folder: a new one, for the launches' output and run directories.
        limits: the user's.
        times: how long a fault may take.
        say: told what happens while it does.
    """

    def __init__(
        self,
        subject: Subject,
        arguments: Sequence[str],
        folder: Path,
        *,
        limits: Limits,
        times: Times,
        say: Callable[[str], None],
    ) -> None:
        self._subject = subject
        self._arguments = tuple(arguments)
        self._folder = folder
        self._limits = limits
        self._times = times
        self._say = say

    def run(self, spec: JobSpec, faults: Sequence[str]) -> Report:
        """Do these faults, one after the other.

        Raises:
            StartError: something that the job needs isn't there; nothing was started.
        """
        check_before_start(spec, self._subject.plan)
        self._make_folder()
        self._say("kills, stops and slows only the processes of launches that it starts itself")
        self._say(f"their output and run directories: {self._folder}")
        results: list[Result] = []
        error, number = None, None
        with processes.signals_as_events(_SIGNALS) as signals:
            processes.adopt_orphans()
            try:
                for name in faults:
                    results.append(self._fault(name, signals))
                    self._say_verdict(results[-1])
            except StartError as caught:
                error = caught
            except _StoppedError as stopped:
                number = stopped.number
        return Report(self._subject.plan.name, str(self._folder), tuple(results), error, number)

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise StartError(
                f"can't make the drill's folder: {error.strerror}",
                where=str(error.filename),
                fix="choose another place with --runs DIRECTORY",
            ) from error

    def _fault(self, name: str, signals: socket.socket) -> Result:
        def pause(seconds: float) -> None:
            if select.select([signals], [], [], seconds)[0]:
                raise _StoppedError(signals.recv(1)[0])

        reason = FAULTS[name].not_here(self._subject)
        if reason is None and FAULTS[name].recovery is Recovery.SPEED:
            reason = self._why_no_slow_link(pause)
        return Result(name, SKIPPED, (reason,)) if reason else self._exercise(FAULTS[name], pause)

    def _why_no_slow_link(self, pause: Callable[[float], None]) -> str | None:
        """Ask the host before the job is launched for nothing."""
        subject = self._subject
        try:
            with held(Hand(subject.plan, subject.host, {"action": "may-slow-link"}, pause), self._say):
                return None
        except RefusedError as error:
            return f"not on {subject.host}: {error}"

    def _exercise(self, fault: Fault, pause: Callable[[float], None]) -> Result:
        def say(text: str) -> None:
            self._say(f"{fault.name}: {text}")

        subject = self._subject
        settings = fault.settings(subject)
        say("launching the job" + "".join(f", with {setting}" for setting in settings))
        arguments = [*self._arguments, *(part for setting in settings for part in ("--set", setting))]
        job = DrilledJob(arguments, subject.plan.name, self._folder / fault.name, pause)
        try:
            seen = Exercise(fault, subject, job, self._times, say=say, pause=pause).run()
            seen = dataclasses.replace(seen, left=(*job.end(), *self._left_on_host(job, pause)))
        except RefusedError as error:
            job.end()
            return Result(fault.name, SKIPPED, (str(error),), run_directory=str(job.run_directory))
        except StartError:
            for line in job.last_words():
                say(f"  {line}")
            raise
        finally:
            job.kill()
        result = judge(fault, seen, self._limits)
        directory = str(job.run_directory) if job.run_directory else None
        return dataclasses.replace(result, settings=settings, run_directory=directory)

    def _left_on_host(self, job: DrilledJob, pause: Callable[[float], None]) -> list[str]:
        """What of the job lives on, on the host that was hit, as command lines."""
        plan, host = self._subject.plan, self._subject.host
        if host not in plan.agents or job.run_directory is None:
            return []
        request = {"action": "left", "run_directory": job.plan().run_directory, "wait_s": GONE_S}
        with held(Hand(plan, host, request, pause), self._say) as hand:
            return [f"{host}: {line}" for line in hand.act()]

    def _say_verdict(self, result: Result) -> None:
        self._say(f"{result.fault}: {result.verdict}" + "".join(f"; {reason}" for reason in result.reasons))
