"""A launch from its plan to its exit status, with as many attempts as it takes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
from pathlib import Path

from hvdtrain import contract, processes
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.plan.environment import check_secrets
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.spec.loader import load_spec, resolved_yaml
from hvdtrain.spec.models import JobSpec
from hvdtrain.supervise import tuning
from hvdtrain.supervise.attempt import SIGNALS, Attempt
from hvdtrain.supervise.console import Console
from hvdtrain.supervise.elastic import ElasticAttempt
from hvdtrain.supervise.events import EventLoop
from hvdtrain.supervise.outcome import Outcome, stopped_by
from hvdtrain.supervise.preflight import check_before_start
from hvdtrain.supervise.recorder import Recorder
from hvdtrain.supervise.restarts import AttemptEnd, decide
from hvdtrain.supervise.run_directory import RunDirectory
from hvdtrain.supervise.runs import unfinished


def launch(spec: JobSpec, plan: LaunchPlan) -> int:
    """Check, make the run directory, run, and tell how it ended.

    Raises:
        StartError: something that the job needs isn't there; nothing was started.
    """
    with processes.signals_as_events(SIGNALS) as signals:
        return _run(plan, prepare(spec, plan), signals)


def prepare(spec: JobSpec, plan: LaunchPlan) -> RunDirectory:
    """Check that the job can start, and make its run directory.

    Raises:
        StartError: something that the job needs isn't there.
    """
    check_before_start(spec, plan)
    directory = RunDirectory(Path(plan.run_directory))
    if earlier := unfinished(directory.path.parents[1], plan.name):
        how = f"'hvdtrain resume {shlex.quote(str(earlier.path))}' goes on with it"
        Console(1).message(f"a new run; the one before ended before its training had, {how}")
    directory.create(resolved_yaml(spec), plan.to_json())
    return directory


def read_plan(run_directory: Path) -> LaunchPlan:
    """The plan that a run went by last.

    Raises:
        UsageError: it can't be read, or the run isn't where it was.
    """
    file = run_directory / contract.PLAN_FILE
    replan = "hvdtrain resume --replan makes a new one"
    try:
        plan = LaunchPlan.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"the run's plan can't be read: {error!r}", where=str(file), fix=replan) from error
    if not (Path(plan.run_directory).exists() and run_directory.samefile(plan.run_directory)):
        raise UsageError(
            f"the run was moved: by its plan its workers would write to {plan.run_directory}",
            where=str(run_directory),
            fix=f"move it back; or {replan}",
        )
    return plan


def replan(run_directory: Path, spec: JobSpec, plan: LaunchPlan) -> None:
    """Give a run that has ended another job spec and plan, which `resume` goes by.

    Raises:
        StartError: something that the job needs isn't there, or the run's folder can't be written.
    """
    check_before_start(spec, plan)
    RunDirectory(run_directory).replan(resolved_yaml(spec), plan.to_json())


def resume(run_directory: Path) -> int:
    """Go on with a run that has ended, by its plan, from its newest whole checkpoint.

    Raises:
        UsageError: the folder's job or plan can't be read, or a secret isn't set any more.
        StartError: something that the job needs isn't there; nothing was started.
    """
    plan = read_plan(run_directory)
    check_secrets(os.environ, plan.secrets)
    with processes.signals_as_events(SIGNALS) as signals:
        check_before_start(load_spec(run_directory / contract.JOB_FILE), plan)
        return _run(plan, RunDirectory(run_directory), signals)


def _run(plan: LaunchPlan, directory: RunDirectory, signals: socket.socket) -> int:
    recorder = Recorder(plan, directory, Console(len(plan.placements)))
    spare = processes.children()
    processes.adopt_orphans()
    ends: list[AttemptEnd] = []
    number = directory.attempts
    while True:
        recorder.begin(number)
        start = ElasticAttempt if plan.elastic else Attempt
        attempt = start(plan, number, recorder, signals, spare)
        try:
            outcome = attempt.run()
        except HvdtrainError as error:
            recorder.finish(Outcome(error.exit_status, error.what), silent=True)
            raise
        tuning.keep_log(plan, directory, number)
        failure = outcome.failure.same if outcome.failure else ""
        ends.append(AttemptEnd(outcome.status, attempt.watch.newest().step, failure))
        decision = decide(ends, maximum=plan.restarts, backoff_s=plan.backoff_s)
        if decision.wait_s is None:
            tuning.keep_best(plan, directory, recorder)
            return recorder.finish(outcome, decision.why)
        recorder.restarting(outcome, decision)
        if stop := _signal_within(decision.wait_s, signals):
            tuning.keep_best(plan, directory, recorder)
            return recorder.finish(stopped_by(stop))
        number += 1


def _signal_within(seconds: float, signals: socket.socket) -> signal.Signals | None:
    """Wait so long for a signal that ends the run."""
    loop = EventLoop()
    found: list[signal.Signals] = []
    over: list[bool] = []

    def hear() -> None:
        found.extend(number for number in map(signal.Signals, signals.recv(4096)) if number != signal.SIGCHLD)

    loop.on_readable(signals, hear)
    loop.after(seconds, lambda: over.append(True))
    while not found and not over:
        loop.turn()
    loop.close()
    return found[0] if found else None
