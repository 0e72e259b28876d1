"""One host of a namespace cluster: its commands, its link, its sshd, its logins and its mounts."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SSHD = "/usr/sbin/sshd"
MOUNTS = Path(__file__).with_name("host_mounts.py")
PATIENCE_S = 180


def call(*argv: str, check: bool = True) -> str:
    return subprocess.run(argv, check=check, text=True, capture_output=True).stdout


@dataclass
class BareHost:
    """A host without faults. Its commands run in the namespaces of its sshd.

    `cluster` is the folder of all hosts, `folder` this host's own; `outer` is its link's end on the bridge.
    """

    name: str
    address: str
    namespace: str
    outer: str
    cluster: Path
    interface: str = "eth0"
    sshd: "subprocess.Popen[bytes]" = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {"HOME": str(self.home)}
        self.login_words = list[str]()
        self._numbers = itertools.count()
        self._shape: str | None = None

    @property
    def folder(self) -> Path:
        return self.cluster / self.name

    @property
    def home(self) -> Path:
        """The user's home on every host, where each host has a folder of its own."""
        return self.cluster / "home"

    def prepare(self) -> None:
        """Writes what the host has to itself: the home with its keys, and sshd's configuration."""
        ssh = self.folder / "home/.ssh"
        ssh.mkdir(parents=True)
        for name, target in (("id_ed25519", "user"), ("id_ed25519.pub", "user.pub"), ("known_hosts", "known_hosts")):
            (ssh / name).symlink_to(self.cluster / target)
        self.write_logins()
        self._write_sshd_config()

    def start(self) -> None:
        script = f"hostname {self.name}; mount --bind {self.folder}/home {self.home}; "
        script += f"exec {SSHD} -D -e -f {self.folder}/sshd_config"
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", script]
        with (self.folder / "sshd.log").open("wb") as log:
            self.sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_listening(self, since: int = 0) -> None:
        """Returns when sshd has said after byte `since` of its log that it listens."""
        deadline = time.monotonic() + PATIENCE_S
        log = self.folder / "sshd.log"
        while b"Server listening" not in log.read_bytes()[since:]:
            if self.sshd.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd of {self.name} does not listen: {log.read_text()}")
            time.sleep(0.005)

    # --- commands -----------------------------------------------------------------------------------------------------

    def argv(self, argv: Sequence[str], cwd: "Path | None" = None) -> list[str]:
        """The command line that runs `argv` on this host; it becomes the command, with the same process id."""
        folder = cwd or Path.cwd()
        enter = ["nsenter", "--target", str(self.sshd.pid), "--net", "--uts", "--mount", f"--wd={folder}"]
        return [*enter, "env", *(f"{name}={value}" for name, value in self.environment.items()), *argv]

    def run(self, argv: Sequence[str], check: bool = True, **options: Any) -> "subprocess.CompletedProcess[Any]":
        return subprocess.run(self.argv(argv, options.get("cwd")), check=check, **options)

    def popen(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        return subprocess.Popen(self.argv(argv, options.get("cwd")), **options)

    # --- the link -----------------------------------------------------------------------------------------------------

    def limit(self, mbit: float) -> contextlib.ExitStack:
        """Limits the link to so many Mbit/s each way, from now on or for the `with` that it opens."""
        self.shape(f"rate {mbit}mbit burst 256kb latency 50ms")
        undo = contextlib.ExitStack()
        undo.callback(self.unlimit)
        return undo

    def unlimit(self) -> None:
        self.shape(None)

    def shape(self, rate: str | None) -> str | None:
        """Gives both ends of the link this token bucket, or none, and returns the one before."""
        verb, *words = ["replace", "root", "tbf", *rate.split()] if rate else ["del", "root"]
        self.run(["tc", "qdisc", verb, "dev", self.interface, *words])
        call("tc", "qdisc", verb, "dev", self.outer, *words)
        before, self._shape = self._shape, rate
        return before

    # --- sshd and logins ----------------------------------------------------------------------------------------------

    def configure_sshd(self, *lines: str) -> None:
        """Gives sshd these lines beside its own; open connections stay."""
        self._write_sshd_config(*lines)
        since = (self.folder / "sshd.log").stat().st_size
        os.kill(self.sshd.pid, signal.SIGHUP)
        self.wait_listening(since)

    def _write_sshd_config(self, *lines: str) -> None:
        own = f"HostKey {self.cluster}/host\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\n"
        own += "MaxStartups 1000\n"
        (self.folder / "sshd_config").write_text("\n".join([*lines, own]))

    def write_logins(self, allowed: bool = True) -> None:
        options = f'command="sh {self.folder}/login" ' if self.login_words else ""
        command = 'exec "$SHELL" ${SSH_ORIGINAL_COMMAND:+-c "$SSH_ORIGINAL_COMMAND"}\n'
        _replace(self.folder / "login", "\n".join([*self.login_words, command]))
        key = (self.cluster / "user.pub").read_text() if allowed else ""
        _replace(self.folder / "home/.ssh/authorized_keys", options + key)

    @contextlib.contextmanager
    def at_login(self, words: str) -> Iterator[None]:
        """Shell words that every new ssh session runs before its command."""
        self.login_words.append(words)
        self.write_logins()
        try:
            yield
        finally:
            self.login_words.remove(words)
            self.write_logins()

    @contextlib.contextmanager
    def known_as(self, *keys: str) -> Iterator[None]:
        """What every host and the launcher have of this host in known_hosts: these public keys and no others."""
        path, names = self.cluster / "known_hosts", f"{self.name},{self.address} "
        before = path.read_text().splitlines(keepends=True)
        others = [line for line in before if not line.startswith(names)]
        _replace(path, "".join([*others, *(f"{names}{key}\n" for key in keys)]))
        try:
            yield
        finally:
            now = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith(names)]
            _replace(path, "".join([*now, *(line for line in before if line.startswith(names))]))

    # --- mounts, seen by open sessions too ----------------------------------------------------------------------------

    def scratch(self) -> Path:
        return self.folder / f"scratch-{next(self._numbers)}"

    @contextlib.contextmanager
    def bound(self, source: Path, target: Path) -> Iterator[None]:
        with self._mounted(target, "bind", str(source), str(target)):
            yield

    @contextlib.contextmanager
    def covered(self, folder: Path, size: str = "8m", without: str = "", fill: str = "") -> Iterator[None]:
        """A file system of its own over the folder, in which all but the name `without` stands as before.

        It is for the folder's existing files and folders: new names in it are this host's only.
        """
        if folder.parent == folder or not folder.is_dir():
            raise ValueError(f"no file system can be put over {folder}: it must be a folder and not /")
        with self._mounted(folder, "cover", str(folder), f"size={size}", without, fill):
            yield

    @contextlib.contextmanager
    def _mounted(self, target: Path, *arguments: str) -> Iterator[None]:
        def mounts(*words: str) -> None:
            done = subprocess.run(
                [sys.executable, "-IS", MOUNTS, str(self.sshd.pid), *words], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{self.name}: {done.stderr.strip().splitlines()[-1]}")

        mounts(*arguments)
        try:
            yield
        finally:
            mounts("detach", str(target))


def _replace(path: Path, text: str) -> None:
    """In one step: others read it at any time."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
