"""Each fault of a namespace host really has its effect, on its host alone, and is undone."""

import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from host_faults import FAULTS, NamespaceHost, fault
from namespace_hosts import Cluster

pytestmark = pytest.mark.hosts

LISTEN = """
import socket, sys
servers = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("listening", flush=True)
sys.stdin.read()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def faulty(cluster: Cluster) -> Iterator[NamespaceHost]:
    """The second host; after the test it must be whole."""
    yield cluster.hosts[1]
    done = ssh(cluster, "echo whole", timeout_s=60)
    assert (done.stdout, done.stderr) == ("whole\n", "")


def ssh(cluster: Cluster, command: str, timeout_s: int = 2, host: str = "h2") -> subprocess.CompletedProcess[str]:
    """From the first host to the second."""
    argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout_s}", host, command]
    return cluster.hosts[0].run(argv, check=False, capture_output=True, text=True, timeout=180)


# --- ssh and network -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sshd-down", "Connection refused"),
        ("wrong-host-key", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
        ("unknown-host-key", "Host key verification failed"),
        ("no-login", "Permission denied (publickey"),
        ("link-down", "o route to host|timed out"),
        ("blackhole", "o route to host|timed out"),
        ("no-tcp=22", "timed out"),
    ],
)
def test_no_ssh(cluster: Cluster, faulty: NamespaceHost, name: str, message: str) -> None:
    with fault(faulty, name):
        done = ssh(cluster, "true")
        assert done.returncode == 255
        assert any(part in done.stderr for part in message.split("|"))
        assert ssh(cluster, "true", host="h1").returncode == 0


def test_link_of_blackhole_stays_up(faulty: NamespaceHost) -> None:
    carrier = ["cat", "/sys/class/net/eth0/carrier"]
    with faulty.blackhole():
        assert faulty.run(carrier, capture_output=True, text=True).stdout == "1\n"


def test_blackhole_keeps_the_limit(faulty: NamespaceHost) -> None:
    show = ["tc", "qdisc", "show", "dev", "eth0"]
    with faulty.limit(200), faulty.blackhole():
        pass
    assert "tbf" not in faulty.run(show, capture_output=True, text=True).stdout
    with faulty.limit(200):
        with faulty.blackhole():
            assert "rate 1Kbit" in faulty.run(show, capture_output=True, text=True).stdout
        assert "rate 200Mbit" in faulty.run(show, capture_output=True, text=True).stdout


def test_no_tcp_drops_its_ports_only(cluster: Cluster, faulty: NamespaceHost) -> None:
    def connects(port: int) -> bool:
        argv = [sys.executable, "-c", CONNECT, faulty.address, str(port)]
        return cluster.hosts[0].run(argv, check=False, stderr=subprocess.DEVNULL).returncode == 0

    command = [sys.executable, "-c", LISTEN, "2000", "2001", "40000"]
    with faulty.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        with faulty.no_tcp("2001", "30000-50000"):
            assert [connects(port) for port in (22, 2000, 2001, 40000)] == [True, True, False, False]
            back = faulty.run(["ssh", "-o", "BatchMode=yes", "h1", "hostname"], capture_output=True, text=True)
            assert back.stdout == "h1\n"
        assert connects(2001)
        assert listener.stdin is not None
        listener.stdin.close()


def test_no_tcp_and_blackhole_over_ipv6() -> None:
    with Cluster(2, ipv6_only=True) as cluster:
        for words in ("no-tcp=22", "blackhole"):
            with fault(cluster.hosts[1], words):
                assert ssh(cluster, "true").returncode == 255
            assert ssh(cluster, "true", timeout_s=60).returncode == 0


def test_slow_login(cluster: Cluster, faulty: NamespaceHost) -> None:
    with faulty.slow_login(3):
        start = time.monotonic()
        assert ssh(cluster, "echo 'a  b' \"$HOME\"", timeout_s=60).stdout == f"a  b {faulty.home}\n"
        assert time.monotonic() - start >= 3


def test_lying_host(cluster: Cluster, faulty: NamespaceHost) -> None:
    with faulty.lying_host('{"it\'s": \\ }'), cluster.hosts[0].popen(["ssh", "h2", "true"], stdout=-1) as talk:
        assert talk.stdout is not None
        assert {talk.stdout.readline() for _ in range(10000)} == {b'{"it\'s": \\ }\n'}
        talk.kill()


# --- files, folders and disks ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/kept").write_text("kept")
    (tmp_path / "with space").write_text("original")
    (tmp_path / "link").symlink_to("with space")
    return tmp_path


def listing(cluster: Cluster, folder: Path) -> list[str]:
    return ssh(cluster, f"ls {folder}").stdout.splitlines()


@pytest.mark.parametrize("name", ["sub", "with space", "link"])
def test_hidden(cluster: Cluster, faulty: NamespaceHost, folder: Path, name: str) -> None:
    names = sorted(path.name for path in folder.iterdir())
    with faulty.popen(["sh", "-c", f"read line; ls {folder}"], stdin=-1, stdout=-1, text=True) as before:
        with faulty.hide(folder / name):
            assert listing(cluster, folder) == [other for other in names if other != name]
            assert before.communicate("go\n")[0].splitlines() == [other for other in names if other != name]
            assert sorted(path.name for path in folder.iterdir()) == names
        assert listing(cluster, folder) == names


def test_two_hidden_and_others_still_shared(cluster: Cluster, faulty: NamespaceHost, folder: Path) -> None:
    with faulty.missing_directory(folder / "sub"), faulty.hide(folder / "link"):
        assert listing(cluster, folder) == ["with space"]
    with faulty.hide(folder / "link"):
        ssh(cluster, f"echo new > {folder}/sub/new")
    assert (folder / "sub/new").read_text() == "new\n"


def test_no_python(cluster: Cluster, faulty: NamespaceHost) -> None:
    assert ssh(cluster, f"{sys.executable} -c 'print(1)'").stdout == "1\n"
    with faulty.no_python(sys.executable):
        assert ssh(cluster, f"{sys.executable} -c 'print(1)'").returncode == 127
        assert ssh(cluster, f"{sys.executable} -c 'print(1)'", host="h1").stdout == "1\n"
    assert ssh(cluster, f"{sys.executable} -c 'print(1)'").stdout == "1\n"


@pytest.mark.parametrize("path", ["/proc/meminfo", "/proc/cpuinfo", "/proc/sys/kernel/osrelease", "/etc/os-release"])
def test_replaced_system_files(cluster: Cluster, faulty: NamespaceHost, path: str) -> None:
    with faulty.replace_file(path, "other\n"):
        assert ssh(cluster, f"cat {path}").stdout == "other\n"
        assert ssh(cluster, f"cat {path}", host="h1").stdout != "other\n"
    assert ssh(cluster, f"cat {path}").stdout != "other\n"


def test_replaced_and_new_files(cluster: Cluster, faulty: NamespaceHost, folder: Path) -> None:
    with faulty.other_file(folder / "with space", "other"), faulty.replace_file(folder / "new", "here"):
        assert ssh(cluster, f"cd {folder}; cat 'with space' new").stdout == "otherhere"
        assert (folder / "with space").read_text() == "original"
        assert not (folder / "new").exists()
    assert ssh(cluster, f"cd {folder}; cat 'with space'; ls").stdout.split() == ["originallink", "sub", "with", "space"]


def test_hidden_in_proc_is_empty(cluster: Cluster, faulty: NamespaceHost) -> None:
    with faulty.hide("/proc/cpuinfo"), faulty.hide("/sys/class/net"):
        assert ssh(cluster, "cat /proc/cpuinfo; ls /sys/class/net").stdout == ""


def test_other_version(cluster: Cluster, faulty: NamespaceHost) -> None:
    ask = f"{sys.executable} -c 'import importlib.metadata as m; print(m.version(\"click\"))'"
    with faulty.other_version("click", "1.2.3"):
        assert ssh(cluster, ask).stdout == "1.2.3\n"
    assert ssh(cluster, ask).stdout == f"{importlib.metadata.version('click')}\n"


@pytest.mark.parametrize("what", ["full-disk", "no-inodes"])
def test_full(cluster: Cluster, faulty: NamespaceHost, folder: Path, what: str) -> None:
    write = f"echo data > {folder}/new"
    free = f"stat -f -c '%a %d' {folder}; cat {folder}/sub/kept"
    with fault(faulty, f"{what}={folder}"):
        assert "No space left on device" in ssh(cluster, write).stderr
        blocks, inodes = ssh(cluster, free).stdout.splitlines()[0].split()
        assert (blocks == "0", inodes == "0") == (what == "full-disk", what == "no-inodes")
        assert ssh(cluster, free).stdout.splitlines()[1] == "kept"
    assert ssh(cluster, write).returncode == 0


# --- clock and limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [30.0, -3600.5])
def test_clock_skew(cluster: Cluster, faulty: NamespaceHost, seconds: float) -> None:
    ask = f"{sys.executable} -c 'import time; print(time.time())'; date +%s.%N"
    with faulty.clock_skew(seconds):
        before = time.time()
        for said in (ssh(cluster, ask).stdout, faulty.run(["sh", "-c", ask], capture_output=True, text=True).stdout):
            for clock in map(float, said.split()):
                assert before + seconds <= clock <= time.time() + seconds
    assert abs(float(ssh(cluster, ask).stdout.split()[0]) - time.time()) < 10


def test_low_limits(cluster: Cluster, faulty: NamespaceHost) -> None:
    before = ssh(cluster, "ulimit -l; ulimit -n").stdout
    with faulty.low_limits(memlock=65536, nofile=100):
        assert ssh(cluster, "ulimit -H -l; ulimit -n").stdout == "64\n100\n"
    assert ssh(cluster, "ulimit -l; ulimit -n").stdout == before


# --- names -----------------------------------------------------------------------------------------------------------


def test_several_faults_at_once_are_undone_in_any_order(cluster: Cluster, faulty: NamespaceHost) -> None:
    faults: list[AbstractContextManager[None]] = [
        faulty.slow_login(2),
        faulty.clock_skew(500),
        faulty.unknown_host_key(),
    ]
    for each in faults:
        each.__enter__()
    for each in faults:
        each.__exit__(None, None, None)
    assert abs(int(ssh(cluster, "date +%s").stdout) - time.time()) < 60


@pytest.mark.parametrize(
    ("words", "message"),
    [("earthquake", "no fault 'earthquake'; there are"), ("sshd-down=1", "takes no value"), ("hide", "needs a value")],
)
def test_wrong_names(faulty: NamespaceHost, words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fault(faulty, words)


def test_every_name_can_be_done_and_undone(faulty: NamespaceHost, tmp_path: Path) -> None:
    for name, (_, convert, default) in FAULTS.items():
        with fault(faulty, f"{name}={tmp_path}" if convert is str and default is None else name):
            pass
