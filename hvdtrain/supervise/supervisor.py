"""Runs a plan: starts horovodrun, talks with the workers, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from hvdtrain import contract, frames, processes
from hvdtrain.errors import ExitStatus, StartError
from hvdtrain.plan.plan import LaunchPlan
from hvdtrain.supervise import channel
from hvdtrain.supervise.console import Console
from hvdtrain.supervise.lines import LineAssembler
from hvdtrain.supervise.outcome import Outcome, RankEnd, choose_cause, describe_exit, rank_failed, telling_lines
from hvdtrain.supervise.run_directory import RunDirectory

# horovodrun takes 3 to 5 s before the first worker starts, more on a busy machine or with many hosts.
START_TIMEOUT_S = 120.0
# After the first rank's failure the others may say what they have to say, then they're ended.
LAST_WORDS_S = 2.0
# For horovodrun to end by itself once its workers have ended or were asked to.
LAUNCHER_GRACE_S = 6.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
# horovodrun writes names into a shell command; others travel over the channel alone.
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Supervisor:
    """One run of one plan. Single-threaded: everything is an event of one selector."""

    def __init__(self, plan: LaunchPlan, directory: RunDirectory, console: Console) -> None:
        self._plan = plan
        self._directory = directory
        self._console = console
        self._environment = channel.environment_with_secrets(plan.environment, plan.secrets)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, channel.Worker] = {}
        self._size = len(plan.placements)
        self._logs: dict[int, IO[str]] = {}
        self._files = ExitStack()
        self._launcher_lines: deque[str] = deque(maxlen=channel.KEPT_LINES)
        self._signals: list[signal.Signals] = []
        self._failures: list[RankEnd] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        # Set once the run is coming to its end, for whatever reason.
        self._ending = False
        self._start_timed_out = False
        # horovodrun ended before any rank had failed by itself: it is the cause.
        self._launcher_ended_first = False
        self._launcher: subprocess.Popen[bytes]

    def run(self) -> Outcome:
        """Run the plan to its end, whatever that is, and end every process of it."""
        spare = processes.children()
        processes.adopt_orphans()
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            signals = stack.enter_context(processes.signals_as_events(_SIGNALS))
            self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals.recv(4096)))
            listener = channel.Listener()
            stack.callback(listener.close)
            self._selector.register(listener.socket, selectors.EVENT_READ, lambda: self._accept(listener))
            stack.enter_context(self._files)
            stack.callback(processes.kill_descendants, spare)
            self._start_launcher(listener.path)
            self._after(START_TIMEOUT_S, self._check_started)
            while self._launcher.poll() is None:
                self._turn()
            self._finish()
        return self._outcome()

    # --- events ------------------------------------------------------------------------------------------------

    def _turn(self, patience: float | None = None) -> None:
        """Wait for the next event, at most until the next timer, and handle what is there."""
        waits = [max(0.0, when - time.monotonic()) for when, _ in self._timers]
        if patience is not None:
            waits.append(patience)
        for key, _ in self._selector.select(min(waits, default=None)):
            key.data()
        due = [timer for timer in self._timers if timer[0] <= time.monotonic()]
        for timer in due:
            self._timers.remove(timer)
            timer[1]()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    def _on_signals(self, numbers: bytes) -> None:
        for number in map(signal.Signals, numbers):
            if number == signal.SIGCHLD:
                continue
            self._signals.append(number)
            self._ending = True
            if len(self._signals) == 1:
                self._console.message(f"{number.name}: stopping the job (once more to kill it)")
                self._stop_workers(signal.SIGTERM)
                self._after(LAUNCHER_GRACE_S, self._kill_launcher)
            else:
                self._stop_workers(signal.SIGKILL)
                self._kill_launcher()

    def _accept(self, listener: channel.Listener) -> None:
        worker = listener.accept()
        self._selector.register(worker.connection, selectors.EVENT_READ, lambda: self._hear(worker))

    def _hear(self, worker: channel.Worker) -> None:
        try:
            for kind, payload in worker.read():
                self._on_frame(worker, kind, payload)
        except (EOFError, ValueError, KeyError, frames.ChannelError):
            # The end of the connection, or something that no worker of ours says.
            self._leave(worker)

    def _on_frame(self, worker: channel.Worker, kind: bytes, payload: bytes) -> None:
        if kind == frames.HELLO:
            worker.rank, worker.host = channel.hello(payload)
            self._workers[worker.rank] = worker
            self._logs[worker.rank] = self._open_log(self._directory.rank_log(worker.rank))
            worker.send(channel.start_frame(self._environment))
            if self._ending:
                worker.send(channel.stop_frame(signal.SIGKILL))
        elif kind in worker.streams:
            for line in worker.streams[kind].feed(payload):
                self._line(worker, line, error=kind == frames.ERR)
        elif kind == frames.EXIT:
            code, stopped = channel.exit_message(payload)
            self._on_end(worker, code, stopped=stopped)

    def _line(self, worker: channel.Worker, line: str, *, error: bool) -> None:
        assert worker.rank is not None
        worker.last_lines.append(line)
        self._logs[worker.rank].write(line + "\n")
        self._console.rank_line(worker.rank, line, error=error)

    def _flush(self, worker: channel.Worker) -> None:
        for kind, assembler in worker.streams.items():
            for line in assembler.close():
                self._line(worker, line, error=kind == frames.ERR)

    def _leave(self, worker: channel.Worker) -> None:
        self._selector.unregister(worker.connection)
        worker.connection.close()
        if worker.rank is not None and not worker.ended:
            self._on_end(worker, None, stopped=False)

    def _on_end(self, worker: channel.Worker, code: int | None, *, stopped: bool) -> None:
        """A rank has ended. If it's the first to fail, the run comes to its end."""
        assert worker.rank is not None
        worker.ended = True
        self._flush(worker)
        if code == 0:
            return
        self._failures.append(RankEnd(worker.rank, worker.host, code, stopped, tuple(worker.last_lines)))
        if not self._ending:
            self._ending = True
            self._after(LAST_WORDS_S, lambda: self._stop_workers(signal.SIGTERM))
            self._after(LAST_WORDS_S + LAUNCHER_GRACE_S, self._kill_launcher)

    def _check_started(self) -> None:
        if len(self._workers) < self._size and not self._ending:
            self._ending = self._start_timed_out = True
            self._stop_workers(signal.SIGTERM)
            self._kill_launcher()

    # --- horovodrun --------------------------------------------------------------------------------------------

    def _start_launcher(self, channel_path: str) -> None:
        environment = {name: value for name, value in self._plan.environment.items() if _SHELL_NAME.fullmatch(name)}
        try:
            self._launcher = subprocess.Popen(
                self._plan.argv,
                cwd=self._plan.directory,
                env=environment | {contract.CHANNEL: channel_path},
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
        assert self._launcher.stdout is not None
        output = self._launcher.stdout
        os.set_blocking(output.fileno(), False)
        log = self._open_log(self._directory.launcher_log)
        assembler = LineAssembler()
        self._selector.register(output, selectors.EVENT_READ, lambda: self._launcher_output(output, assembler, log))

    def _launcher_output(self, output: IO[bytes], assembler: LineAssembler, log: IO[str]) -> None:
        data = output.read()
        if data is None:
            return
        if not data:
            self._selector.unregister(output)
        for line in assembler.feed(data) if data else assembler.close():
            self._launcher_lines.append(line)
            log.write(line + "\n")

    def _stop_workers(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            if not worker.ended:
                worker.send(channel.stop_frame(number))

    def _kill_launcher(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)

    def _finish(self) -> None:
        """Horovodrun has ended: so must the workers, and what they still have to say is read."""
        self._read_what_is_there()
        self._launcher_ended_first = all(failure.stopped for failure in self._failures)
        self._ending = True
        self._stop_workers(signal.SIGTERM)
        deadline = time.monotonic() + LAUNCHER_GRACE_S
        while not all(worker.ended for worker in self._workers.values()) and time.monotonic() < deadline:
            self._turn(patience=deadline - time.monotonic())
        self._read_what_is_there()

    def _read_what_is_there(self) -> None:
        while self._selector.select(0):
            self._turn(patience=0)

    def _open_log(self, path: Path) -> IO[str]:
        """A log that is on disk line by line, and closed at the run's end."""
        return self._files.enter_context(path.open("a", buffering=1, errors="replace"))

    # --- the end -----------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        if self._signals:
            status = ExitStatus.INTERRUPTED if self._signals[0] == signal.SIGINT else ExitStatus.TERMINATED
            return Outcome(status, f"stopped by {self._signals[0].name}")
        if self._failures and not self._start_timed_out and not self._launcher_ended_first:
            return rank_failed(choose_cause(self._failures))
        evidence = telling_lines(tuple(self._launcher_lines))
        missing = sorted(set(range(self._size)) - set(self._workers))
        if self._start_timed_out:
            summary = f"ranks {missing} did not start within {START_TIMEOUT_S:.0f} s"
            return Outcome(ExitStatus.CANNOT_START, summary, evidence)
        ended = f"horovodrun {describe_exit(self._launcher.returncode)}"
        if not self._workers:
            return Outcome(ExitStatus.CANNOT_START, f"{ended} and started no worker", evidence)
        if self._launcher.returncode != 0 or missing:
            return Outcome(ExitStatus.LOST, f"{ended} before the job was done", evidence)
        return Outcome(ExitStatus.DONE, "done")
