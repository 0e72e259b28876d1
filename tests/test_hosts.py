"""Hostfiles and lists: what is read, and what each fault says."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import InputError, UsageError
from hvdtrain.hosts import local, resolve
from hvdtrain.hosts.hostfile import parse_hosts, read_hostfile
from hvdtrain.hosts.local import canonical, is_this_machine
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.select import select
from hvdtrain.spec.models import Hosts

ROOT = Path(__file__).parents[1]


def read(folder: Path, content: str | bytes) -> tuple[Host, ...]:
    path = folder / "hosts"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_hostfile(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a", [Host("a")]),
        ("a slots=4", [Host("a", 4)]),
        ("a slots = 4", [Host("a", 4)]),
        ("a:4", [Host("a", 4)]),
        ("a max_slots=4", [Host("a", 4, 4)]),
        ("a max-slots=4", [Host("a", 4, 4)]),
        ("a slots=2 max_slots=4", [Host("a", 2, 4)]),
        ("a:2 max_slots=4", [Host("a", 2, 4)]),
        ("a SLOTS=2", [Host("a", 2)]),
        ("a slots=08", [Host("a", 8)]),
        ("ada@a slots=2", [Host("a", 2, user="ada")]),
        ("ada@a:2", [Host("a", 2, user="ada")]),
        ("10.0.0.7 slots=8", [Host("10.0.0.7", 8)]),
        ("a.example.com:2", [Host("a.example.com", 2)]),
        ("[fe80::1]:2", [Host("fe80::1", 2)]),
        ("[2001:db8::7] slots=4", [Host("2001:db8::7", 4)]),
        ("[fe80::1%eth0]:2", [Host("fe80::1%eth0", 2)]),
        ("ada@[2001:db8::7]:4", [Host("2001:db8::7", 4, user="ada")]),
        ("node[01-03]:8", [Host("node01", 8), Host("node02", 8), Host("node03", 8)]),
        ("node[1,7-8] slots=2", [Host("node1", 2), Host("node7", 2), Host("node8", 2)]),
        ("r[1-2]n[1-2]", [Host("r1n1"), Host("r1n2"), Host("r2n1"), Host("r2n2")]),
        ("node[0-8/4]", [Host("node0"), Host("node4"), Host("node8")]),
        ("node[9-10].example.com", [Host("node9.example.com"), Host("node10.example.com")]),
        ("a:2,b:3", [Host("a", 2), Host("b", 3)]),
        ("a:2, b:3", [Host("a", 2), Host("b", 3)]),
        ("a, b slots=3", [Host("a", 3), Host("b", 3)]),
        ("n[1,2]:2,b", [Host("n1", 2), Host("n2", 2), Host("b")]),
        ("a\rb\n", [Host("a"), Host("b")]),
        ("# all\n\n  a slots=2 # the big one\n\t\n\tb\tslots=1\n", [Host("a", 2), Host("b", 1)]),
        ("a slots=2#no blank", [Host("a", 2)]),
        ("a slots=2\r\nb slots=1\r\n", [Host("a", 2), Host("b", 1)]),
        (b"\xef\xbb\xbfa slots=2\n", [Host("a", 2)]),
        ("worker_1 slots=1", [Host("worker_1", 1)]),
        ("localhost slots=2", [Host("localhost", 2)]),
    ],
)
def test_hostfiles_as_people_have_them(tmp_path: Path, content: str | bytes, expected: list[Host]) -> None:
    assert list(read(tmp_path, content)) == expected


LIST_IT_ONCE = "list it once, with all its slots"
DIFFERENT_LENGTHS = "have different lengths; with leading zeros, write such as 001-100 or 01-99,100"
A_LINE_IS = "isn't understood here; a line is 'host slots=N max_slots=N # comment'"
BAD = [
    ("a slots=0", "1:9: slots is 0; it must be from 1 to 10000"),
    ("a slots=-1", "1:9: '-1' isn't a number of slots"),
    ("a slots=two", "1:9: 'two' isn't a number of slots"),
    ("a slots=1.5", "1:9: '1.5' isn't a number of slots"),
    ("a slots=²", "1:9: '²' isn't a number of slots"),
    ("a slots=", "1:9: a number is missing after 'slots='"),
    ("a slots=99999", "1:9: slots is 99999; it must be from 1 to 10000"),
    ("a slots=99999999999999999999", "1:9: slots is 99999999999999999999; it must be from 1 to 10000"),
    ("a max_slots=0", "1:13: max_slots is 0; it must be from 1 to 10000"),
    ("a max_slots=x", "1:13: 'x' isn't a number of slots"),
    ("a slots=4 max_slots=2", "1:21: max_slots is 2, less than the 4 slots"),
    ("a:4 max_slots=2", "1:15: max_slots is 2, less than the 4 slots"),
    ("a sluts=4", "1:3: unknown word 'sluts'; did you mean 'slots'?"),
    ("  a slot=4", "1:5: unknown word 'slot'; did you mean 'slots'?"),
    ("a maxslots=4", "1:3: unknown word 'maxslots'; did you mean 'max_slots'?"),
    ("a gpus=4", "1:3: unknown word 'gpus'; known are 'slots' and 'max_slots'"),
    ("a 4", f"1:3: '4' {A_LINE_IS}"),
    ("a slots 4", f"1:3: 'slots' {A_LINE_IS}"),
    ("a b", f"1:3: 'b' {A_LINE_IS}"),
    ("us er@a", f"1:4: 'er@a' {A_LINE_IS}"),
    ("a slots=2 slots=3", "1:11: 'slots' is given twice"),
    ("a:2 slots=3", "1:11: the slots of 'a' are given twice, by ':' and by 'slots='"),
    ("a:0", "1:3: slots is 0; it must be from 1 to 10000"),
    ("a:", "1:3: a number is missing after ':'"),
    ("a:x", "1:3: 'x' isn't a number of slots"),
    ("fe80::1", "1:1: 'fe80::1' has several colons; an IPv6 address goes in brackets: [fe80::1]"),
    ("ada@fe80::1", "1:5: 'fe80::1' has several colons; an IPv6 address goes in brackets: [fe80::1]"),
    ("[fe80::1", "1:1: '[fe80::1' isn't an IPv6 address in brackets, such as [fe80::1]:2"),
    ("[fe80::zz]:2", "1:1: '[fe80::zz]:2' isn't an IPv6 address in brackets, such as [fe80::1]:2"),
    ("[1:2:3]:2", "1:1: '1:2:3' isn't an IPv6 address"),
    ("[fe80::1]x", "1:10: 'x' isn't understood after the address"),
    ("[fe80::1]:", "1:11: a number is missing after ':'"),
    ("a slots=2\n\n# b\na slots=3", f"4:1: host 'a' was already listed in line 1; {LIST_IT_ONCE}"),
    ("a\nA", f"2:1: host 'A' was already listed in line 1; {LIST_IT_ONCE}"),
    ("a.b\na.b.", f"2:1: host 'a.b.' was already listed in line 1; {LIST_IT_ONCE}"),
    ("a,b,a", f"1:5: host 'a' was already listed in the same line; {LIST_IT_ONCE}"),
    ("node[1-3]\nnode2", f"2:1: host 'node2' was already listed in line 1; {LIST_IT_ONCE}"),
    ("localhost\n127.0.0.1", f"2:1: '127.0.0.1' and 'localhost' (in line 1) are both this machine; {LIST_IT_ONCE}"),
    ("[::1]:2,localhost", f"1:9: 'localhost' and '::1' (in the same line) are both this machine; {LIST_IT_ONCE}"),
    ("localhost\n0.0.0.0", f"2:1: '0.0.0.0' and 'localhost' (in line 1) are both this machine; {LIST_IT_ONCE}"),
    (
        "localhost\n[::ffff:127.0.0.1]",
        f"2:1: '::ffff:127.0.0.1' and 'localhost' (in line 1) are both this machine; {LIST_IT_ONCE}",
    ),
    ("[2001:db8::7]\n[2001:DB8:0::7]", f"2:1: host '2001:DB8:0::7' was already listed in line 1; {LIST_IT_ONCE}"),
    ("a,,b", "1:3: an empty item in the list of hosts"),
    ("a,", "1:3: an empty item in the list of hosts"),
    ("a, ,b", "1:4: an empty item in the list of hosts"),
    ("a, slots=2", "1:4: 'slots=2' isn't a host name"),
    ("node[01-16", "1:1: 'node[01-16' isn't a range of hosts such as node[01-16]"),
    ("node[]", "1:1: 'node[]' isn't a range of hosts such as node[01-16]"),
    ("node[a-b]", "1:1: 'node[a-b]' isn't a range of hosts such as node[01-16]"),
    ("node[1-2-3]", "1:1: 'node[1-2-3]' isn't a range of hosts: '1-2-3' is neither a number nor first-last"),
    ("node[16-01]", "1:1: 'node[16-01]' isn't a range of hosts: '16-01' ends before it starts"),
    ("node[1-4/0]", "1:1: 'node[1-4/0]' isn't a range of hosts: '1-4/0' has a step of 0"),
    ("node[1-99999999]", "1:1: 'node[1-99999999]' stands for 99999999 hosts; the limit is 10000"),
    ("node[01-100]", f"1:1: 'node[01-100]' isn't a range of hosts: '01' and '100' {DIFFERENT_LENGTHS}"),
    ("node[9-010]", f"1:1: 'node[9-010]' isn't a range of hosts: '9' and '010' {DIFFERENT_LENGTHS}"),
    (".n[1-2]", "1:1: '.n[1-2]' isn't a range of hosts such as node[01-16]"),
    ("[1-3]:2", "1:1: '1' is neither a host name nor an IPv4 address"),
    ("4", "1:1: '4' is neither a host name nor an IPv4 address"),
    ("10.0.0.300", "1:1: '10.0.0.300' is neither a host name nor an IPv4 address"),
    ("10.0.7:2", "1:1: '10.0.7' is neither a host name nor an IPv4 address"),
    ("n" * 254, "1:1: a host name of 254 characters; the limit is 253"),
    ("a[1-9000],b[1-9000]", "1:1: more than 10000 hosts"),
    ("n[1-100][1-200]", "1:1: 'n[1-100][1-200]' stands for 20000 hosts; the limit is 10000"),
    ("-oProxyCommand=x", "1:1: '-oProxyCommand=x' isn't a host name"),
    ("a;b", "1:1: 'a;b' isn't a host name"),
    ("$(x) slots=1", "1:1: '$(x)' isn't a host name"),
    ("é", "1:1: 'é' isn't a host name"),
    ("@group", "1:1: '' isn't a user name"),
    ("x;y@a", "1:1: 'x;y' isn't a user name"),
    ("-l@a", "1:1: '-l' isn't a user name"),
    ("", " no hosts in this file"),
    ("# only this\n\n", " no hosts in this file"),
    ("a\n\0b", "2: binary data: this is no hostfile"),
    (b"a\nb\n\xff\xfe", "3: not UTF-8 text: this is no hostfile"),
    ("# \n" * 400_000, " larger than 1 MiB: this is no hostfile"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD, ids=[repr(content)[:40] for content, _ in BAD])
def test_a_bad_line_is_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, content)
    assert [str(problem) for problem in caught.value.problems] == [f"{tmp_path / 'hosts'}:{message}"]


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, "a slots=0\nb\nc slots=q\nb\n")
    assert [problem.line for problem in caught.value.problems] == [1, 3, 4]


def test_all_faults_of_a_line_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, "a:0,b,c:x slots=q sluts=2\n")
    assert [problem.column for problem in caught.value.problems] == [3, 9, 17, 19]


def test_a_file_of_another_kind_does_not_fill_the_screen(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, "time, temperature\n12:00, 21.5\n" * 5_000)
    assert 50 <= len(caught.value.problems) < 60
    assert caught.value.problems[-1].message == "too many faults; the rest isn't read"


@pytest.mark.parametrize(("name", "reason"), [("missing", "No such file or directory"), (".", "Is a directory")])
def test_a_hostfile_that_can_not_be_read(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        read_hostfile(tmp_path / name)
    assert str(caught.value) == f"{tmp_path / name}: can't read the hostfile: {reason}"


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["a:2,b:2"], [Host("a", 2), Host("b", 2)]),
        (["n[1-2]:8", "[fe80::1]:2"], [Host("n1", 8), Host("n2", 8), Host("fe80::1", 2)]),
        (["ada@gpu7 slots=4"], [Host("gpu7", 4, user="ada")]),
    ],
)
def test_lists(items: list[str], expected: list[Host]) -> None:
    assert list(parse_hosts(items, "hosts.list")) == expected


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["a:x"], "--hosts: 'x' isn't a number of slots"),
        ([""], "--hosts: no hosts in this list"),
        (["a:x,b:0"], "--hosts: 'x' isn't a number of slots\n--hosts: slots is 0; it must be from 1 to 10000"),
        (["a", "b:0"], "--hosts[1]: slots is 0; it must be from 1 to 10000"),
        (["a", "a"], f"--hosts[1]: host 'a' was already listed in --hosts[0]; {LIST_IT_ONCE}"),
        (["a,a"], f"--hosts: host 'a' was already listed in the same list; {LIST_IT_ONCE}"),
    ],
)
def test_bad_lists(items: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_hosts(items, "--hosts")
    assert str(caught.value) == message


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab01-,[]:@#=/% \t\nslotmax_.é\0"), max_size=60))
def test_any_text_gives_hosts_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    start = time.monotonic()
    try:
        hosts = read(tmp_path_factory.getbasetemp(), text)
    except InputError:
        hosts = (Host("none"),)
    assert hosts
    assert len({canonical(host.name) for host in hosts}) == len(hosts)
    assert time.monotonic() - start < 5


def test_this_machine_has_many_names() -> None:
    names = {
        "localhost",
        "LOCALHOST",
        "127.0.0.1",
        "127.1.2.3",
        "::1",
        socket.gethostname(),
        f"{socket.gethostname()}.",
    }
    names |= {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    assert all(is_this_machine(name) for name in names)
    assert {canonical(name) for name in names} == {"localhost"}
    assert not is_this_machine("192.0.2.1")
    assert not is_this_machine("somewhere.example.com")


HOSTS = [Host(name) for name in ("node1", "node2", "node3", "localhost", "fe80::1")]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ([], [], ["node1", "node2", "node3", "localhost", "fe80::1"]),
        (["node[1-2]"], [], ["node1", "node2"]),
        (["node3,node1"], [], ["node1", "node3"]),
        ([], ["node[1-3]"], ["localhost", "fe80::1"]),
        (["node[1-3]"], ["node2"], ["node1", "node3"]),
        (["127.0.0.1", "NODE2"], [], ["node2", "localhost"]),
        (["[fe80::1]"], [], ["fe80::1"]),
    ],
)
def test_include_and_exclude(include: list[str], exclude: list[str], expected: list[str]) -> None:
    assert [host.name for host in select(HOSTS, include, exclude)] == expected


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        (["nod1"], [], "include: no host is named 'nod1'; did you mean 'node1'?"),
        ([], ["other"], "exclude: no host is named 'other'"),
        ([], ["node[1-3]", "localhost", "[fe80::1]"], "hosts: include and exclude leave no host"),
        (["node1"], ["node1"], "hosts: include and exclude leave no host"),
        (["node[3-9]"], [], "include: no host is named 'node4', nor are 5 more of that range"),
        (["node["], [], "include: 'node[' isn't a range of hosts such as node[01-16]"),
    ],
)
def test_bad_include_and_exclude(include: list[str], exclude: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        select(HOSTS, include, exclude)
    assert str(caught.value) == message


def test_a_range_without_hosts_takes_no_time() -> None:
    hosts = parse_hosts(["node[1-9999]"], "--hosts")
    start = time.monotonic()
    with pytest.raises(InputError):
        select(hosts, ["rack[1-9999]"], [])
    assert time.monotonic() - start < 10


def test_full_name_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 192.0.2.1\nsearch Lab.Example.com example.com\nsearch\n")
    (tmp_path / "hosts").write_text("127.0.1.1 ada.home ada # Debian's\n192.0.2.1 other\n\n")
    monkeypatch.setattr(local, "_RESOLV_CONF", tmp_path / "resolv.conf")
    monkeypatch.setattr(local, "_ETC_HOSTS", tmp_path / "hosts")
    monkeypatch.setattr(local.socket, "gethostname", lambda: "Gpu01")
    local._own_names.cache_clear()
    try:
        assert all(is_this_machine(name) for name in ("gpu01", "GPU01.lab.example.com.", "ada", "ada.home"))
        assert not any(is_this_machine(name) for name in ("gpu01.example.com", "gpu02.lab.example.com", "other"))
    finally:
        local._own_names.cache_clear()


def resolved(spec: Hosts, **flags: object) -> list[str]:
    defaults = {"hosts_option": None, "hostfile_option": None, "include": (), "exclude": (), "default_slots": 3}
    return [f"{host.name}:{host.slots}" for host in resolve.resolve_hosts(spec, **(defaults | flags))]  # type: ignore[arg-type]


def test_flags_come_before_the_spec_and_the_spec_before_this_machine(tmp_path: Path) -> None:
    (tmp_path / "spec").write_text("s1 slots=2\ns2")
    (tmp_path / "flag").write_text("f1")
    assert resolved(Hosts()) == ["localhost:3"]
    assert resolved(Hosts(list=("a:2",))) == ["a:2"]
    assert resolved(Hosts(file=tmp_path / "spec")) == ["s1:2", "s2:1"]
    assert resolved(Hosts(file=tmp_path / "spec", exclude=("s1",))) == ["s2:1"]
    assert resolved(Hosts(file=tmp_path / "spec"), include=["s1"]) == ["s1:2"]
    assert resolved(Hosts(file=tmp_path / "spec"), hosts_option="x:4,y") == ["x:4", "y:1"]
    assert resolved(Hosts(list=("a:2",)), hostfile_option=tmp_path / "flag") == ["f1:1"]
    with pytest.raises(UsageError, match="--hosts and --hostfile are both given"):
        resolved(Hosts(), hosts_option="x", hostfile_option=tmp_path / "flag")


def test_slots_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_NVIDIA_GPUS", tmp_path / "none")
    monkeypatch.setattr(resolve.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert resolve.default_slots() == 5
    for card in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / card).mkdir(parents=True)
    monkeypatch.setattr(resolve, "_NVIDIA_GPUS", tmp_path / "gpus")
    assert resolve.default_slots() == 2


@pytest.mark.parametrize("path", sorted((ROOT / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_the_examples_can_be_read(path: Path) -> None:
    assert read_hostfile(path)


def test_the_examples_of_the_docs_can_be_read(tmp_path: Path) -> None:
    blocks = (ROOT / "docs" / "hostfiles.md").read_text().split("```")[1::2]
    hostfiles = [block.partition("\n")[2] for block in blocks if block.startswith("hostfile\n")]
    assert len(hostfiles) >= 3
    for content in hostfiles:
        assert read(tmp_path, content)
