"""Faults of a host, each a context manager that undoes it; what open sessions have already is left to them."""

import contextlib
import functools
import importlib.metadata
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bare_host import BareHost, call

CLOCK_SOURCE = Path(__file__).with_name("data") / "clock_skew.c"
HIGHEST_PORT = 65534  # the highest that the kernel takes in a routing rule


class NamespaceHost(BareHost):
    """One host, and what can be wrong with it."""

    # --- ssh ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def sshd_down(self) -> Iterator[None]:
        """Connections to port 22 are refused. sshd itself lives on, elsewhere: it holds the host's namespaces."""
        self.configure_sshd("ListenAddress 127.0.0.1:2")
        try:
            yield
        finally:
            self.configure_sshd()

    @contextlib.contextmanager
    def wrong_host_key(self) -> Iterator[None]:
        """The others know it by another key than it has, as after a new installation."""
        key = self.scratch()
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        with self.known_as(key.with_suffix(".pub").read_text().strip()):
            yield

    def unknown_host_key(self) -> AbstractContextManager[None]:
        """Nobody has its key in known_hosts."""
        return self.known_as()

    @contextlib.contextmanager
    def no_login(self) -> Iterator[None]:
        """The user's key isn't in authorized_keys."""
        self.write_logins(allowed=False)
        try:
            yield
        finally:
            self.write_logins()

    def slow_login(self, seconds: float = 60) -> AbstractContextManager[None]:
        """A command begins only so long after the login."""
        return self.at_login(f"sleep {seconds}")

    def lying_host(self, text: str = '{"answer": }') -> AbstractContextManager[None]:
        """Every command prints this line for ever, as fast as it's taken."""
        return self.at_login(f"exec yes {shlex.quote(text)}")

    # --- network ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        """Its interface has no carrier."""
        call("ip", "link", "set", self.outer, "down")
        try:
            yield
        finally:
            call("ip", "link", "set", self.outer, "up")

    @contextlib.contextmanager
    def blackhole(self) -> Iterator[None]:
        """The link stays up and nothing comes through."""
        before = self.shape("rate 1kbit burst 10 limit 10")  # every packet is larger than the bucket, so it's dropped
        try:
            yield
        finally:
            self.shape(before)

    @contextlib.contextmanager
    def no_tcp(self, *ports: str) -> Iterator[None]:
        """New connections to these ports of it ("1024-65535", "29500") get no answer, as behind a firewall.

        Only packets from ports above 1023 are dropped, so that answers to what it opened itself still reach it from
        ports below.
        """
        with contextlib.ExitStack() as undo:
            for family in ("-4", "-6"):
                rule = functools.partial(self._rule, family)
                # Rules are looked up by rank, and packets to the host's own addresses end in the first, `local`.
                rule("add", "pref", "100", "lookup", "local")
                undo.callback(rule, "del", "pref", "100")
                rule("del", "pref", "0")
                undo.callback(rule, "add", "pref", "0", "lookup", "local")
                for first, _, last in (text.partition("-") for text in ports):
                    to = f"{first}-{min(int(last or first), HIGHEST_PORT)}"
                    drop = f"pref 10 iif {self.interface} ipproto tcp sport 1024-{HIGHEST_PORT} dport {to} blackhole"
                    rule("add", *drop.split())
                    undo.callback(rule, "del", *drop.split())
            yield

    def _rule(self, family: str, *words: str) -> None:
        self.run(["ip", family, "rule", *words])

    # --- files, folders and disks -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hide(self, path: str | Path) -> Iterator[None]:
        """The file or folder isn't there; in /proc and /sys, where names can't go, it is empty."""
        path = Path(path).absolute()
        if not (path.exists() or path.is_symlink()):
            raise ValueError(f"can't hide {path}: there is no such file or folder")
        if path.parts[1] in ("proc", "sys"):
            empty = self.scratch()
            empty.mkdir() if path.is_dir() else empty.touch()
            with self.bound(empty, path):
                yield
        else:
            with self.covered(path.parent, without=path.name):
                yield

    no_python = hide
    missing_directory = hide

    @contextlib.contextmanager
    def replace_file(self, path: str | Path, text: str) -> Iterator[None]:
        """Other content at the same path, also in /proc and /sys; a file that isn't there appears."""
        path, source = Path(path).absolute(), self.scratch()
        source.write_text(text)
        with contextlib.ExitStack() as undo:
            if path.exists():
                source.chmod(path.stat().st_mode & 0o777)
            else:
                undo.enter_context(self.covered(path.parent))
                self.run(["touch", str(path)])
            undo.enter_context(self.bound(source, path))
            yield

    other_file = replace_file

    @contextlib.contextmanager
    def other_version(self, package: str, version: str) -> Iterator[None]:
        """The package of this Python says that it has another version."""
        files = importlib.metadata.distribution(package).files or []
        metadata = next(file for file in files if file.name == "METADATA").locate()
        text = re.sub(r"(?m)^Version: .*$", f"Version: {version}", Path(metadata).read_text(), count=1)
        with self.replace_file(Path(metadata), text):
            yield

    def full_disk(self, path: str | Path) -> AbstractContextManager[None]:
        """The folder lies on a disk without a free byte."""
        return self.covered(Path(path).absolute(), fill="bytes")

    def no_inodes(self, path: str | Path) -> AbstractContextManager[None]:
        """The folder lies on a disk with free bytes and no free inode."""
        return self.covered(Path(path).absolute(), size="8m,nr_inodes=4096", fill="inodes")

    # --- clock and limits ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def clock_skew(self, seconds: float = 30) -> Iterator[None]:
        """The wall clock is so far ahead in its new sessions and commands, for all who ask the C library."""
        library = self.cluster / "clock_skew.so"
        if not library.exists():
            subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, CLOCK_SOURCE], check=True)
        skewed = {"LD_PRELOAD": str(library), "CLOCK_SKEW_S": str(seconds)}
        self.environment |= skewed
        try:
            with self.at_login("export " + " ".join(f"{name}={value}" for name, value in skewed.items())):
                yield
        finally:
            for name in skewed:
                self.environment.pop(name)

    def low_limits(self, memlock: int | None = None, nofile: int | None = None) -> AbstractContextManager[None]:
        """New ssh sessions may lock so many bytes of memory and open so many files."""
        limits = [f"ulimit -l {memlock // 1024}"] if memlock is not None else []
        limits += [f"ulimit -n {nofile}"] if nofile is not None else []
        return self.at_login("; ".join(limits))


# Name on a command line, what does it, the type of its value, the default value; without a type there is no value.
FAULTS: dict[str, tuple[Callable[..., AbstractContextManager[Any]], Callable[[str], Any] | None, Any]] = {
    "sshd-down": (NamespaceHost.sshd_down, None, None),
    "wrong-host-key": (NamespaceHost.wrong_host_key, None, None),
    "unknown-host-key": (NamespaceHost.unknown_host_key, None, None),
    "no-login": (NamespaceHost.no_login, None, None),
    "slow-login": (NamespaceHost.slow_login, float, 60.0),
    "lying-host": (NamespaceHost.lying_host, None, None),
    "link-down": (NamespaceHost.link_down, None, None),
    "blackhole": (NamespaceHost.blackhole, None, None),
    "no-tcp": (NamespaceHost.no_tcp, str, "1024-65535"),
    "limit": (NamespaceHost.limit, float, 100.0),
    "no-python": (NamespaceHost.no_python, str, "/usr/bin/python3"),
    "missing-directory": (NamespaceHost.missing_directory, str, None),
    "hide": (NamespaceHost.hide, str, None),
    "full-disk": (NamespaceHost.full_disk, str, "/tmp"),
    "no-inodes": (NamespaceHost.no_inodes, str, "/tmp"),
    "clock-skew": (NamespaceHost.clock_skew, float, 30.0),
    "low-memlock": (lambda host, limit: host.low_limits(memlock=limit), int, 65536),
    "low-nofile": (lambda host, limit: host.low_limits(nofile=limit), int, 256),
}


def fault(host: NamespaceHost, words: str) -> AbstractContextManager[Any]:
    """The fault that "name" or "name=value" tells. ValueError: no such fault, or not its value."""
    name, equals, value = words.partition("=")
    if name not in FAULTS:
        raise ValueError(f"no fault {name!r}; there are {', '.join(FAULTS)}")
    act, convert, default = FAULTS[name]
    if convert is None:
        if equals:
            raise ValueError(f"{name} takes no value")
        return act(host)
    if not equals and default is None:
        raise ValueError(f"{name} needs a value: {name}=VALUE")
    return act(host, convert(value) if equals else default)
