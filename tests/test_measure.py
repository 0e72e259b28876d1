"""The probe's measurements, by real probes on this machine, and what is said of their results."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cluster import standard
from hvdtrain.cluster.effort import Effort
from hvdtrain.cluster.measured import Measured, judge
from hvdtrain.cluster.models import Finding, Request
from hvdtrain.fabric.models import Address, HostFabric, Interface
from hvdtrain.fabric.routes import ChosenNetwork, HostNetwork
from hvdtrain.plan.facts import NetworkFacts
from hvdtrain.remote.bootstrap import probe_command, probe_sources
from hvdtrain.remote.fanout import Session

LIMIT_S = 180.0
GOOD = ["sh", "-c", probe_command(sys.executable)]
TOKEN = "0123456789abcdef" * 2
TCP = {"address": "127.0.0.1", "token": TOKEN, "streams": 2, "warm_up_s": 0.05, "duration_s": 0.2, "limit_s": 60.0}


@contextlib.contextmanager
def probes(*names: str) -> Iterator[Session]:
    with Session(dict.fromkeys(names, GOOD), probe_sources()) as session:
        yield session


def ask(session: Session, host: str, verb: str, **request: Any) -> dict[str, Any]:
    answer = session.ask({host: {"ask": verb, **request}}, LIMIT_S)[host]
    assert isinstance(answer, dict), answer
    return answer


def per_second(part: dict[str, float]) -> float:
    return part["bytes"] / part["seconds"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_two_probes_measure_both_directions(address: str) -> None:
    with probes("one", "other") as session:
        port = ask(session, "other", "expect", **{**TCP, "address": address})["port"]
        answer = ask(session, "one", "exchange", **{**TCP, "address": address}, port=port, pings=50)
        assert 0 < answer["rtt_s"] < 0.1
        for direction in ("out", "in"):
            # Loopback carries far more; and it is the time after the warm-up that counts.
            assert per_second(answer[direction]) > 50e6
            assert answer[direction]["seconds"] < 30
        # The listener is gone with its exchange.
        again = ask(session, "one", "exchange", **{**TCP, "address": address}, port=port, pings=50)
        assert again["error"]


def closed(stream: socket.socket) -> bool:
    """Whether the other end closes it."""
    stream.settimeout(LIMIT_S)
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_are_not_let_in_and_hold_nobody_up() -> None:
    with probes("one", "other") as session:
        port = ask(session, "other", "expect", **TCP)["port"]
        with contextlib.ExitStack() as stack:
            silent, wrong, long = (stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3))
            wrong.sendall(b"f" * len(TOKEN) + b"C")
            with contextlib.suppress(OSError):
                long.sendall(b"GET / HTTP/1.1\r\n" * 1000)
            assert closed(wrong)
            assert closed(long)
            answer = ask(session, "one", "exchange", **TCP, port=port, pings=10)
            assert per_second(answer["out"]) > 0, answer
            assert closed(silent)


def test_a_listener_ends_at_its_limit() -> None:
    with probes("other") as session:
        port = ask(session, "other", "expect", **{**TCP, "limit_s": 0.2})["port"]
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                break
            assert time.monotonic() < deadline


def test_nobody_there_is_an_error_and_no_end_of_the_dialogue() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, probes("one") as session:
        port = taken.getsockname()[1]
        # It accepts and never answers.
        silent = ask(session, "one", "exchange", **TCP, port=port, pings=10)
        assert silent["error"]
        taken.close()
        assert "refused" in ask(session, "one", "exchange", **TCP, port=port, pings=10)["error"]


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    with probes("host") as session:
        answer = ask(session, "host", "disk-speed", folder=str(tmp_path), size_bytes=32 << 20, limit_s=60)
        assert answer["write"]["bytes"] == answer["read"]["bytes"] == 32 << 20
        assert per_second(answer["write"]) > 0
        assert per_second(answer["read"]) > 0
        assert list(tmp_path.iterdir()) == []
        short = ask(session, "host", "disk-speed", folder=str(tmp_path), size_bytes=1 << 40, limit_s=0)
        assert 0 < short["write"]["bytes"] <= 64 << 20
        missing = ask(session, "host", "disk-speed", folder=str(tmp_path / "none"), size_bytes=32 << 20, limit_s=1)
        assert "No such file" in missing["error"]


def test_memory_is_measured_on_all_processors() -> None:
    with probes("host") as session:
        answer = ask(session, "host", "memory-speed", size_bytes=64 << 20, duration_s=0.1)
    assert answer["threads"] == min(32, len(os.sched_getaffinity(0)))
    assert per_second(answer) > 100e6


# --- over a session ----------------------------------------------------------------------------------------------


def network(names: list[str], addresses: list[str] | None = None, speed_mbit: int | None = None) -> NetworkFacts:
    import ipaddress

    fabrics, per_host = {}, {}
    for name, address in zip(names, addresses or ["127.0.0.1"] * len(names), strict=True):
        own = Address(ipaddress.ip_address(address), 8, "global")
        fabrics[name] = HostFabric(
            name, (Interface("eth0", 2, "ethernet", "up", speed_mbit, "mlx5_core", (), None, (own,)),)
        )
        per_host[name] = HostNetwork("eth0", address, 8, speed_mbit)
    return NetworkFacts(fabrics, ChosenNetwork(per_host, {}, (), (), (), ()))


BRIEF = Effort(0.0, 1, 32 << 20, 2.0, 32 << 20, 0.1, (), 0.0)


def test_a_host_that_falls_silent_costs_only_itself(tmp_path: Path) -> None:
    # h4 answers to what comes before the measurements, and then no more; no host has the address of h2.
    deaf = ["sh", "-c", "exec sleep 1000"]
    names = ["h1", "h2", "h3", "h4"]
    with Session(dict.fromkeys(names, GOOD) | {"h4": deaf}, probe_sources()) as session:
        facts = network(names, ["127.0.0.1", "192.0.2.1", "127.0.0.1", "127.0.0.1"])
        measured = standard.measure(session, names, facts, Request(directory=str(tmp_path), timeout_s=5.0), BRIEF)
    assert set(measured.lost) == {"h4"}
    assert {("h1", "h3"), ("h3", "h1")} <= set(measured.bit_per_s)
    assert set(measured.failures) == {("h1", "h2")}
    for speeds in measured.speeds.values():
        assert set(speeds) == {"h1", "h2", "h3"}
    failed = [finding.hosts for finding in judge(measured) if finding.status == "fail"]
    assert failed == [("h4",), ("h1", "h2")]


# --- findings ----------------------------------------------------------------------------------------------------


def made(rates: dict[tuple[str, str], float], speed_mbit: int | None = None, **more: Any) -> tuple[Finding, ...]:
    names = sorted({host for pair in rates for host in pair})
    return judge(Measured(tuple(names), network(names, speed_mbit=speed_mbit), bit_per_s=rates, **more))


def of(findings: tuple[Finding, ...], check: str, *statuses: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check and finding.status in (statuses or ("ok",))]


def all_pairs(count: int, rate: float, **slow: float) -> dict[tuple[str, str], float]:
    names = [f"h{number}" for number in range(1, count + 1)]
    return {(a, b): min(slow.get(a, rate), slow.get(b, rate)) for a in names for b in names if a != b}


def test_a_slow_host_is_said_with_what_its_adapter_claims() -> None:
    findings = made(all_pairs(4, 9.4e9, h3=0.19e9), speed_mbit=10_000)
    (finding,) = of(findings, "bandwidth", "fail", "warn")
    assert (finding.status, finding.hosts) == ("fail", ("h3",))
    assert finding.found == "190 Mbit/s out, 190 Mbit/s in"
    assert finding.expected == "9.4 Gbit/s out, 9.4 Gbit/s in, the others' median"
    assert "eth0 says 10 Gbit/s" in finding.fix
    (ok,) = of(findings, "bandwidth")
    assert (ok.hosts, ok.found) == (("h1", "h2", "h4"), "9.4 Gbit/s is usual")


def test_a_host_that_exchanges_data_with_nobody_is_named() -> None:
    rates = {pair: rate for pair, rate in all_pairs(4, 9.4e9).items() if "h2" not in pair}
    failures = dict.fromkeys([("h1", "h2"), ("h2", "h3"), ("h4", "h2")], "timed out")
    names = ("h1", "h2", "h3", "h4")
    findings = judge(Measured(names, network(list(names)), bit_per_s=rates, failures=failures))
    (finding,) = of(findings, "bandwidth", "fail", "warn")
    assert (finding.hosts, finding.found) == (("h2",), "no data with any host: timed out")
    assert [finding.hosts for finding in of(findings, "bandwidth")] == [("h1", "h3", "h4")]


def test_a_slow_link_is_said_of_both_hosts() -> None:
    rates = all_pairs(4, 9.4e9) | {("h2", "h4"): 1e9}
    (finding,) = of(made(rates), "bandwidth", "fail", "warn")
    assert (finding.status, finding.hosts, finding.found) == ("fail", ("h2", "h4"), "1 Gbit/s from h2 to h4")


def test_of_two_hosts_both_are_named() -> None:
    (finding,) = of(made({("h1", "h2"): 9.4e9, ("h2", "h1"): 1e9}), "bandwidth", "fail", "warn")
    assert (finding.hosts, finding.found) == (("h1", "h2"), "1 Gbit/s from h2 to h1")
    assert "third host" in finding.fix


def test_all_below_what_their_adapters_say() -> None:
    findings = made(all_pairs(3, 9.4e8), speed_mbit=10_000)
    assert [finding.hosts for finding in of(findings, "bandwidth", "warn")] == [("h1",), ("h2",), ("h3",)]
    assert not of(made(all_pairs(3, 9.4e9), speed_mbit=10_000), "bandwidth", "warn", "fail")


def test_groups_of_hosts_are_a_warning() -> None:
    rates = {pair: 9e9 if {*pair} in ({"h1", "h2"}, {"h3", "h4"}) else 1e9 for pair in all_pairs(4, 1e9)}
    (finding,) = of(made(rates), "bandwidth", "warn", "fail")
    assert finding.found == "fast within h[1-2] and h[3-4], slow between them"


def test_late_and_slow_machines_are_warnings() -> None:
    names = ("h1", "h2", "h3", "h4")
    rtts = {pair: 900e-6 if "h2" in pair else 40e-6 for pair in all_pairs(4, 1.0) if pair[0] < pair[1]}
    findings = made(
        all_pairs(4, 9.4e9),
        rtt_s=rtts,
        speeds={
            "disk-write": dict.fromkeys(names, 2e9) | {"h1": 0.3e9},
            "memory-bandwidth": dict.fromkeys(names, 2e11) | {"h4": 0.9e11},
        },
        errors={"disk-write": {}},
    )
    assert [finding.hosts for finding in of(findings, "latency", "warn", "fail")] == [("h2",)]
    assert [finding.hosts for finding in of(findings, "disk-write", "warn", "fail")] == [("h1",)]
    assert [finding.hosts for finding in of(findings, "memory-bandwidth", "warn", "fail")] == [("h4",)]
    (skipped,) = of(findings, "disk-read", "skip")
    assert skipped.found == "no working directory is given"


def test_one_host_has_no_network_to_measure() -> None:
    findings = judge(Measured(("h1",)))
    assert [finding.check for finding in findings if finding.status == "skip"][:2] == ["bandwidth", "latency"]
