"""The probe runs the owners' tools within their time, tells what they say, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_tools
import pytest

from hvdtrain.probe import tools
from hvdtrain.remote.bootstrap import probe_command, probe_sources
from hvdtrain.remote.fanout import HostFailure, Session

LIMIT_S = 60.0
RDMA = {"device": "mlx5_0", "port": 1, "duration_s": 3, "limit_s": LIMIT_S}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In which programs are found before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@contextlib.contextmanager
def probes(*names: str, python: str = sys.executable) -> Iterator[Session]:
    commands = {name: ["sh", "-c", probe_command(python)] for name in names}
    with Session(commands, probe_sources()) as session:
        yield session


def ask(session: Session, host: str, verb: str, **request: Any) -> dict[str, Any]:
    answer = session.ask({host: {"ask": verb, **request}}, 2 * LIMIT_S)[host]
    assert isinstance(answer, dict), answer
    return answer


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while alive(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.01)
    return path.read_text()


def hanging(pids: Path) -> str:
    """A program that starts another one, writes both their pids, and ends of itself long after the test."""
    script = "import os, signal, subprocess\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += f"child = subprocess.Popen(['sleep', '1000'])\nopen({str(pids)!r}, 'w').write("
    return script + "f'{os.getpid()} {child.pid}\\n')\nprint('begun', flush=True)\nchild.wait()\n"


def test_a_tool_s_output_and_status_are_told(folder: Path) -> None:
    fake_tools.install(folder, "nvidia-smi", "import sys\nsys.stderr.write('no ')\nprint(sys.argv[1:])\nsys.exit(9)\n")
    answer = tools.tool({"name": "nvidia-smi", "limit_s": LIMIT_S})
    assert answer == {"exit_status": 9, "output": "no ['-q', '-x']\n"}


def test_a_tool_that_a_signal_ends(folder: Path) -> None:
    fake_tools.install(folder, "dcgmi", "import os\nos.kill(os.getpid(), 11)\n")
    assert tools.tool({"name": "dcgmi", "limit_s": LIMIT_S}) == {"exit_status": 139, "output": ""}


def test_a_tool_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.tool({"name": "dcgmi", "limit_s": LIMIT_S}) == {"absent": True}
    assert tools.ib_write_bw_serve(RDMA) == {"absent": True}
    assert tools.ib_write_bw({**RDMA, "tcp_port": 1, "address": "127.0.0.1"}) == {"absent": True}


def test_no_end_of_output_costs_no_memory(folder: Path) -> None:
    fake_tools.install(folder, "dcgmi", "print(3_000_000 * 'x')\n")
    answer = tools.tool({"name": "dcgmi", "limit_s": LIMIT_S})
    assert answer["output"] == (1 << 20) * "x"


def test_a_tool_that_hangs_is_ended_with_what_it_started(folder: Path, tmp_path: Path) -> None:
    fake_tools.install(folder, "dcgmi", hanging(tmp_path / "pids"))
    limit_s = 0.15
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        # On a busy machine it may not even have begun.
        limit_s *= 2
        assert tools.tool({"name": "dcgmi", "limit_s": limit_s}) == {"error": f"dcgmi did not end within {limit_s:g} s"}
    for pid in wait_for(tmp_path / "pids").split():
        wait_until_gone(int(pid))


def test_what_a_tool_left_behind_ends_with_it(folder: Path, tmp_path: Path) -> None:
    script = f"import subprocess\npid = subprocess.Popen(['sleep', '1000']).pid\nopen({str(tmp_path / 'pid')!r}, 'w')"
    fake_tools.install(folder, "dcgmi", f"{script}.write(f'{{pid}}\\n')\n")
    assert tools.tool({"name": "dcgmi", "limit_s": LIMIT_S})["exit_status"] == 0
    wait_until_gone(int(wait_for(tmp_path / "pid")))


def test_a_tool_ends_with_the_probe_however_that_ends(folder: Path, tmp_path: Path) -> None:
    fake_tools.install(folder, "nvidia-smi", hanging(tmp_path / "pids"))
    with subprocess.Popen(
        ["sh", "-c", probe_command(sys.executable)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as probe:
        assert probe.stdin is not None
        probe.stdin.write(probe_sources() + b'{"id": 1, "ask": "tool", "name": "nvidia-smi", "limit_s": 1000}\n')
        probe.stdin.flush()
        pids = [int(pid) for pid in wait_for(tmp_path / "pids").split()]
        assert all(map(alive, pids))
        probe.kill()
    for pid in pids:
        wait_until_gone(pid)


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "mlx5_0;reboot"},
        {"device": "--help"},
        {"device": ""},
        {"device": 5},
        {"port": "1"},
        {"port": 0},
        {"port": True},
        {"gid_index": -1},
        {"duration_s": 1e9},
        {"duration_s": 2},
        {"limit_s": 0},
        {"limit_s": float("nan")},
        {"limit_s": 1e9},
        {"tcp_port": 70000},
        {"address": "-h"},
        {"address": "localhost"},
        {"address": "::1"},
    ],
)
def test_only_data_gets_onto_a_command_line(folder: Path, wrong: dict[str, Any]) -> None:
    fake_tools.install(folder, "ib_write_bw", "open('/dev/null')\n")
    with pytest.raises(ValueError, match=r" is .*\b(not|no)\b"):
        tools.ib_write_bw({**RDMA, "tcp_port": 18515, "address": "127.0.0.1", **wrong})


def test_other_programs_are_not_run() -> None:
    with probes("host") as session:
        outcome = session.ask({"host": {"ask": "tool", "name": "reboot", "limit_s": 1}}, LIMIT_S)["host"]
    assert isinstance(outcome, HostFailure)
    assert outcome.kind == "refused"


def test_two_hosts_measure_with_each_other(folder: Path) -> None:
    fake_tools.install(folder, "ib_write_bw", fake_tools.ib_write_bw({"mlx5_0": "196.30", "mlx5_1": "fails"}))
    with probes("one", "other") as session:
        port = ask(session, "other", "ib-write-bw-serve", **RDMA)["port"]
        answer = ask(session, "one", "ib-write-bw", **RDMA, gid_index=3, address="127.0.0.1", tcp_port=port)
        assert answer == {"id": answer["id"], "bit_per_s": pytest.approx(196.3e9)}
        again = ask(session, "one", "ib-write-bw", **RDMA, address="127.0.0.1", tcp_port=port)
        assert "refused" in again["error"]
        port = ask(session, "other", "ib-write-bw-serve", **RDMA)["port"]
        failing = {**RDMA, "device": "mlx5_1"}
        answer = ask(session, "one", "ib-write-bw", **failing, address="127.0.0.1", tcp_port=port)
        assert answer["error"] == "Unable to Connect the HCA's through the link"


def test_a_server_that_ends_at_once_says_why(folder: Path) -> None:
    # As perftest 4.5 does on a machine without an adapter.
    said = (
        " Did not detect devices \n If device exists, check if driver is up\n Unable to find the Infiniband/RoCE device"
    )
    fake_tools.install(folder, "ib_write_bw", fake_tools.saying(said, 1))
    answer = tools.ib_write_bw_serve(RDMA)
    assert answer["error"].endswith("Unable to find the Infiniband/RoCE device")


def test_a_server_without_a_client_ends_at_its_limit(folder: Path, tmp_path: Path) -> None:
    script = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
    fake_tools.install(folder, "ib_write_bw", script + fake_tools.ib_write_bw({}))
    limit_s = 0.2
    while "port" not in tools.ib_write_bw_serve({**RDMA, "limit_s": limit_s}):
        # On a busy machine it may have had too little time to begin.
        limit_s *= 2
        assert limit_s < LIMIT_S
    wait_until_gone(int(wait_for(tmp_path / "pid")))


def test_numbers_of_the_table_are_found_among_remarks() -> None:
    table = (
        " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
        "Conflicting CPU frequency values detected: 1500.000000 != 3300.016000. CPU Frequency is not max.\n"
        " 65536      560845           0.00               98.02                0.186950\n"
    )
    assert [row.group(1) for row in tools._ROW.finditer(table)] == ["98.02"]


@pytest.mark.skipif(shutil.which("python3.8") is None, reason="no Python 3.8")
def test_it_runs_on_the_oldest_python(folder: Path) -> None:
    old = subprocess.run(["python3.8", "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
    if old.returncode:
        pytest.skip("no Python 3.8")
    fake_tools.install(folder, "dcgmi", fake_tools.saying("{}"))
    with probes("host", python=old.stdout.strip()) as session:
        software = ask(session, "host", "facts", sections=["software"])["facts"]["software"]
        assert software["python_version"].startswith("3.8.")
        assert ask(session, "host", "tool", name="dcgmi", limit_s=LIMIT_S)["output"] == "{}\n"
