"""What the owners' tools say becomes findings, over real dialogues with probes that find fake tools."""

from __future__ import annotations

import ipaddress
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fake_tools
import pytest
from fake_tools import dcgm_4, dcgm_4_result, smi_log
from namespace_hosts import Cluster

from hvdtrain.cluster import diagnostics
from hvdtrain.cluster.dcgm import judge_dcgm
from hvdtrain.cluster.diagnostics import diagnose
from hvdtrain.cluster.models import Evidence, Finding, Request
from hvdtrain.cluster.nvidia_smi import judge_nvidia_smi
from hvdtrain.fabric.models import Address, Gid, Hca, HostFabric, Interface, Port
from hvdtrain.fabric.routes import ChosenNetwork, HostNetwork
from hvdtrain.hosts.models import Host
from hvdtrain.plan.facts import NetworkFacts
from hvdtrain.remote.bootstrap import probe_command, probe_sources
from hvdtrain.remote.fanout import Session

LIMIT_S = 180


def judged(*gpus: Mapping[str, str]) -> tuple[str, str]:
    return judge_nvidia_smi(0, smi_log(*gpus))[:2]


# --- nvidia-smi --------------------------------------------------------------------------------------------------


def test_healthy_gpus() -> None:
    assert judge_nvidia_smi(0, smi_log({}, {})) == ("ok", "2 GPUs are well", "", "")
    # Without NVSwitch, and of an older driver and GPU, which say less.
    untold = {"state": "N/A", "status": "N/A", "gpu_recovery_action": "N/A", "remapped_row_pending": "N/A"}
    assert judged(untold) == ("ok", "1 GPU is well")


@pytest.mark.parametrize(
    ("tag", "value", "status", "words"),
    [
        ("remapped_row_failure", "Yes", "fail", "broken"),
        ("remapped_row_pending", "Yes", "warn", "wait to be replaced"),
        ("pending_retirement", "Yes", "warn", "wait to be retired"),
        ("gpu_recovery_action", "Drain and Reset", "fail", "'Drain and Reset'"),
        ("persistence_mode", "Disabled", "warn", "persistence mode is off"),
        ("state", "In Progress", "fail", "'In Progress Success'"),
        ("status", "Insufficient Resources", "fail", "'Completed Insufficient Resources'"),
        ("current_link_width", "8x", "warn", "8 of 16 PCIe lanes"),
    ],
)
def test_what_operators_look_for(tag: str, value: str, status: str, words: str) -> None:
    found = judge_nvidia_smi(0, smi_log({}, {tag: value}, {}, {tag: value}))
    assert found[0] == status
    assert found[1].startswith("GPU 1, 3: ")
    assert words in found[1]
    assert found[3]


def test_several_troubles_of_which_the_worst_counts() -> None:
    found = judged({"persistence_mode": "Disabled"}, {"persistence_mode": "Disabled", "remapped_row_failure": "Yes"})
    assert found[0] == "fail"
    assert "GPU 0, 1: persistence mode is off" in found[1]
    assert "GPU 1: a row" in found[1]


def test_nvidia_smi_that_fails() -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    status, found, _, _ = judge_nvidia_smi(9, said)
    assert (status, found) == ("fail", f"nvidia-smi ended with status 9: {said.strip()}")
    status, found, _, _ = judge_nvidia_smi(14, smi_log({}) + "WARNING: infoROM is corrupted at gpu 0000:18:00.0\n")
    assert status == "fail"
    assert found == "nvidia-smi ended with status 14: WARNING: infoROM is corrupted at gpu 0000:18:00.0"


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "<nvidia_smi_log>",
        "<nvidia_smi_log></nvidia_smi_log>",
        "</nvidia_smi_log><nvidia_smi_log>",
        "<nvidia_smi_log><gpu></nvidia_smi_log>",
        '<nvidia_smi_log><!DOCTYPE x [<!ENTITY a "b">]>&a;</nvidia_smi_log>',
        "<nvidia_smi_log>" + 100_000 * "<gpu>" + "</nvidia_smi_log>",
        "<nvidia_smi_log>" + 100_000 * "<gpu>" + 100_000 * "</gpu>" + "</nvidia_smi_log>",
        "\0\ud800",
    ],
)
def test_garbage_of_nvidia_smi_crashes_nothing(garbage: str) -> None:
    status, found, _, _ = judge_nvidia_smi(0, garbage)
    assert status in ("fail", "ok")
    assert len(found) < 1000


# --- DCGM --------------------------------------------------------------------------------------------------------


def test_dcgm_4() -> None:
    fine = dcgm_4(
        ("software", [dcgm_4_result(0, "Pass"), dcgm_4_result(1, "Pass")]), ("pcie", [dcgm_4_result(0, "Skip")])
    )
    assert judge_dcgm(0, fine) == ("ok", "1 test passed", "", "")
    broken = dcgm_4(("memory", [dcgm_4_result(0, "Pass"), dcgm_4_result(1, "Fail", "A DBE occurred on GPU 1.")]))
    status, found, expected, fix = judge_dcgm(226, broken)
    assert (status, found) == ("fail", "memory (GPU 1): A DBE occurred on GPU 1.")
    assert expected
    assert fix


def test_dcgm_4_a_setting_is_a_warning() -> None:
    persistence = dcgm_4_result(1, "Fail", "Persistence mode for GPU 1 is disabled.", severity=5)
    status, found, _, _ = judge_dcgm(226, dcgm_4(("software", [dcgm_4_result(0, "Pass"), persistence])))
    assert (status, found) == ("warn", "software (GPU 1): Persistence mode for GPU 1 is disabled.")


def test_dcgm_3() -> None:
    tests = [
        {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]},
        None,
        {
            "name": "Page Retirement/Row Remap",
            "results": [{"gpu_ids": "1", "status": "FAIL", "warnings": ["row remap"]}],
        },
    ]
    document = {"DCGM GPU Diagnostic": {"test_categories": [{"category": "Deployment", "tests": tests}]}}
    status, found, _, _ = judge_dcgm(0, f"Successfully ran diagnostic for group.\n{json.dumps(document)}\n")
    assert (status, found) == ("fail", "Page Retirement/Row Remap (GPU 1): row remap")


def test_a_test_that_fails_as_a_whole() -> None:
    tests = [
        {"name": "software", "results": [], "test_summary": {"status": "Fail", "warnings": [{"warning": "no CUDA"}]}}
    ]
    document = {"DCGM Diagnostic": {"test_categories": [{"tests": tests}]}}
    assert judge_dcgm(226, json.dumps(document))[:2] == ("fail", "software: no CUDA")


def test_dcgm_without_its_engine() -> None:
    said = (
        "Error: unable to establish a connection to the specified host: localhost\n"
        "Error: Unable to connect to host engine. Host engine connection invalid/disconnected.\n"
    )
    status, found, _, fix = judge_dcgm(231, said)
    assert status == "warn"
    assert "Unable to connect to host engine" in found
    assert "nvidia-dcgm" in fix
    runtime = json.dumps({"DCGM GPU Diagnostic": {"runtime_error": "The GPU is in use."}})
    assert judge_dcgm(1, runtime)[:2] == ("warn", "no result: The GPU is in use.")


@pytest.mark.parametrize(
    "garbage",
    ["", "{", "{}", "[]", '{"DCGM Diagnostic": 1}', 100_000 * '{"a":',
     '{"DCGM Diagnostic": {"test_categories": {"a": 1}}}',
     '{"DCGM Diagnostic": {"test_categories": [{"tests": [{"name": 1, "results": [{"status": [], "warnings": 3}]}]}]}}',
     '{"DCGM Diagnostic": {"test_categories": [{"tests": [{"results": [{"status": "Fail", "warnings": [{}, 1]}]}]}]}}'],
)  # fmt: skip
def test_garbage_of_dcgm_crashes_nothing(garbage: str) -> None:
    assert judge_dcgm(0, garbage)[0] in ("warn", "fail", "skip")


# --- over probes -------------------------------------------------------------------------------------------------


def fabric(host: str, address: str, device: str = "", gbit: float = 200, layer: str = "InfiniBand") -> HostFabric:
    """A host with one address, and an adapter if it is named."""
    own = Address(ipaddress.ip_address(address), 8, "global")
    mapped = ipaddress.IPv6Address(f"::ffff:{address}") if "." in address else ipaddress.IPv6Address(address)
    gid = Gid(3, mapped, "RoCE v2", "eth0")
    port = Port(device, 1, layer, gbit, f"{gbit:g} Gb/sec (4X HDR)", "ACTIVE", (gid,))
    hcas = (Hca(device, "mlx5_core", (), (port,)),) if device else ()
    return HostFabric(host, (Interface("eth0", 2, "ethernet", "up", None, None, (), None, (own,)),), hcas)


def network(*fabrics: HostFabric) -> NetworkFacts:
    per_host = {own.host: HostNetwork("eth0", str(own.interfaces[0].addresses[0].ip), 8, None) for own in fabrics}
    return NetworkFacts({own.host: own for own in fabrics}, ChosenNetwork(per_host, {}, (), (), (), ()))


def evidence(names: Sequence[str], gpus: int = 0, timeout_s: float = 60.0) -> Evidence:
    facts = {"gpus": {"count": gpus}, "software": {"ib_write_bw": "/usr/bin/ib_write_bw"}}
    hosts = tuple(Host(name) for name in names)
    return Evidence(hosts, Request(timeout_s=timeout_s), dict.fromkeys(names, facts), {})


class Hosts:
    """Names of hosts that are all this machine, each with fake tools of its own."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.commands: dict[str, list[str]] = {}
        for name in names:
            (folder / name).mkdir()
            path = f"PATH={folder / name}:{os.environ['PATH']}"
            self.commands[name] = ["env", path, "sh", "-c", probe_command(sys.executable)]

    def install(self, tool: str, script: str, *names: str) -> None:
        for name in names or self.commands:
            fake_tools.install(self.folder / name, tool, script)

    def diagnose(self, network: NetworkFacts | None, evidence: Evidence) -> dict[str, list[Finding]]:
        with Session(self.commands, probe_sources()) as session:
            findings = diagnose(session, list(self.commands), network, evidence)
        by_check: dict[str, list[Finding]] = {"nvidia-smi": [], "dcgm-diag": [], "ib-write-bw": []}
        for finding in findings:
            by_check[finding.check].append(finding)
        return by_check


def said(findings: Sequence[Finding]) -> list[tuple[str, tuple[str, ...]]]:
    return [(finding.status, finding.hosts) for finding in findings]


@pytest.fixture
def hosts(tmp_path: Path) -> Any:
    return lambda *names: Hosts(tmp_path, *names)


def test_nothing_to_diagnose_is_skipped_with_its_reason(hosts: Any) -> None:
    found = hosts("h1", "h2").diagnose(
        network(fabric("h1", "127.0.0.1"), fabric("h2", "127.0.0.1")), evidence(["h1", "h2"])
    )
    assert {check: said(findings) for check, findings in found.items()} == {
        check: [("skip", ("h1", "h2"))] for check in found
    }
    assert {findings[0].found for findings in found.values()} == {"no GPU", "it has no InfiniBand or RoCE adapter"}
    assert {findings[0].subject for findings in found.values()} == {"gpus", "fabric"}


def test_tools_that_are_not_installed(hosts: Any) -> None:
    found = hosts("h1").diagnose(None, evidence(["h1"], gpus=8))
    assert [findings[0].found for findings in found.values()] == [
        "nvidia-smi isn't installed", "dcgmi isn't installed", "there is only one host"]  # fmt: skip


def test_each_host_s_gpus_are_judged(hosts: Any) -> None:
    three = hosts("h1", "h2", "h3")
    three.install("nvidia-smi", fake_tools.saying(smi_log({}, {})))
    three.install("nvidia-smi", fake_tools.saying(smi_log({}, {"remapped_row_failure": "Yes"})), "h2")
    three.install("dcgmi", fake_tools.saying(dcgm_4(("software", [dcgm_4_result(0, "Pass")]))))
    three.install("dcgmi", fake_tools.saying(dcgm_4(("pcie", [dcgm_4_result(3, "Fail", "x")])), 226), "h3")
    found = three.diagnose(None, evidence(["h1", "h2", "h3"], gpus=2))
    assert said(found["nvidia-smi"]) == [("ok", ("h1", "h3")), ("fail", ("h2",))]
    assert said(found["dcgm-diag"]) == [("ok", ("h1", "h2")), ("fail", ("h3",))]
    assert found["dcgm-diag"][1].found == "pcie (GPU 3): x"


def test_a_host_that_hangs_costs_only_itself(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # h2's nvidia-smi hangs as it does in a driver that hangs; h3 is gone, also for all that follows.
    limit_s = 0.5
    three = hosts("h1", "h2", "h3")
    three.install("nvidia-smi", fake_tools.saying(smi_log({})))
    three.install("nvidia-smi", "import time\ntime.sleep(1000)\n", "h2")
    three.commands["h3"] = ["sh", "-c", "exec true"]
    links = network(*(fabric(name, "127.0.0.1", "mlx5_0") for name in ("h1", "h2", "h3")))
    three.install("ib_write_bw", fake_tools.ib_write_bw({"mlx5_0": "190.00"}))
    while True:
        monkeypatch.setattr(diagnostics, "_SMI_LIMIT_S", limit_s)
        found = three.diagnose(links, evidence(["h1", "h2", "h3"], gpus=1))
        if said(found["nvidia-smi"])[0] == ("ok", ("h1",)) or limit_s > LIMIT_S:
            break
        # On a busy machine it is too little for a healthy tool.
        limit_s *= 4
    assert said(found["nvidia-smi"]) == [("ok", ("h1",)), ("fail", ("h2",)), ("fail", ("h3",))]
    assert found["nvidia-smi"][1].found == f"nvidia-smi did not end within {limit_s:g} s"
    assert said(found["dcgm-diag"]) == [("skip", ("h1", "h2")), ("skip", ("h3",))]
    assert said(found["ib-write-bw"]) == [("ok", ("h1", "h2")), ("skip", ("h3",))]


def test_answers_of_any_type_crash_nothing(hosts: Any) -> None:
    liar = (
        "import json, sys\nfor line in sys.stdin.buffer:\n"
        "    _, found, request = line.partition(b'{\"id\": ')\n"
        "    if found:\n"
        "        answer = {'exit_status': [], 'output': {}, 'port': -1, 'error': 5}\n"
        "        print(json.dumps({'id': int(request.partition(b',')[0]), **answer}), flush=True)\n"
    )
    two = hosts("h1", "h2")
    two.commands = {name: [sys.executable, "-c", liar] for name in two.commands}
    found = two.diagnose(
        network(*(fabric(name, "127.0.0.1", "mlx5_0") for name in ("h1", "h2"))), evidence(["h1", "h2"], gpus=1)
    )
    assert {finding.status for findings in found.values() for finding in findings} <= {"fail", "warn"}


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
def test_links_at_their_rate(hosts: Any, layer: str) -> None:
    three = hosts("h1", "h2", "h3")
    three.install("ib_write_bw", fake_tools.ib_write_bw({"mlx5_0": "190.00"}))
    own = (fabric(name, "127.0.0.1", "mlx5_0", layer=layer) for name in ("h1", "h2", "h3"))
    found = three.diagnose(network(*own), evidence(["h1", "h2", "h3"]))
    assert said(found["ib-write-bw"]) == [("ok", ("h1", "h2", "h3"))]
    assert found["ib-write-bw"][0].found == "190 Gbit/s is usual"


def rated(measured: Mapping[str, float | str], gbit: float = 200) -> list[Finding]:
    """Findings from what was measured: "h1 h2" -> Gbit/s, or why it failed."""
    port = Port("mlx5_0", 1, "InfiniBand", gbit, None, "ACTIVE", ())
    links = {
        diagnostics._Link(*pair.split(), (port, port)): value if isinstance(value, str) else value * 1e9
        for pair, value in measured.items()
    }
    names = sorted({name for pair in measured for name in pair.split()})
    return list(diagnostics._judge(names, links, set()))


def test_a_slow_host_is_named_alone_and_a_slow_link_with_both() -> None:
    ring = {"h1 h2": 195.0, "h2 h3": 195.0, "h3 h4": 195.0, "h4 h1": 195.0}
    warn, ok = rated({**ring, "h2 h3": 97.0, "h1 h2": 98.0})
    assert (warn.status, warn.hosts) == ("warn", ("h2",))
    assert "98 Gbit/s from h1 (mlx5_0:1) to h2 (mlx5_0:1)" in warn.found
    assert warn.expected == "at least 160 Gbit/s, 80% of the port's 200 Gbit/s"
    assert "LnkSta" in warn.fix
    assert (ok.status, ok.hosts) == ("ok", ("h1", "h3", "h4"))
    warn, ok = rated({**ring, "h2 h3": 97.0})
    assert (warn.hosts, ok.hosts) == (("h2", "h3"), ("h1", "h4"))
    (warn,) = rated({"h1 h2": 159.0, "h2 h1": 195.0})
    assert warn.hosts == ("h1", "h2")
    (ok,) = rated({"h1 h2": 161.0, "h2 h1": 195.0})
    assert ok.status == "ok"


def test_a_link_without_data_fails_and_an_unknown_rate_is_no_fault() -> None:
    fail, ok = rated({"h1 h2": "QP: timed out", "h2 h3": 195.0, "h3 h1": 195.0})
    assert (fail.status, fail.hosts, ok.hosts) == ("fail", ("h1", "h2"), ("h3",))
    assert fail.found == "no data from h1 (mlx5_0:1) to h2 (mlx5_0:1): QP: timed out"
    assert rated({"h1 h2": 1.0, "h2 h1": 1.0}, gbit=0)[0].status == "ok"


@pytest.mark.parametrize("count", range(2, 8))
def test_each_host_sends_once_and_is_in_one_pair_at_a_time(count: int) -> None:
    names = [f"h{number}" for number in range(count)]
    found = diagnostics._ring(names)
    assert len(found) <= 3
    for pairs in found:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    pairs = [pair for pairs in found for pair in pairs]
    assert sorted(sender for sender, _ in pairs) == sorted(receiver for _, receiver in pairs) == names


def test_hosts_that_cannot_be_measured_are_skipped_each_with_its_reason(hosts: Any) -> None:
    own = (fabric("h1", "127.0.0.1", "mlx5_0"), fabric("h2", "::1", "mlx5_0"), fabric("h3", "127.0.0.1"))
    found = hosts("h1", "h2", "h3", "h4").diagnose(network(*own), evidence(["h1", "h2", "h3", "h4"]))
    assert {finding.hosts: finding.found for finding in found["ib-write-bw"]} == {
        ("h1",): "no other host has InfiniBand and ib_write_bw",
        ("h2",): "ib_write_bw needs IPv4 to begin, and the hosts share IPv6 only",
        ("h3",): "it has no InfiniBand or RoCE adapter",
        ("h4",): "it shares no network with the others",
    }


# --- real hosts --------------------------------------------------------------------------------------------------

# On the first host; argv: a folder with this module's, the hosts' names and addresses.
DIAGNOSE = """
import dataclasses, json, sys
import test_diagnostics as cases
from hvdtrain.cluster.gather import probe_commands

names, addresses = sys.argv[1:3], sys.argv[3:5]
evidence = cases.evidence(names, gpus=2)
network = cases.network(*(cases.fabric(*pair, f"mlx5_{i}") for i, pair in enumerate(zip(names, addresses))))
with cases.Session(probe_commands(evidence.hosts, evidence.request), cases.probe_sources()) as session:
    findings = cases.diagnose(session, names, network, evidence)
print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
"""


@pytest.mark.hosts
def test_over_ssh(tmp_path: Path) -> None:
    """Of two hosts one has a GPU that is to be replaced, and sends at half of its port's rate."""
    fake_tools.install(tmp_path, "dcgmi", fake_tools.saying(dcgm_4(("software", [dcgm_4_result(0, "Pass")]))))
    fake_tools.install(tmp_path, "ib_write_bw", fake_tools.ib_write_bw({"mlx5_0": "193.10", "mlx5_1": "98.20"}))
    script = "import platform\nLOGS = {logs!r}\nprint(LOGS[platform.node()])\n"
    logs = {"h1": smi_log({}, {}), "h2": smi_log({}, {"remapped_row_failure": "Yes"})}
    fake_tools.install(tmp_path, "nvidia-smi", script.format(logs=logs))
    with Cluster(2) as cluster:
        first, second = cluster.hosts
        # The first host's own probe is no ssh session.
        first.environment |= {"PYTHONPATH": str(Path(__file__).parent), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        with second.at_login(f"export PATH={tmp_path}:$PATH"):
            argv = [sys.executable, "-c", DIAGNOSE, *cluster.names, first.address, second.address]
            done = first.run(argv, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found = [(one["check"], one["status"], one["hosts"]) for one in json.loads(done.stdout)]
    assert found == [
        ("nvidia-smi", "ok", ["h1"]),
        ("nvidia-smi", "fail", ["h2"]),
        ("dcgm-diag", "ok", ["h1", "h2"]),
        ("ib-write-bw", "warn", ["h1", "h2"]),
    ]
    (link,) = [one for one in json.loads(done.stdout) if one["check"] == "ib-write-bw"]
    assert link["found"] == "98.2 Gbit/s from h2 (mlx5_1:1) to h1 (mlx5_0:1)"
