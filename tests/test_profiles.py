"""Profiles: read, refused with the place of each fault, held against hosts, and written from what hosts have."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli.validate_cluster import command
from hvdtrain.cluster.measured import Measured
from hvdtrain.cluster.models import Evidence, Finding, Report, Request
from hvdtrain.cluster.profiles.checks import check, words_match
from hvdtrain.cluster.profiles.loader import load_profile
from hvdtrain.cluster.profiles.models import Profile
from hvdtrain.cluster.profiles.written import profile_text
from hvdtrain.cluster.quick import Looked, judge
from hvdtrain.cluster.told import sound
from hvdtrain.errors import InputError
from hvdtrain.hosts.models import Host
from hvdtrain.spec.messages import dotted, key_paths

ROOT = Path(__file__).parents[1]
FACTS = json.loads((Path(__file__).parent / "data/cluster/facts-local.json").read_text())["facts"]
LARGE = ROOT / "configs/cluster/reference-large.yaml"
NAMES = tuple(f"node{number:02}" for number in range(1, 9))
GPU = {"index": 0, "model": "NVIDIA A100-SXM4-80GB", "memory_total_bytes": 81920 << 20, "ecc_enabled": True}
PORT = {"port": 1, "link_layer": "InfiniBand", "state": "ACTIVE", "rate": "200 Gb/sec (4X HDR)"}
EPYC_7742 = "AMD EPYC 7742 64-Core Processor"
V100 = "Tesla V100-SXM2-32GB"
DISK = {"name": "nvme0n1", "model": "SAMSUNG MZ", "size_bytes": 7_681_501_126_656}


def large_facts() -> dict[str, Any]:
    """A server of the reference's kind: what a probe tells of one."""
    facts: dict[str, Any] = copy.deepcopy(FACTS)
    facts["system"] |= {
        "os_name": "Ubuntu 22.04.4 LTS",
        "os_version": "22.04",
        "kernel": "5.15.0-91-generic",
        "cpu_model": "Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz",
        "cpu_sockets": 2,
        "cpu_cores": 80,
        "cpu_governors": ["performance"],
        "numa_balancing": False,
        "mem_total_bytes": 1_081_805_111_296,
        "ecc_controllers": 4,
        "load_1m": 0.1,
    }
    facts["disks"]["nvme"] = [dict(DISK), dict(DISK)]
    facts["limits"] |= {"nofile_soft": 1 << 20, "memlock_soft_bytes": -1}
    facts["gpus"] |= {"count": 8, "gpus": [dict(GPU) for _ in range(8)], "driver_version": "535.161.08", "xids": []}
    hca = {"name": "mlx5_0", "driver": "mlx5_core", "net_devices": [], "ports": [PORT | {"rate_gbit_per_s": 200.0}]}
    facts["infiniband"] = {"hcas": [hca]}
    facts["software"] |= {"python_version": "3.10.12", "mpirun_version": "Open MPI 4.1.4"}
    facts["software"]["packages"] |= {"horovod": "0.28.1", "torch": "2.13.0+cu126"}
    facts["software"]["horovod"] = {
        "version": "0.28.1",
        "frameworks": {"torch": "2.13.0"},
        "controllers": ["mpi"],
        "nccl": True,
    }
    return facts


def evidence(facts: dict[str, Any], names: tuple[str, ...] = NAMES, clock_s: float = 0.0) -> Evidence:
    """Equal hosts but the last, which has ``facts``."""
    usual = large_facts()
    every = dict.fromkeys(names[:-1], usual) | {names[-1]: facts}
    clocks = dict.fromkeys(names[:-1], (0.0, 0.001)) | {names[-1]: (clock_s, 0.001)}
    return Evidence(tuple(map(Host, names)), Request(), every, {}, clocks)


def blamed(findings: tuple[Finding, ...]) -> list[tuple[str, tuple[str, ...]]]:
    return [(f.check, f.hosts) for f in findings if f.status == "fail"]


def read(tmp_path: Path, text: str) -> Profile:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return load_profile(file)


def test_the_reference_holds_for_such_a_cluster() -> None:
    findings = check(load_profile(LARGE), evidence(large_facts()))
    assert blamed(findings) == []
    assert {f.check for f in findings if f.status == "skip"} == {"measured.disk_read", "measured.disk_write"}
    expected = {dotted(path) for path in key_paths(Profile)}
    assert {f.check for f in findings} <= expected


@pytest.mark.parametrize(
    ("key", "found", "expected", "change"),
    [
        ("os", "Ubuntu 18.04.6 LTS", "Ubuntu 20.04", {"system.os_name": "Ubuntu 18.04.6 LTS"}),
        ("cpu.models", EPYC_7742, "EPYC 7763", {"system.cpu_model": EPYC_7742}),
        ("cpu.sockets", "1", "2", {"system.cpu_sockets": 1}),
        ("cpu.governor", "powersave", "performance", {"system.cpu_governors": ["powersave"]}),
        ("cpu.numa_balancing", "yes", "no", {"system.numa_balancing": True}),
        ("memory.total", "251 GiB", "512 GB to 2 TB", {"system.mem_total_bytes": 270_000_000_000}),
        ("memory.ecc", "no", "yes", {"system.ecc_controllers": 0}),
        ("storage.nvme", "0 B", "4 to 16 TB", {"disks.nvme": []}),
        ("gpu.models", V100, "A100 or H100", {"gpus.gpus": [GPU | {"model": V100}] * 4}),
        ("gpu.count", "3", "at least 4", {"gpus.count": 3}),
        ("gpu.ecc", "no", "yes", {"gpus.gpus": [GPU, GPU | {"ecc_enabled": False}]}),
        ("gpu.ecc", "it can't be told there", "yes", {"gpus.gpus": [GPU | {"ecc_enabled": None}]}),
        ("gpu.driver", "470.57.02", "at least 525.60", {"gpus.driver_version": "470.57.02"}),
        ("fabric.adapters", "0", "at least 1", {"infiniband.hcas": []}),
        ("limits.locked_memory", "64 KiB", "unlimited", {"limits.memlock_soft_bytes": 65536}),
        ("limits.open_files", "1024", "at least 65536", {"limits.nofile_soft": 1024}),
        ("software.python", "3.8.10", "at least 3.10", {"software.python_version": "3.8.10"}),
        ("software.mpi", "none", "at least 4.0", {"software.mpirun_version": None}),
        ("software.nccl", "it can't be told there", "yes", {"software.horovod": None}),
    ],
)  # fmt: skip
def test_a_host_that_differs_is_named(key: str, found: str, expected: str, change: dict[str, Any]) -> None:
    facts = large_facts()
    for path, value in change.items():
        section, name = path.split(".")
        facts[section][name] = value
    findings = check(load_profile(LARGE), evidence(facts))
    (finding,) = [f for f in findings if f.check == key and f.status == "fail"]
    assert finding.hosts == ("node08",)
    assert finding.found == found
    assert expected in finding.expected
    assert finding.fix


def test_a_slow_port_and_a_port_that_is_down() -> None:
    facts = large_facts()
    slow = PORT | {"rate_gbit_per_s": 40.0}
    facts["infiniband"]["hcas"][0]["ports"] = [slow, PORT | {"state": "DOWN", "rate_gbit_per_s": 10.0, "port": 2}]
    findings = check(load_profile(LARGE), evidence(facts))
    assert [f.found for f in findings if f.status == "fail"] == ["40 Gbit/s"]


def test_the_clock_and_the_number_of_hosts() -> None:
    profile = load_profile(LARGE)
    assert blamed(check(profile, evidence(large_facts(), clock_s=0.2))) == [("clock", ("node08",))]
    assert blamed(check(profile, evidence(large_facts(), clock_s=-0.1005))) == []
    assert blamed(check(profile, evidence(large_facts(), NAMES[:7]))) == [("hosts", NAMES[:7])]


def test_what_was_measured(tmp_path: Path) -> None:
    profile = read(
        tmp_path, "measured: {bandwidth: at least 90 Gbit/s, latency: at most 50 us, memory: at least 100 GB/s}"
    )
    measured = Measured(NAMES)
    for one in NAMES:
        for other in NAMES:
            measured.bit_per_s[one, other] = 40e9 if one == "node08" else 97e9
            measured.rtt_s[one, other] = 20e-6
    measured.speeds["memory-bandwidth"] = dict.fromkeys(NAMES[1:], 200e9)
    findings = check(profile, evidence(large_facts()), measured)
    assert blamed(findings) == [("measured.bandwidth", ("node08",)), ("measured.memory", ("node01",))]
    assert [f.found for f in findings if f.status == "fail"] == ["40 Gbit/s", "it can't be told there"]


@pytest.mark.parametrize(
    ("wanted", "found", "matches"),
    [
        ("EPYC 7763", "AMD EPYC 7763 64-Core Processor", True),
        ("Xeon Platinum 8380", "Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", True),
        ("Platinum Xeon", "Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", False),
        ("H100", "NVIDIA H1000", False),
        ("H100 80GB", "NVIDIA H100 80GB HBM3", True),
        ("Ubuntu 22.04", "Ubuntu 22.04.4 LTS", True),
        ("Rocky 8", "Rocky Linux 8.9 (Green Obsidian)", True),
        ("Rocky 8", "Rocky Linux 80.9", False),
        ("Rocky 8.10", "Rocky Linux 8.1", False),
    ],
)
def test_words_of_a_name(wanted: str, found: str, matches: bool) -> None:
    assert words_match(wanted, found) is matches


@pytest.mark.parametrize(
    ("line", "holds", "fails"),
    [
        ("hosts: 2 to 4", [2, 4], [1, 5]),
        ("hosts: at most 4", [1, 4], [5]),
        ("hosts: 4", [4], [3, 5]),
        ("memory: {total: at least 512 GB}", [503 << 30], [480 << 30]),
        ("memory: {total: 512 GB to 2 TB}", [2 << 40], [3 << 40]),
        ("storage: {nvme: 4 to 16 TB}", [4_000_000_000_000, 16_000_000_000_000], [3_840_000_000_000, 1 << 44]),
        ("storage: {nvme: at least 1 TiB}", [1 << 40], [10**12]),
    ],
)
def test_quantities(tmp_path: Path, line: str, holds: list[int], fails: list[int]) -> None:
    profile = read(tmp_path, line)
    for number in holds + fails:
        facts = large_facts()
        facts["system"]["mem_total_bytes"] = number
        facts["disks"]["nvme"] = [{"size_bytes": number}]
        names = NAMES[:1] if number > len(NAMES) else NAMES[:number]
        assert bool(blamed(check(profile, evidence(facts, names)))) is (number in fails), number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: some", "mine.yaml:1:8: hosts: expected a number: '8', 'at least 4', 'at most 16' or '4 to 8', found "),
        ("hosts: 8 to 4", "found the text '8 to 4'; '8' is more than '4'"),
        ("memory: {total: 512 GB}", "found the text '512 GB'; write 'at least 512 GB'"),
        ("memory: {total: at least 512 Gbit}", "the units are B, KB, MB, GB, TB"),
        ("gpus: {count: 8}", "unknown key 'gpus'; did you mean 'gpu'?"),
        ("gpu: {modell: [A100]}", "unknown key 'gpu.modell'; did you mean 'gpu.models'?"),
        ("gpu: {models: A100}", "gpu.models: expected a list, found the text 'A100'"),
        ("fabric: {kinds: [tcp]}", "expected 'infiniband' or 'roce', found the text 'tcp'"),
        ("software: {torch: new}", "software.torch: expected a version: 'any', '2.13'"),
        ("limits: {locked_memory: lots}", "expected 'unlimited', found the text 'lots'"),
        ("cpu: {numa_balancing: no}", "expected true or false, found the text 'no'; write false"),
        ("", "mine.yaml: the file is empty: a cluster profile has at least one expectation"),
        ("name: mine", "mine.yaml: it expects nothing: give it a key such as 'hosts' or 'gpu'"),
        ("- 8", "expected a mapping (lines such as 'hosts: 8 to 64'), found a list"),
        ("hosts: [8]", "hosts: expected one value, found a list"),
    ],
)  # fmt: skip
def test_a_faulty_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        read(tmp_path, text)
    assert message in str(raised.value)


def test_a_faulty_profile_is_refused_before_any_host_is_asked(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("hosts: many")
    argv = ["validate-cluster", "--hosts", "no-such-host", "--profile", str(tmp_path / "mine.yaml")]
    with pytest.raises(InputError):
        command.main(argv[1:], standalone_mode=False)


@pytest.mark.parametrize("file", sorted((ROOT / "configs/cluster").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_profiles_can_be_read(file: Path) -> None:
    assert load_profile(file).name == file.stem


def test_a_written_profile_holds_for_the_hosts_it_was_made_from(tmp_path: Path) -> None:
    measured = Measured(NAMES)
    measured.bit_per_s = {(one, other): 9.4e9 for one in NAMES for other in NAMES if one != other}
    measured.rtt_s = dict.fromkeys(measured.bit_per_s, 31e-6)
    measured.speeds = {name: dict.fromkeys(NAMES, 1.9e9) for name in ("disk-write", "disk-read", "memory-bandwidth")}
    seen = evidence(large_facts())
    text = profile_text(Looked(Report(0.0, 1.0, "standard", NAMES, ()), seen, measured), "mine")
    profile = read(tmp_path, text)
    findings = check(profile, seen, measured)
    assert {f.status for f in findings} == {"ok"}
    written = {"hosts", "os", "cpu.models", "memory.total", "storage.nvme", "gpu.models", "fabric.rate",
               "limits.locked_memory", "software.torch", "measured.bandwidth", "measured.disk_write"}  # fmt: skip
    assert written <= {f.check for f in findings}
    assert "total: at least 1000 GiB" in text
    assert "bandwidth: at least 7.5 Gbit/s" in text


@pytest.mark.parametrize("garbage", [None, "x", -1, 1.5, [], ["x"], {}, {"x": 1}, [{"x": None}], True])
def test_what_a_lying_host_says_ends_nothing(garbage: Any) -> None:
    """Each fact of one host in turn, and each whole section, is something else than it should be."""
    profile = load_profile(LARGE)
    for section, values in large_facts().items():
        for name in [None, *values]:
            facts = large_facts()
            if name is None:
                facts[section] = garbage
            else:
                facts[section][name] = garbage
            seen = evidence(sound(facts))
            judge(seen)
            check(profile, seen)
            profile_text(Looked(Report(0.0, 1.0, "quick", NAMES, ()), seen), "mine")


def test_facts_of_another_type_count_as_unknown() -> None:
    facts = large_facts()
    facts["system"] |= {"cpu_cores": "80", "uid": True, "load_1m": 2, "new": [1], "os_id": None}
    facts["gpus"]["gpus"][0] |= {"model": 7}
    facts["gpus"]["gpus"][1] = "a GPU"
    facts["limits"] = [1]
    kept = sound(facts)
    assert "limits" not in kept
    assert "cpu_cores" not in kept["system"]
    assert "uid" not in kept["system"]
    assert kept["system"] | {"load_1m": 2, "new": [1], "os_id": None} == kept["system"]
    assert len(kept["gpus"]["gpus"]) == 7
    assert "model" not in kept["gpus"]["gpus"][0]
    assert sound("all is well") is None


def test_real_facts_are_sound() -> None:
    assert sound(FACTS) == FACTS
    assert sound(large_facts()) == large_facts()


def test_the_docs_name_every_key(tmp_path: Path) -> None:
    page = (ROOT / "docs/cluster-profiles.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert read(tmp_path, example).name == "lab"
    for path in key_paths(Profile):
        model: Any = Profile
        for step in path[:-1]:
            model = model.model_fields[step].annotation
        if description := model.model_fields[path[-1]].description:
            assert f"| `{dotted(path)}` | {description.replace(chr(10), ' ')} |" in page
