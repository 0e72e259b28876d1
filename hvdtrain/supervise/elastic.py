"""An attempt whose workers come and go: Horovod elastic, with one host of its own for each worker (see `slots`)."""

from __future__ import annotations

import functools
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from hvdtrain import contract
from hvdtrain.errors import ExitStatus, StartError
from hvdtrain.heartbeat import JOINING
from hvdtrain.hosts.local import is_this_machine
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.resolve import nvidia_gpus
from hvdtrain.plan.plan import LaunchPlan, agent_command
from hvdtrain.supervise import channel
from hvdtrain.supervise.attempt import GRACE_S, LAST_WORDS_S, STACKS_S, Attempt
from hvdtrain.supervise.host_source import HostSource
from hvdtrain.supervise.outcome import Outcome, RankEnd, rank_failed
from hvdtrain.supervise.recorder import Recorder
from hvdtrain.supervise.remote import RemoteHost, start_fault
from hvdtrain.supervise.slots import Slots
from hvdtrain.supervise.watch import Hang

# A worker that was offered a slot comes with the job's next step; horovodrun forgets it where it was just resizing.
RENEW_S = 60.0
# From a worker's loss to the next step. Horovod's rendezvous has states from which it never returns.
RESIZE_TIMEOUT_S = 120.0
# Between two tries to reach a host.
_RECONNECT_S = 10.0
# Horovodrun has its own timeout for too few workers, and says in its words why it ends.
_MARGIN_S = 15.0


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
        self._source = HostSource(plan.elastic, plan.directory, plan.environment, tell)
        self._written: list[str] | None = None
        # Slot -> the number of its workers.
        self._numbers: dict[tuple[str, int], int] = {}
        # When a host that was lost, or couldn't be reached, is tried again; and what was said of it.
        self._try_again: dict[str, float] = {}
        self._told_of: dict[str, str] = {}
        self._own_fault: tuple[int, str] | None = None
        self._short_since: float | None = None
        self._gave_up = False
        # A worker has ended well: then the training is done, and the others end too.
        self._done = False
        # When a worker was lost, and the step then; None once the others have gone on.
        self._loss: tuple[float, int] | None = None

    def run(self) -> Outcome:
        """Run the plan to its end, whatever that is, and end every process of it."""
        try:
            return super().run()
        finally:
            self._source.close()

    def _check_hosts(self) -> None:
        """Begin with the hosts that there are; horovodrun waits for enough slots."""
        try:
            (self._run_directory / contract.HOSTS_FILE).parent.mkdir(exist_ok=True)
        except OSError as error:
            where = str(error.filename)
            raise StartError(f"can't write the run directory: {error.strerror}", where=where) from error
        self._refresh(time.monotonic())
        if not self._slots.aliases():
            self._hosts.require_all()

    # --- hosts -------------------------------------------------------------------------------------------------

    @property
    def _reaches_hosts(self) -> bool:
        return True

    def _place(self, name: str) -> str:
        """The host of the slot that was offered under this address."""
        slot = self._slots.find(name)
        return slot.host if slot else name

    def _refresh(self, now: float) -> None:
        """Look at the hosts, and tell horovodrun which slots there are."""
        before, hosts = self._slots.count, self._source.hosts(now)
        slots = {name: host.slots for name, host in hosts.items()}
        self._slots.resize(slots)
        if self._slots.count != before:
            text = f"the hosts have {self._slots.count} slots now, not {before}"
            self._recorder.news("hosts", text, slots=sum(slots.values()))
        self._reach(hosts, now)
        self._slots.offer(now, lambda host: is_this_machine(host) or self._hosts.get(host) is not None)
        self._slots.renew(now, RENEW_S)
        aliases = self._slots.aliases()
        if aliases != self._written:
            file = self._run_directory / contract.HOSTS_FILE
            temporary = file.with_suffix(".new")
            try:
                temporary.write_text("".join(f"{alias}:1\n" for alias in aliases))
                temporary.replace(file)
                self._written = aliases
            except OSError as error:
                # The next time, perhaps.
                self._recorder.disk_error(error)

    def _reach(self, hosts: Mapping[str, Host], now: float) -> None:
        """Connect with hosts that are new, or that were lost a while ago."""
        for name, host in hosts.items():
            if not is_this_machine(name) and now >= self._try_again.get(name, 0.0) and not self._hosts.knows(name):
                self._try_again[name] = now + max(_RECONNECT_S, self._elastic.cooldown_s)
                self._hosts.add(name, agent_command(host, self._plan.ssh, self._plan.python))

    def _on_lost_host(self, host: RemoteHost, why: str) -> None:
        if not self._ending:
            fault = start_fault(host, self._plan.python) if not host.ready else None
            text = f"{host.name} is lost: {why}" if fault is None else f"{host.name} can't be used: {fault.what}"
            if text != self._told_of.get(host.name):
                self._told_of[host.name] = text
                self._recorder.news("host_lost", text, host=host.name)

    # --- workers -----------------------------------------------------------------------------------------------

    def _number(self, worker: channel.Worker) -> int:
        slot = self._slots.find(worker.alias)
        if slot is None or slot.taken:
            raise ValueError("a worker that nobody waits for")
        slot.taken = True
        place = slot.host, slot.number
        if place not in self._numbers:
            used = set(self._numbers.values())
            free = (number for number in range(len(used) + 1) if number not in used)
            assert worker.rank is not None
            self._numbers[place] = next(free) if worker.rank in used else worker.rank
        number = self._numbers[place]
        before = self._workers.get(number)
        if before is not None and not before.ended:
            # Its slot was taken away, and is there again before it has left.
            before.stop(signal.SIGKILL, GRACE_S)
        self.watch.join(number)
        return number

    def _worker_environment(self, worker: channel.Worker) -> dict[str, str]:
        """With what Horovod takes for one host's worker: how many share its machine, and which GPU is its own."""
        slot = self._slots.find(worker.alias)
        if slot is None:
            return self._environment
        environment = self._host_environment(slot.host) | {contract.LOCAL_SIZE: str(self._slots.count_on(slot.host))}
        gpus = [str(number) for number in range(self._gpus(slot.host))]
        if given := environment.get("CUDA_VISIBLE_DEVICES"):
            gpus = given.split(",")
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot.number % len(gpus)]
        return environment

    def _gpus(self, host: str) -> int:
        remote = self._hosts.get(host)
        return remote.gpus if remote else nvidia_gpus()

    def _host_environment(self, host: str) -> dict[str, str]:
        """With the network of a host that has come later: its interface to this machine."""
        environment, remote = super()._host_environment(host), self._hosts.get(host)
        address = self._hosts.launcher_address
        if host not in self._plan.agents and remote and remote.interface and address:
            environment |= {contract.GLOO_INTERFACE: remote.interface, contract.GLOO_RENDEZVOUS: address}
            environment.setdefault("NCCL_SOCKET_IFNAME", f"={remote.interface}")
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
