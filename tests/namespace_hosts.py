"""Several hosts on one machine: network namespaces with a host name, an address and an sshd each. Needs root."""

import contextlib
import fcntl
import ipaddress
import json
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bare_host import PATIENCE_S, SSHD, call
from host_faults import NamespaceHost

TAG = re.compile(r"hvdtrain-(\d+)-(\d+)-(\d+)")  # subnet, owner's pid, owner's start time
LOCK = Path("/run/hvdtrain-hosts.lock")  # holds the limits that were changed, as they were
LIMITS = [Path(f"/proc/sys/net/{ip}/neigh/default/gc_thresh{n}") for ip in ("ipv4", "ipv6") for n in (2, 3)]
GROUP = 231_000_000  # plus the subnet: the links of one cluster, which go in one step
MOST_HOSTS = 1000  # a bridge has 1023 ports, a /22 1022 addresses


def why_no_hosts() -> str | None:
    """Why this machine can't have namespace hosts; None if it can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen", SSHD) if not shutil.which(tool)]
    return f"not installed: {', '.join(missing)}" if missing else None


def _started(pid: int) -> int:
    """The process's start time in clock ticks since boot; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One process at a time brings a cluster into being or takes one away."""
    with LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Cluster:
    """Hosts h1 to hN, or with the names given, on one bridge; what it made is gone at its end.

    `launcher`: this machine gets an address on the bridge too, and reaches the hosts with `ssh -F cluster.ssh_config`.
    `interface_names`: of each host's link, eth0 by default. `decoy`: each host has a docker0 with the same address,
    which leads nowhere.
    A guard process ends a cluster whose owner was killed; what killed guards leave, the next cluster removes.
    """

    def __init__(
        self,
        count: int = 3,
        *,
        names: Sequence[str] = (),
        launcher: bool = False,
        ipv6_only: bool = False,
        interface_names: Sequence[str] = (),
        decoy: bool = True,
    ) -> None:
        self.names = list(names) or [f"h{i}" for i in range(1, count + 1)]
        if not 0 < len(self.names) <= MOST_HOSTS:
            raise ValueError(f"a cluster has 1 to {MOST_HOSTS} hosts, not {len(self.names)}")
        self.interfaces = list(interface_names) or ["eth0"] * len(self.names)
        self.launcher, self.ipv6_only, self.decoy = launcher, ipv6_only, decoy
        self.hosts = list[NamespaceHost]()

    def __enter__(self) -> "Cluster":
        self.sweep()
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not hasattr(self, "tag"):
            return
        _remove(self.tag)
        for process in [*(host.sshd for host in self.hosts if hasattr(host, "sshd")), self.guard]:
            process.kill()
            process.wait()

    @staticmethod
    def sweep() -> None:
        """Removes the clusters whose owner is gone."""
        folders = " ".join(path.name for path in Path(tempfile.gettempdir()).glob("hvdtrain-hosts-*"))
        with _locked():
            names = call("ip", "netns", "list") + call("ip", "link", "show") + folders
        for subnet, pid, start in set(TAG.findall(names.replace("hvdtrain-hosts-", "hvdtrain-"))):
            if _started(int(pid)) != int(start):
                _remove(f"hvdtrain-{subnet}-{pid}-{start}")

    def _up(self) -> None:
        self._claim_subnet()
        self.folder = _folder(self.tag)
        (self.folder / "home").mkdir(parents=True)
        self.folder.chmod(0o700)
        for key in ("host", "user"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        self.hosts = [
            NamespaceHost(
                name, str(self.network[i]), f"{self.tag}-{name}", f"hv{self.subnet}h{i}", self.folder, interface
            )
            for i, (name, interface) in enumerate(zip(self.names, self.interfaces, strict=True), 1)
        ]
        self._write_files()
        self._make_links()
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in self.hosts:
            host.start()
        for host in self.hosts:
            host.wait_listening()

    def _claim_subnet(self) -> None:
        """The bridge's name claims the subnet: two clusters can't both add it."""
        routes = [route["dst"] for route in json.loads(call("ip", "-j", "-4", "route"))]
        used = [ipaddress.ip_network(dst, strict=False) for dst in routes if dst[0].isdigit()]
        with _locked():
            for n in range(64):
                network = ipaddress.ip_network(f"10.231.{4 * n}.0/22")
                if any(other.overlaps(network) for other in used):
                    continue
                tag = f"hvdtrain-{n}-{os.getpid()}-{_started(os.getpid())}"
                mark = f"link set hv{n}b up alias {tag} group {GROUP + n}"
                with contextlib.suppress(subprocess.CalledProcessError):
                    _batch([f"link add hv{n}b type bridge", mark], stderr=subprocess.DEVNULL)
                    self.subnet, self.tag = n, tag
                    _make_room(len(self.names))
                    break
            else:
                raise RuntimeError("no subnet of 10.231.0.0/16 is free")
        self.network = ipaddress.ip_network(f"fdb8:e7:{n}::/64") if self.ipv6_only else network
        nothing: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.guard = subprocess.Popen([sys.executable, __file__, self.tag], start_new_session=True, **nothing)

    def _write_files(self) -> None:
        """What is the same on every host; /etc/netns is where `ip netns exec` takes a namespace's own /etc files."""
        pairs = [(host.name, host.address) for host in self.hosts]
        if self.launcher:
            self.address = str(self.network[MOST_HOSTS + 1])
            pairs.append(("launcher", self.address))
        addresses = "".join(f"{address} {name}\n" for name, address in pairs)
        user = pwd.getpwuid(os.geteuid())
        line = f"{user.pw_name}:x:{user.pw_uid}:{user.pw_gid}::{self.folder}/home:{user.pw_shell}\n"
        others = re.sub(rf"(?m)^{user.pw_name}:.*\n", "", Path("/etc/passwd").read_text())
        for host in self.hosts:
            (etc := Path("/etc/netns", host.namespace)).mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{addresses}")
            (etc / "passwd").write_text(line + others)
            host.prepare()
        public = (self.folder / "host.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"{host.name},{host.address} {public}" for host in self.hosts))
        self.ssh_config = self.folder / "ssh_config"
        self.ssh_config.write_text(
            "".join(f"Host {host.name}\n HostName {host.address}\n" for host in self.hosts)
            + f"Host *\n IdentityFile {self.folder}/user\n IdentitiesOnly yes\n"
            + f" UserKnownHostsFile {self.folder}/known_hosts\n"
        )

    def _make_links(self) -> None:
        bridge, prefix, nodad = f"hv{self.subnet}b", self.network.prefixlen, " nodad" if self.ipv6_only else ""
        outside = [f"addr add {self.address}/{prefix} dev {bridge}{nodad}"] if self.launcher else []
        for host in self.hosts:
            outside += [
                f"netns add {host.namespace}",
                f"link add {host.outer} type veth peer name {host.interface} netns {host.namespace}",
                f"link set {host.outer} master {bridge} up alias {self.tag} group {GROUP + self.subnet}",
            ]
        _batch(outside)
        for host in self.hosts:
            inside = ["link set lo up", f"link set {host.interface} up"]
            inside += [f"addr add {host.address}/{prefix} dev {host.interface}{nodad}"]
            if self.decoy:
                inside += ["link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"]
            _batch(inside, "-n", host.namespace)


def _folder(tag: str) -> Path:
    return Path(tempfile.gettempdir(), tag.replace("hvdtrain-", "hvdtrain-hosts-"))


def _batch(commands: list[str], *options: str, **streams: Any) -> None:
    text = "\n".join(commands) + "\n"
    subprocess.run(["ip", *options, "-batch", "-"], input=text, text=True, check=True, **streams)


def _remove(tag: str) -> None:
    """Ends the processes in the cluster's namespaces and removes all that carries its tag."""
    with _locked():
        namespaces = list(Path("/run/netns").glob(f"{tag}-*"))
        _end_processes({path.stat().st_ino for path in namespaces})
        subnet = tag.split("-")[1]
        bridge = json.loads(call("ip", "-j", "link", "show", "dev", f"hv{subnet}b", check=False) or "[]")
        if bridge and bridge[0].get("ifalias", tag) == tag:
            call("ip", "link", "del", "group", str(GROUP + int(subnet)), check=False)
            call("ip", "link", "del", f"hv{subnet}b", check=False)
        if namespaces:
            _batch([f"netns del {path.name}" for path in namespaces], "-force")
        if not any(Path("/sys/class/net").glob("hv*b")):
            _restore_room()
        for folder in [*Path("/etc/netns").glob(f"{tag}-*"), _folder(tag)]:
            shutil.rmtree(folder, ignore_errors=True)


def _make_room(hosts: int) -> None:
    """Lets each host know all others: the neighbour table's size holds for all namespaces together."""
    entries = 2 * hosts * hosts
    small = {str(path): path.read_text() for path in LIMITS if path.exists() and int(path.read_text()) < entries}
    LOCK.write_text(json.dumps(small | json.loads(LOCK.read_text() or "{}")))
    for path in small:
        Path(path).write_text(str(entries))


def _restore_room() -> None:
    for path, value in json.loads(LOCK.read_text() or "{}").items():
        Path(path).write_text(value)
    LOCK.write_text("")


def _end_processes(namespaces: set[int]) -> None:
    """Ends every process in these network namespaces, also those that appear meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while pids := [int(path.name) for path in Path("/proc").glob("[0-9]*") if _network(path) in namespaces]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of the hosts don't end: {pids}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _network(process: Path) -> int:
    try:
        return (process / "ns/net").stat().st_ino
    except OSError:
        return 0


def guard(tag: str) -> None:
    """Waits for the end of the cluster's owner, then removes what it left."""
    pid, start = map(int, tag.split("-")[2:])
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(pid)
        if _started(pid) == start:
            select.select([owner], [], [])
    _remove(tag)


if __name__ == "__main__":
    guard(sys.argv[1])
