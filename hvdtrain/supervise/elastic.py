"""An attempt whose workers come and go: Horovod elastic, with one host of its own for each worker (see `slots`)."""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from pathlib import Path

from hvdtrain import contract
from hvdtrain.errors import ExitStatus, StartError
from hvdtrain.heartbeat import JOINING
from hvdtrain.hosts.resolve import nvidia_gpus
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.supervise import channel
from hvdtrain.supervise.attempt import GRACE_S, LAST_WORDS_S, STACKS_S, Attempt
from hvdtrain.supervise.host_source import HostSource
from hvdtrain.supervise.outcome import Outcome, RankEnd, rank_failed
from hvdtrain.supervise.recorder import Recorder
from hvdtrain.supervise.slots import Slots
from hvdtrain.supervise.watch import Hang

# A worker that was offered a slot comes with the job's next step; horovodrun forgets it where it was just resizing.
RENEW_S = 60.0
# From a worker's loss to the next step. Horovod's rendezvous has states from which it never returns.
RESIZE_TIMEOUT_S = 120.0
# Horovodrun has its own timeout for too few workers, and says in its words why it ends.
_MARGIN_S = 15.0
# horovodrun starts the worker of another host by ssh. All of these hosts are this one.
_SSH = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
        -o | -p | -i) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
shift
exec sh -c "$*"
"""


class ElasticAttempt(Attempt):
    """One attempt to run an elastic plan. A worker's number stays while Horovod's ranks move at a resize.

    The arguments are those of `Attempt`.
    """

    def __init__(
        self, plan: LaunchPlan, number: int, recorder: Recorder, signals: socket.socket, spare: set[int]
    ) -> None:
        super().__init__(plan, number, recorder, signals, spare)
        assert plan.elastic is not None
        self._elastic = plan.elastic
        self._run_directory = Path(plan.run_directory)
        self._slots = Slots(plan.elastic.slots, plan.elastic.maximum, plan.elastic.cooldown_s)
        tell = functools.partial(recorder.news, "hosts")
        self._hosts = HostSource(plan.elastic, plan.directory, plan.environment, tell)
        self._written: list[str] | None = None
        # Slot -> the number of its workers.
        self._numbers: dict[int, int] = {}
        self._own_fault: tuple[int, str] | None = None
        self._short_since: float | None = None
        self._gave_up = False
        # A worker has ended well: then the training is done, and the others end too.
        self._done = False
        # When a worker was lost, and the step then; None once the others have gone on.
        self._loss: tuple[float, int] | None = None

    def run(self) -> Outcome:
        """Run the plan to its end, whatever that is, and end every process of it."""
        self._write_programs()
        self._refresh(time.monotonic())
        try:
            return super().run()
        finally:
            self._hosts.close()

    # --- hosts -------------------------------------------------------------------------------------------------

    def _write_programs(self) -> None:
        ssh = self._run_directory / contract.PROGRAMS / "ssh"
        try:
            ssh.parent.mkdir(parents=True, exist_ok=True)
            ssh.write_text(_SSH)
            ssh.chmod(0o700)
        except OSError as error:
            raise StartError(f"can't write the run directory: {error.strerror}", where=str(ssh)) from error

    def _launcher_environment(self, environment: dict[str, str]) -> dict[str, str]:
        programs = str(self._run_directory / contract.PROGRAMS)
        return environment | {"PATH": os.pathsep.join([programs, environment["PATH"]])}

    def _refresh(self, now: float) -> None:
        """Look at the hosts, and tell horovodrun which slots there are."""
        before, wanted = self._slots.count, self._hosts.slots(now)
        self._slots.resize(wanted)
        if self._slots.count != before:
            self._recorder.news("hosts", f"the hosts have {self._slots.count} slots now, not {before}", slots=wanted)
        self._slots.offer(now)
        self._slots.renew(now, RENEW_S)
        aliases = self._slots.aliases()
        if aliases != self._written:
            hosts = self._run_directory / contract.HOSTS_FILE
            temporary = hosts.with_suffix(".new")
            try:
                temporary.write_text("".join(f"{alias}:1\n" for alias in aliases))
                temporary.replace(hosts)
                self._written = aliases
            except OSError as error:
                # The next time, perhaps.
                self._recorder.disk_error(error)

    # --- workers -----------------------------------------------------------------------------------------------

    def _number(self, worker: channel.Worker) -> int:
        slot = self._slots.find(worker.alias)
        if slot is None or slot.taken:
            raise ValueError("a worker that nobody waits for")
        slot.taken = True
        if slot.number not in self._numbers:
            used = set(self._numbers.values())
            free = (number for number in range(len(used) + 1) if number not in used)
            assert worker.rank is not None
            self._numbers[slot.number] = next(free) if worker.rank in used else worker.rank
        number = self._numbers[slot.number]
        before = self._workers.get(number)
        if before is not None and not before.ended:
            # Its slot was taken away, and is there again before it has left.
            before.stop(signal.SIGKILL, GRACE_S)
        self.watch.join(number)
        return number

    def _worker_environment(self, worker: channel.Worker) -> dict[str, str]:
        """With what Horovod takes for one host's worker: how many share this machine, and which GPU is its own."""
        environment = self._environment | {contract.LOCAL_SIZE: str(self._slots.count)}
        slot = self._slots.find(worker.alias)
        gpus = [str(number) for number in range(nvidia_gpus())]
        if given := environment.get("CUDA_VISIBLE_DEVICES"):
            gpus = given.split(",")
        if gpus and slot is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot.number % len(gpus)]
        return environment

    def _alive(self) -> list[channel.Worker]:
        return [worker for worker in self._workers.values() if not worker.ended]

    def _on_end(self, worker: channel.Worker, end: channel.End | None) -> None:
        if end is not None and end.code == 0 and self._slots.find(worker.alias):
            self._done = True
        super()._on_end(worker, end)

    def _on_failure(self, worker: channel.Worker, end: RankEnd) -> None:
        self.watch.leave(end.rank)
        slot = self._slots.find(worker.alias)
        if self._ending or slot is None:
            # The job ends, or the hosts don't have its slot any more.
            return
        now = time.monotonic()
        self._failures.append(end)
        failed = rank_failed(end)
        if self._fails_again(end, failed):
            self._end_after(LAST_WORDS_S)
            return
        self._slots.failed(slot, now)
        self._loss = self._loss or (now, self.watch.newest().step)
        self._recorder.worker_lost(end, failed.summary, len(self._alive()), slot.free_at - now)

    def _fails_again(self, end: RankEnd, failed: Outcome) -> bool:
        """Whether the task raises the same at the same step as the last time: then nothing gets better."""
        if end.was_told_to_end or end.is_consequence or failed.status is not ExitStatus.TRAINING_FAILED:
            return False
        assert failed.failure is not None
        before, self._own_fault = self._own_fault, (self.watch.newest().step, failed.failure.same)
        return before is not None and before[1] == self._own_fault[1] and self._own_fault[0] <= before[0]

    def _on_hang(self, hang: Hang) -> None:
        """A rank that hangs is ended, and the others go on; if nobody knows which, the attempt ends."""
        worker = self._workers.get(hang.rank) if hang.rank is not None else None
        if worker is None or worker.ended:
            super()._on_hang(hang)
            return
        self.watch.leave(worker.rank or 0)
        self._loop.after(STACKS_S, lambda: worker.stop(signal.SIGKILL, GRACE_S))

    # --- time --------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        super()._tick()
        now = time.monotonic()
        self._refresh(now)
        if self._ending or self._done or not self._workers:
            return
        self._end_leavers()
        self._check_enough(now)
        if self._loss:
            self._check_recovered(*self._loss, now)

    def _end_leavers(self) -> None:
        """A worker whose slot was taken away leaves the others at a resize, and then finds no place any more."""
        for worker in self._alive():
            joining = worker.rank is not None and self.watch.last(worker.rank).activity == JOINING
            if joining and self._slots.find(worker.alias) is None:
                worker.stop(signal.SIGTERM, GRACE_S)

    def _check_recovered(self, lost_at: float, step: int, now: float) -> None:
        """After a loss the others have to come together, and to take a step."""
        newest, alive = self.watch.newest(), len(self._alive())
        if newest.size > alive:
            # They haven't come together yet; what they tell may be older than the loss.
            self._loss = (lost_at, max(step, newest.step))
        elif newest.step > step:
            self._loss = None
            self._failures.clear()
            return
        if newest.time and self._short_since is None and now - lost_at > RESIZE_TIMEOUT_S:
            self._recorder.news("stuck", f"no step for {RESIZE_TIMEOUT_S:g} s after the loss of a worker")
            self._end_after(0)

    def _check_enough(self, now: float) -> None:
        """Below the minimum the job waits, and says so."""
        minimum, alive = self._elastic.minimum, len(self._alive())
        if alive >= minimum:
            self._short_since, self._gave_up = None, False
            return
        if self._short_since is None:
            self._short_since = now
            text = f"{alive} of at least {minimum} workers: waiting for slots, for {self._elastic.timeout_s} s at most"
            self._recorder.news("waiting", text, workers=alive, minimum=minimum)
        elif now - self._short_since > self._elastic.timeout_s + _MARGIN_S:
            self._end_after(0)
        self._gave_up = now - self._short_since >= self._elastic.timeout_s

    def _check_started(self) -> None:
        if len(self._workers) < self._elastic.minimum:
            super()._check_started()

    def _missing(self) -> tuple[int, ...]:
        """None, as long as some came."""
        return () if self._workers else super()._missing()

    def _outcome(self) -> Outcome:
        if self._launcher is not None and self._launcher.returncode == 0:
            # Whoever was lost on the way, the others have come to the end.
            self._failures.clear()
        outcome = super()._outcome()
        if self._gave_up and not self._signals:
            summary = f"fewer than {self._elastic.minimum} workers for {self._elastic.timeout_s} s (elastic.timeout_s)"
            return Outcome(ExitStatus.LOST, summary, outcome.evidence, outcome.failure)
        return outcome
