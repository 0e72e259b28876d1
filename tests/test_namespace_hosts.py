"""The namespace hosts are real hosts, and nothing of them is left."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from namespace_hosts import LIMITS, Cluster

pytestmark = pytest.mark.hosts

HERE = Path(__file__).parent
OWNER = "from namespace_hosts import *\nwith Cluster(2) as c:\n print(c.tag, flush=True)\n time.sleep(600)"
SEND = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], 5001))
end = time.monotonic() + 3
while time.monotonic() < end: s.sendall(bytes(65536))
"""
# Takes its time to end.
ANSWERS = """
import os, signal, sys, time
def end(*_):
    time.sleep(1)
    sys.exit(9)
signal.signal(signal.SIGINT, end)
print(os.path.basename(os.path.dirname(os.environ["HOME"])).replace("hosts-", ""), flush=True)
time.sleep(600)
"""
# Every host answers that nothing listens on this port.
MEET = """
import socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 9), timeout=60)
    except ConnectionRefusedError:
        pass
"""
# Prints its measured rate in Mbit/s between the first and the last byte.
RECEIVE = """
import socket, time
server = socket.create_server(("", 5001), family=socket.AF_INET)
print("listening", flush=True)
s = server.accept()[0]
s.recv(1 << 20)
start, total, last = time.monotonic(), 0, 0
while data := s.recv(1 << 20):
    total, last = total + len(data), time.monotonic()
print(total * 8 / 1e6 / (last - start))
"""


def left(tag: str) -> bool:
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    folders = [
        *Path("/etc/netns").glob(f"{tag}*"),
        *Path(tempfile.gettempdir()).glob(tag.replace("hvdtrain-", "hvdtrain-hosts-")),
    ]
    return tag in links + names or bool(folders)


def until(condition: Callable[[], bool], limit_s: float = 180) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ssh(cluster: Cluster, host: str, command: str = "true", timeout_s: int = 60) -> subprocess.CompletedProcess[str]:
    """From the first host to the host."""
    argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout_s}", host, command]
    return cluster.hosts[0].run(argv, check=False, capture_output=True, text=True, timeout=180)


def mbit(cluster: Cluster) -> float:
    """What the first host really sends to the second, Mbit/s."""
    receiver = cluster.hosts[1].popen([sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    cluster.hosts[0].run([sys.executable, "-c", SEND, cluster.hosts[1].address])
    return float(receiver.communicate(timeout=180)[0])


def test_ssh_between_hosts_and_nothing_left() -> None:
    with Cluster(3) as one, Cluster(2) as two:
        assert ssh(one, "h3", "hostname").stdout == "h3\n"
        assert one.hosts[0].address != two.hosts[0].address
    for cluster in (one, two):
        assert not left(cluster.tag)


def test_home_of_a_session_is_the_hosts_own() -> None:
    with Cluster(2) as cluster:
        home = cluster.hosts[0].home
        assert ssh(cluster, "h2", "pwd && touch mark").stdout.strip() == str(home)
        assert ssh(cluster, "h2", "ls").stdout == "mark\n"
        assert ssh(cluster, "h1", "ls").stdout == ""
        assert cluster.hosts[1].run(["sh", "-c", "ls $HOME"], capture_output=True, text=True).stdout == "mark\n"


def test_launcher_outside_the_hosts() -> None:
    with Cluster(names=["node-a", "node-b"], launcher=True) as cluster:
        for host in ("node-a", cluster.hosts[1].address):
            argv = [
                "ssh",
                "-F",
                str(cluster.ssh_config),
                "-o",
                "BatchMode=yes",
                host,
                "hostname; getent hosts launcher",
            ]
            said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
            assert said == ["node-a" if host == "node-a" else "node-b", cluster.address, "launcher"]


def test_ipv6_only_with_other_interface_names_and_no_decoy() -> None:
    with Cluster(2, ipv6_only=True, interface_names=["ens3", "enp1s0"], decoy=False) as cluster:
        assert ssh(cluster, "h2", "hostname").stdout == "h2\n"
        show = cluster.hosts[1].run(["ip", "-j", "addr"], capture_output=True, text=True).stdout
        assert [link["ifname"] for link in json.loads(show)] == ["lo", "enp1s0"]
        families = {address["family"] for link in json.loads(show)[1:] for address in link["addr_info"]}
        assert families == {"inet6"}


def test_limit_is_real_and_undone() -> None:
    with Cluster(2) as cluster:
        with cluster.hosts[1].limit(100):
            assert mbit(cluster) == pytest.approx(100, rel=0.1)
        assert mbit(cluster) > 300
        cluster.hosts[0].limit(50)
        assert mbit(cluster) == pytest.approx(50, rel=0.1)


def test_all_ends_with_a_killed_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=HERE)
    assert owner.stdout is not None
    tag = owner.stdout.readline().strip()
    assert left(tag)
    namespace = Path("/run/netns", f"{tag}-h1").stat().st_ino
    session = subprocess.Popen(["ip", "netns", "exec", f"{tag}-h1", "sleep", "600"])
    until(lambda: Path(f"/proc/{session.pid}/ns/net").stat().st_ino == namespace)
    owner.kill()
    owner.wait()
    assert session.wait(180) == -9
    until(lambda: not left(tag))


def test_sweep_when_owner_and_guard_were_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=HERE)
    assert owner.stdout is not None
    tag = owner.stdout.readline().strip()
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    guard = next(int(pid) for pid in children if tag in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    os.kill(guard, 9)
    owner.kill()
    owner.wait()
    assert left(tag)
    Cluster.sweep()
    assert not left(tag)


def test_leftovers_of_another_on_the_same_subnet() -> None:
    with Cluster(2) as cluster:
        stale = Path(tempfile.gettempdir(), f"hvdtrain-hosts-{cluster.subnet}-{os.getpid()}-1")
        stale.mkdir()
        Cluster.sweep()
        assert not stale.exists()
        assert ssh(cluster, "h2").returncode == 0


def test_clusters_that_start_at_once_have_subnets_of_their_own() -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=HERE) for _ in range(4)
    ]
    tags = [owner.stdout.readline().strip() for owner in owners if owner.stdout is not None]
    assert len({tag.split("-")[1] for tag in tags}) == 4
    for owner in owners:
        owner.kill()
        owner.wait()
    until(lambda: not any(map(left, tags)))


@pytest.mark.parametrize(
    ("arguments", "status", "output"),
    [
        (["-n", "2", "--", "ssh", "h2", "hostname"], 0, "h2"),
        (["--", "sh", "-c", "exit 7"], 7, ""),
        (["--break", "h2:sshd-down,h3:slow-login=0", "--", "sh", "-c", "ssh h2; ssh h3 hostname"], 0, "refused|h3"),
        (["--break", "h9:sshd-down"], 2, "no host 'h9'"),
        (["--break", "h2:hide=/nothing"], 2, "there is no such file"),
        (["-n", "0"], 2, "1 to 1000"),
    ],
)
def test_the_command(arguments: list[str], status: int, output: str) -> None:
    done = subprocess.run([sys.executable, HERE.parent / "scripts/hosts", *arguments], capture_output=True, text=True)
    assert done.returncode == status
    assert all(part in done.stdout + done.stderr for part in output.split("|"))


def test_ctrl_c_is_answered_by_the_command() -> None:
    argv = [sys.executable, str(HERE.parent / "scripts/hosts"), "-n", "1", "--", sys.executable, "-c", ANSWERS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        tag = process.stdout.readline().strip()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(180) == 9
    assert not left(tag)


def test_the_command_without_root() -> None:
    argv = ["setpriv", "--reuid", "65534", "--clear-groups", "/usr/bin/python3", str(HERE.parent / "scripts/hosts")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "hosts: hosts in network namespaces need root\n")


def test_64_hosts() -> None:
    alone = not any(Path("/sys/class/net").glob("hv*b"))
    before = [path.read_text() for path in LIMITS]
    start = time.monotonic()
    with Cluster(64) as cluster:
        print(f"64 hosts up in {time.monotonic() - start:.1f} s")
        start = time.monotonic()
        running = [cluster.hosts[0].popen(["ssh", host.name, "true"]) for host in cluster.hosts]
        assert [process.wait(180) for process in running] == [0] * 64
        print(f"64 ssh in {time.monotonic() - start:.1f} s")
        addresses = [host.address for host in cluster.hosts]
        meet = [host.popen([sys.executable, "-ISc", MEET, *addresses]) for host in cluster.hosts]
        assert [process.wait(180) for process in meet] == [0] * 64
    if alone and not any(Path("/sys/class/net").glob("hv*b")):
        assert [path.read_text() for path in LIMITS] == before
