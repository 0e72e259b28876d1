"""One start of a job: starts horovodrun, talks with the workers, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import IO

from hvdtrain import contract, frames, processes
from hvdtrain.errors import ExitStatus, StartError
from hvdtrain.heartbeat import STOPPED
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.supervise import channel
from hvdtrain.supervise.events import EventLoop
from hvdtrain.supervise.hosts import Hosts, remote_environment, with_programs
from hvdtrain.supervise.lines import LineAssembler
from hvdtrain.supervise.logs import LogFile
from hvdtrain.supervise.masking import masker
from hvdtrain.supervise.outcome import Ending, Outcome, RankEnd, explained, outcome_of
from hvdtrain.supervise.recorder import Recorder
from hvdtrain.supervise.remote import Handlers, RemoteHost
from hvdtrain.supervise.watch import Hang, Watch

# Until all workers have started: seconds as a rule, more on a busy machine or with many hosts.
START_TIMEOUT_S = 120.0
# After the first rank's failure the others may say what they have to say, then they're ended.
LAST_WORDS_S = 2.0
# From a request to SIGKILL, where there is nothing to be saved.
GRACE_S = 3.0
# For horovodrun to end by itself once its workers have ended or were asked to.
LAUNCHER_GRACE_S = 6.0
# For the ranks of a hanging job to write their stacks.
STACKS_S = 3.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_TICK_S = 1.0
# horovodrun writes names into a shell command; others travel over the channel alone.
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Attempt:
    """One attempt to run a plan. Single-threaded: everything is an event of one loop.

    Args:
        plan: what to run.
        number: of this attempt, from 0.
        recorder: where everything is shown and written.
        signals: a socket that yields the numbers of `SIGNALS` as they arrive.
        spare: pids of children that were there before.
    """

    def __init__(
        self, plan: LaunchPlan, number: int, recorder: Recorder, signals: socket.socket, spare: set[int]
    ) -> None:
        self._plan = plan
        self._recorder = recorder
        self._signal_socket = signals
        self._spare = spare
        self._environment = channel.environment_with_secrets(
            plan.environment | {contract.ATTEMPT: str(number)}, plan.secrets
        )
        self._mask = masker(self._environment[name] for name in plan.secrets)
        self._loop = EventLoop()
        self._workers: dict[int, channel.Worker] = {}
        self._size = len(plan.placements)
        self._logs: dict[int, LogFile] = {}
        self._files = ExitStack()
        self._launcher_lines: deque[str] = deque(maxlen=channel.KEPT_LINES)
        self._signals: list[signal.Signals] = []
        self._failures: list[RankEnd] = []
        self._hang: Hang | None = None
        # Set once the run is coming to its end, for whatever reason.
        self._ending = False
        self._start_timed_out = False
        # horovodrun ended before any rank had failed by itself: it is the cause.
        self._launcher_ended_first = False
        # None where a signal came before it was started.
        self._launcher: subprocess.Popen[bytes] | None = None
        self.watch = Watch(self._size, plan.hang_timeout_s)

    def run(self) -> Outcome:
        """Run the plan to its end, whatever that is, and end every process of it."""
        with ExitStack() as stack:
            stack.callback(self._loop.close)
            self._loop.on_readable(self._signal_socket, lambda: self._on_signals(self._signal_socket.recv(4096)))
            listener = channel.Listener()
            stack.callback(listener.close)
            self._loop.on_readable(listener.socket, lambda: self._accept(listener))
            stack.enter_context(self._files)
            stack.callback(processes.kill_descendants, self._spare)
            self._hosts = Hosts(self._plan, listener.name, self._loop, self._handlers(), self._place)
            stack.callback(self._hosts.close)
            self._hosts.connect(lambda: not self._signals)
            if not self._signals:
                self._check_hosts()
            self._loop.drain()
            if not self._signals:
                self._launcher = self._start_launcher(listener.name)
                self._loop.after(START_TIMEOUT_S, self._check_started)
                self._loop.every(_TICK_S, self._tick)
                while self._launcher.poll() is None:
                    self._loop.turn()
                self._finish()
        return self._outcome()

    def _check_hosts(self) -> None:
        """The last thing before horovodrun starts. Raises StartError where hosts are missing."""
        self._hosts.require_all()

    def _handlers(self) -> Handlers:
        return Handlers(said=self._take, shut=self._leave, lost=self._on_lost_host)

    # --- events ------------------------------------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        for number in map(signal.Signals, numbers):
            if number == signal.SIGCHLD:
                continue
            self._signals.append(number)
            self._ending = True
            if len(self._signals) == 1:
                self._recorder.stopping(number)
                self._stop_workers(signal.SIGTERM, self._plan.stop_grace_s)
                patience = self._plan.stop_grace_s + LAUNCHER_GRACE_S if self._workers else 0
                self._loop.after(patience, self._kill_launcher)
            else:
                self._stop_workers(signal.SIGKILL)
                self._kill_launcher()

    def _accept(self, listener: channel.Listener) -> None:
        line = listener.accept()
        if line is not None:
            worker = channel.Worker(line)
            self._loop.on_readable(line.socket, lambda: self._hear(worker, line))

    def _hear(self, worker: channel.Worker, line: channel.SocketLine) -> None:
        if data := line.receive():
            self._take(worker, data)
        else:
            self._leave(worker)

    def _take(self, worker: channel.Worker, data: bytes) -> None:
        try:
            for kind, payload in worker.reader.feed(data):
                self._on_frame(worker, kind, payload)
        except (ValueError, KeyError, TypeError, frames.ChannelError):
            # Something that no worker of ours says.
            self._leave(worker)

    def _on_frame(self, worker: channel.Worker, kind: bytes, payload: bytes) -> None:
        if kind == frames.HELLO:
            self._on_hello(worker, payload)
        elif kind == frames.RUN and isinstance(worker.line, channel.SocketLine):
            self._hosts.run(worker.line, payload)
        elif kind in worker.streams:
            for line in worker.streams[kind].feed(payload):
                self._line(worker, line, error=kind == frames.ERR)
        elif kind == frames.BEAT and worker.rank is not None:
            self.watch.beat(worker.rank, *channel.beat_message(payload), now=time.monotonic())
        elif kind == frames.ENDING:
            worker.ending = True
        elif kind == frames.EXIT and worker.rank is not None:
            end, beat = channel.end_message(payload, self._mask)
            self.watch.beat(worker.rank, beat, "Z", now=time.monotonic())
            self._on_end(worker, end)

    def _on_hello(self, worker: channel.Worker, payload: bytes) -> None:
        worker.introduce(payload)
        worker.rank = self._number(worker)
        self._workers[worker.rank] = worker
        self._logs[worker.rank] = self._open_log(contract.rank_log(worker.rank))
        if self._ending:
            worker.stop(signal.SIGKILL, GRACE_S)
        else:
            worker.start(self._worker_environment(worker))
        self._recorder.rank_started(worker.rank, worker.host, worker.pid)

    def _number(self, worker: channel.Worker) -> int:
        """The number by which a worker that has introduced itself is known: its rank.

        Raises:
            ValueError: it can't be one of this attempt's.
        """
        assert worker.rank is not None
        if not 0 <= worker.rank < self._size or worker.rank in self._workers:
            raise ValueError("a rank that can't be")
        return worker.rank

    def _place(self, name: str) -> str:
        """The host that horovodrun means by a name."""
        return self._plan.names.get(name, name)

    def _worker_environment(self, worker: channel.Worker) -> dict[str, str]:
        """Its command's variables, beside those that horovodrun sets."""
        assert worker.rank is not None
        return self._host_environment(worker.host if worker.is_remote else self._plan.placements[worker.rank].host)

    def _host_environment(self, host: str) -> dict[str, str]:
        """The variables of a host's workers."""
        environment = remote_environment(self._environment) if self._hosts.get(host) else self._environment
        environment = environment | self._plan.host_environment.get(host, {})
        return environment | {contract.GLOO_RENDEZVOUS: "127.0.0.1"} if self._hosts.has_tunnels else environment

    def _on_lost_host(self, host: RemoteHost, why: str) -> None:
        """Its workers are said to be gone next."""
        if self._launcher is not None and not self._signals:
            self._recorder.news("host_lost", f"{host.name} is lost: {why}", host=host.name)
            if not self._ending:
                self._end_after(LAST_WORDS_S)

    def _line(self, worker: channel.Worker, line: str, *, error: bool) -> None:
        assert worker.rank is not None
        line = self._mask(line)
        worker.last_lines.append(line)
        self._logs[worker.rank].write(line)
        self._recorder.rank_line(worker.rank, line, error=error)
        self.watch.line(line, time.monotonic())

    def _flush(self, worker: channel.Worker) -> None:
        for kind, assembler in worker.streams.items():
            for line in assembler.close():
                self._line(worker, line, error=kind == frames.ERR)

    def _leave(self, worker: channel.Worker) -> None:
        if isinstance(worker.line, channel.SocketLine):
            self._loop.forget(worker.line.socket)
            self._hosts.abandon(worker.line)
        worker.line.close()
        if worker.rank is not None and self._workers.get(worker.rank) is worker and not worker.ended:
            self._on_end(worker, None)

    def _on_end(self, worker: channel.Worker, end: channel.End | None) -> None:
        """A rank has ended, well or not."""
        assert worker.rank is not None
        worker.ended = True
        self._flush(worker)
        fault = self._hosts.lost.get(worker.host) if worker.is_remote else None
        lines = tuple(worker.last_lines)
        rank_end = RankEnd(worker.rank, worker.host, end, worker.ending, lines, fault, time.time())
        self._recorder.rank_ended(rank_end)
        if end is None or end.code != 0:
            self._on_failure(worker, rank_end)

    def _on_failure(self, worker: channel.Worker, end: RankEnd) -> None:
        """A rank has failed."""
        self._failures.append(end)
        if not self._ending:
            self._end_after(LAST_WORDS_S)

    def _end_after(self, seconds: float) -> None:
        """The run has failed: whatever still runs may go on for so long, then it's ended."""
        self._ending = True
        self._loop.after(seconds, lambda: self._stop_workers(signal.SIGTERM))
        self._loop.after(seconds + LAUNCHER_GRACE_S, self._kill_launcher)

    def _check_started(self) -> None:
        if len(self._workers) < self._size and not self._ending:
            self._ending = self._start_timed_out = True
            self._stop_workers(signal.SIGTERM)
            self._kill_launcher()

    def _tick(self) -> None:
        if not self._ending:
            hang = self.watch.hang(time.monotonic())
            if hang:
                self._recorder.hang(hang)
                for worker in self._workers.values():
                    worker.dump()
                self._on_hang(hang)
        self._recorder.tick(self.watch)

    def _on_hang(self, hang: Hang) -> None:
        """The job hangs, and its ranks were asked for their stacks."""
        self._hang = hang
        self._end_after(STACKS_S)

    # --- horovodrun --------------------------------------------------------------------------------------------

    def _start_launcher(self, channel_name: str) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in self._plan.environment.items() if _SHELL_NAME.fullmatch(name)}
        if self._reaches_hosts:
            # horovodrun would carry what is this login's over to the other hosts.
            environment = remote_environment(environment)
        environment = with_programs(self._plan, environment, other_hosts=self._reaches_hosts)
        try:
            launcher = subprocess.Popen(
                self._plan.argv,
                cwd=self._plan.directory,
                env=environment | {contract.CHANNEL: channel_name},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the supervisor, which knows what to do with it.
                start_new_session=True,
                preexec_fn=processes.end_with_parent(signal.SIGTERM),
            )
        except OSError as error:
            raise StartError(
                f"horovodrun can't be started: {error.strerror}",
                where=str(error.filename or self._plan.argv[0]),
                fix="run 'hvdtrain horovod check'",
            ) from error
        assert launcher.stdout is not None
        output = launcher.stdout
        os.set_blocking(output.fileno(), False)
        log = self._open_log(contract.LAUNCHER_LOG)
        assembler = LineAssembler()
        self._loop.on_readable(output, lambda: self._launcher_output(output, assembler, log))
        return launcher

    @property
    def _reaches_hosts(self) -> bool:
        """Whether horovodrun has to reach other hosts, or what it takes for such."""
        return bool(self._plan.agents)

    def _launcher_output(self, output: IO[bytes], assembler: LineAssembler, log: LogFile) -> None:
        data = output.read()
        if data is None:
            return
        if not data:
            self._loop.forget(output)
        for line in map(self._mask, assembler.feed(data) if data else assembler.close()):
            self._launcher_lines.append(line)
            log.write(line)

    def _stop_workers(self, number: signal.Signals, grace_s: float = GRACE_S) -> None:
        for worker in self._workers.values():
            if not worker.ended:
                worker.stop(number, grace_s)

    def _kill_launcher(self) -> None:
        if self._launcher is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)

    def _finish(self) -> None:
        """Horovodrun has ended: so must the workers, and what they still have to say is read."""
        assert self._launcher is not None
        self._recorder.launcher_ended(self._launcher.returncode)
        self._loop.drain()
        self._launcher_ended_first = all(failure.was_told_to_end for failure in self._failures)
        self._ending = True
        self._stop_workers(signal.SIGTERM)
        deadline = time.monotonic() + LAUNCHER_GRACE_S
        while not all(worker.ended for worker in self._workers.values()) and time.monotonic() < deadline:
            self._loop.turn(patience=max(0.0, deadline - time.monotonic()))
        self._loop.drain()

    def _open_log(self, name: str) -> LogFile:
        log = self._recorder.open_log(name)
        self._files.callback(log.close)
        return log

    def _hung(self) -> RankEnd | None:
        """The rank that hung, with its last lines."""
        worker = self._workers.get(self._hang.rank) if self._hang and self._hang.rank is not None else None
        if worker is None or worker.rank is None:
            return None
        return RankEnd(worker.rank, worker.host, None, worker.ending, tuple(worker.last_lines))

    def _missing(self) -> tuple[int, ...]:
        """Ranks that never started."""
        return tuple(sorted(set(range(self._size)) - set(self._workers)))

    def _outcome(self) -> Outcome:
        assert self._launcher is not None or self._signals
        outcome = outcome_of(
            Ending(
                signals=tuple(self._signals),
                hang=self._hang,
                hung=self._hung(),
                failures=tuple(self._failures),
                launcher_lines=tuple(self._launcher_lines),
                launcher_code=self._launcher.returncode if self._launcher else 0,
                missing=self._missing(),
                size=self._size,
                start_timeout_s=START_TIMEOUT_S if self._start_timed_out else None,
                lost_hosts=self._hosts.lost,
                launcher_ended_first=self._launcher_ended_first,
            )
        )
        if outcome.status is ExitStatus.DONE and self.watch.newest().activity == STOPPED:
            return Outcome(ExitStatus.TERMINATED, "stopped: a rank was asked to end, and the others with it")
        ranks = {rank: tuple(worker.last_lines) for rank, worker in self._workers.items()}
        return explained(outcome, ranks, tuple(self._launcher_lines))
