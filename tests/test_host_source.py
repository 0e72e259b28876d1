"""Hosts of an elastic job, read again while it runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hvdtrain.hosts.models import Host
from hvdtrain.plan.plan import ElasticPlan
from hvdtrain.supervise import host_source
from hvdtrain.supervise.host_source import DISCOVERY_INTERVAL_S, HostSource


class Source:
    """A source in a folder, and what it has told."""

    def __init__(self, folder: Path, hostfile: Path | None = None, discovery: tuple[str, ...] | None = None) -> None:
        plan = ElasticPlan(1, 8, {"localhost": 2}, str(hostfile) if hostfile else None, discovery, 10, 600)
        self.told: list[str] = []
        self._source = HostSource(plan, str(folder), dict(os.environ), self.told.append)
        self._now = 0.0

    def slots(self) -> int:
        """After the next answer of a program, where there is one."""
        self._now += DISCOVERY_INTERVAL_S
        self._source.hosts(self._now)
        while (program := self._source._program) is not None and program.poll() is None:
            time.sleep(0.01)
        return sum(host.slots for host in self._source.hosts(self._now).values())

    def close(self) -> None:
        self._source.close()


def test_without_a_source_the_slots_stay(tmp_path: Path) -> None:
    assert Source(tmp_path).slots() == 2


def test_a_hostfile_that_is_edited(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=3\n")
    source = Source(tmp_path, hostfile)
    assert source.slots() == 3
    hostfile.write_text("localhost slots=5  # more\n")
    assert source.slots() == 5
    hostfile.write_text("localhost slot=6\n")
    assert source.slots() == 5
    assert source.slots() == 5
    hostfile.unlink()
    assert source.slots() == 5
    assert [text.partition(": ")[0] for text in source.told] == ["the hosts stay as they were"] * 2
    assert "did you mean 'slots'?" in source.told[0]


def test_hosts_that_come_are_chosen_like_the_first(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node1 slots=1\nnode2 slots=2\nnode3 slots=3\n")
    plan = ElasticPlan(1, 8, {"node1": 1}, str(hostfile), None, 10, 600, include=("node[1-3]",), exclude=("node3",))
    source = HostSource(plan, str(tmp_path), dict(os.environ), print)
    assert list(source.hosts(0)) == ["node1", "node2"]
    # A host that is included needn't be there at every moment.
    hostfile.write_text("node2 slots=2\nnode3 slots=3\nnode4 slots=4\n")
    assert list(source.hosts(1)) == ["node2"]


def test_hosts_by_name_in_their_order(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=3\nada@far-away slots=4\n")
    hosts = Source(tmp_path, hostfile)._source.hosts(0)
    assert list(hosts.values()) == [Host("localhost", 3), Host("far-away", 4, user="ada")]


def test_a_program_that_prints_hosts(tmp_path: Path) -> None:
    (tmp_path / "now").write_text("# at the moment\nlocalhost:4\n")
    source = Source(tmp_path, discovery=("cat", "now"))
    assert source.slots() == 4
    (tmp_path / "now").write_text("")
    assert source.slots() == 4
    (tmp_path / "now").unlink()
    assert source.slots() == 4
    assert source.told[0].startswith("the hosts stay as they were: ")
    assert source.told[1] == "elastic.discovery ended with exit status 1"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    source = Source(tmp_path, discovery=("no-such-program",))
    assert source.slots() == 2
    assert source.told == ["elastic.discovery can't be started: No such file or directory: no-such-program"]


def test_a_program_that_gives_no_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_source, "DISCOVERY_TIMEOUT_S", 0.0)
    source = Source(tmp_path, discovery=("sleep", "1000"))
    source._source.hosts(100)
    program = source._source._program
    assert program
    source._source.hosts(100)
    assert program.returncode == -9
    assert source.told == ["elastic.discovery gave no answer within 0 s"]


def test_a_program_is_ended_with_the_job(tmp_path: Path) -> None:
    source = Source(tmp_path, discovery=("sleep", "1000"))
    source._source.hosts(100)
    program = source._source._program
    assert program
    source.close()
    assert program.returncode == -9
