"""OpenSSH as the user has configured it: which command reaches a host, and what its complaints mean."""

from __future__ import annotations

import glob
import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.hosts.models import Host

# ssh's own exit status, where it isn't that of the command on the host (ssh(1)).
SSH_FAILED = 255
_CONNECT_TIMEOUT_S = 10
# A connection whose other end is silent for so long is given up (ssh_config(5)): 3 times 5 seconds.
_ALIVE_INTERVAL_S, _ALIVE_COUNT = 5, 3
_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
_MAX_INCLUDES = 16  # ssh's own limit of depth
_NO_FORWARDINGS = "ClearAllForwardings=yes"


@dataclass(frozen=True)
class SshSettings:
    """What the job spec says about ssh; None leaves it to the user's own configuration.

    Attributes:
        user: login name on hosts that have none of their own.
        port: of the hosts' sshd.
        identity_file: absolute path of the private key.
        config: absolute path of an ssh configuration in the place of the user's own.
    """

    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    config: str | None = None


def ssh_command(host: Host, settings: SshSettings, command: str) -> list[str]:
    """Give ssh's argv for a command line on a host, which the login shell there reads.

    It never asks anything. Whether host keys are checked is for the user's own configuration to say, and OpenSSH's own
    default is that they are.
    """
    argv = ["ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_TIMEOUT_S}"]
    argv += ["-o", f"ServerAliveInterval={_ALIVE_INTERVAL_S}", "-o", f"ServerAliveCountMax={_ALIVE_COUNT}"]
    # What other connections of the user's forward may clash with theirs; and no agent is for a host's administrator.
    argv += ["-o", _NO_FORWARDINGS, "-o", "ForwardAgent=no"]
    if settings.config:
        argv += ["-F", settings.config]
    if settings.port:
        argv += ["-p", str(settings.port)]
    if settings.identity_file:
        argv += ["-i", settings.identity_file]
    if user := host.user or settings.user:
        argv += ["-l", user]
    # A name that begins with a dash would be an option.
    return [*argv, "--", host.name, command]


def mentions_host_key_checks(config: str | None) -> bool:
    """Whether the user's ssh configuration says anything of checking host keys, for whichever hosts.

    Only then it has to be asked for each of them (``ssh -G``), which for many hosts takes seconds.

    Args:
        config: in the place of the user's own and the system's.
    """
    home = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"
    files = [Path(config)] if config else [home / "config", _SYSTEM_CONFIG]
    return any(_mentions(file, _SYSTEM_CONFIG.parent if file == _SYSTEM_CONFIG else home) for file in files)


def _mentions(file: Path, folder: Path, depth: int = 0) -> bool:
    """Also of the files that it includes; relative names count from ``folder`` (ssh_config(5))."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        keyword, *names = re.split(r"[\s=]+", line.strip())
        if keyword.lower() == "stricthostkeychecking":
            return True
        if keyword.lower() != "include":
            continue
        if depth >= _MAX_INCLUDES or any(set(name) & set("%$\"'\\") for name in names):
            # It can't be told what ssh would read.
            return True
        for name in names:
            pattern = str(folder / Path(name).expanduser())
            if any(_mentions(Path(found), folder, depth + 1) for found in glob.glob(pattern)):  # noqa: PTH207
                return True
    return False


def tunnel(argv: Sequence[str], port: int) -> list[str]:
    """The same connection without a command: it brings a host's connections to a loopback port to this machine's.

    Args:
        argv: what `ssh_command` gave.
        port: on both machines.
    """
    *words, end, host, _ = argv
    at = words.index(_NO_FORWARDINGS) - 1
    forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-R", f"127.0.0.1:{port}:127.0.0.1:{port}"]
    return [*words[:at], *forward, *words[at + 2 :], end, host]


@dataclass(frozen=True)
class SshFault:
    """Why a host can't be reached.

    Attributes:
        kind: ``name``, ``refused``, ``timeout``, ``unreachable``, ``host-key-unknown``, ``host-key-changed``,
            ``login``, ``key-file``, ``closed``, ``configuration``, ``no-ssh`` or ``other``.
        what: a sentence.
        fix: what to do.
    """

    kind: str
    what: str
    fix: str


# The first that is found in ssh's words counts: a changed host key, say, is followed by words that fit others too.
_FAULTS = (
    ("host-key-changed", r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
     "its host key isn't the one that is known",
     "if the host was set up anew, take the old key out with 'ssh-keygen -R {host}' and connect once by hand;"
     " if not, somebody may be in between"),
    ("host-key-unknown", r"No \S+ host key is known|Host key verification failed",
     "its host key isn't known",
     "connect once by hand with 'ssh {host}' and compare the key, or add it to ~/.ssh/known_hosts"),
    ("name", r"Could not resolve hostname", "its name can't be resolved",
     "correct the name, or add the host to DNS, /etc/hosts or ~/.ssh/config"),
    ("refused", r"Connection refused", "nothing listens on its ssh port",
     "start sshd there (systemctl start ssh), or set ssh.port"),
    ("timeout", r"timed out", "it doesn't answer on its ssh port",
     "see whether it runs and whether a firewall drops connections to its ssh port"),
    ("unreachable", r"No route to host|Network is unreachable", "there is no route to it",
     "see whether it runs and is on this network"),
    ("key-file", r"(UNPROTECTED PRIVATE KEY FILE|bad permissions|Load key .*: )",
     "the private key can't be used", "see 'ssh -v {host}'; a private key must be readable by its owner only"),
    ("login", r"Permission denied|Too many authentication failures",
     "it doesn't let this user in without a password",
     "put your public key there with 'ssh-copy-id {host}', or set ssh.user or ssh.identity_file"),
    ("configuration", r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad configuration",
     "the ssh configuration has a fault", "see 'ssh -G {host}'"),
    ("closed", r"Connection (closed|reset)|kex_exchange_identification|Broken pipe",
     "it closed the connection before the login was done",
     "see sshd's log there; MaxStartups or a full disk does this"),
)  # fmt: skip


def explain(host: str, words: str) -> SshFault:
    """What ssh's words on standard error mean, where it ended with `SSH_FAILED`."""
    for kind, pattern, what, fix in _FAULTS:
        if re.search(pattern, words):
            return SshFault(kind, what, fix.format(host=host))
    return SshFault("other", f"ssh ended with an error{last_words(words)}", f"see 'ssh -v {host}'")


def last_words(words: str) -> str:
    """The last line of what a program said, with a colon before it, for the end of a sentence; empty without one."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""
