"""What the probe finds, on this machine and in recorded trees."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from pathlib import Path

import pytest

from hvdtrain.probe import disks, gpus, limits, reach, software, system


def test_system_agrees_with_python() -> None:
    facts = system.collect()
    assert facts["hostname"] == socket.gethostname()
    assert (facts["uid"], facts["kernel"]) == (os.getuid(), os.uname().release)
    assert facts["cpu_threads"] == os.cpu_count()
    assert 0 < facts["mem_available_bytes"] <= facts["mem_total_bytes"]


def test_system_of_a_recorded_tree(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "".join(
            f"processor : {number}\nmodel name : X\nphysical id : {number % 2}\ncore id : {number // 4}\n"
            for number in range(8)
        ),
        "etc/os-release": 'ID="rocky"\nVERSION_ID="8.9"\n',
        "proc/sys/kernel/numa_balancing": "1\n",
        "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "performance\n",
        "sys/devices/system/cpu/cpufreq/policy1/scaling_governor": "powersave\n",
        "sys/devices/system/edac/mc/mc0/ce_count": "3\n",
        "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
        "sys/devices/system/edac/mc/mc1/ce_count": "4\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    facts = system.collect(tmp_path)
    assert (facts["cpu_threads"], facts["cpu_cores"], facts["cpu_sockets"]) == (8, 4, 2)
    assert (facts["os_id"], facts["os_version"], facts["numa_balancing"]) == ("rocky", "8.9", True)
    assert facts["cpu_governors"] == ["performance", "powersave"]
    assert (facts["ecc_controllers"], facts["ecc_corrected"], facts["ecc_uncorrected"]) == (2, 7, 0)


def test_limits_of_cgroups_are_the_least_on_the_way_up(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (tmp_path / "sys/fs/cgroup/a/b").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text("1000\n")
    (tmp_path / "sys/fs/cgroup/a/b/memory.max").write_text("max\n")
    (tmp_path / "sys/fs/cgroup/a/b/cpu.max").write_text("150000 100000\n")
    facts = limits.collect(tmp_path)
    assert (facts["cgroup_version"], facts["cgroup_memory_limit_bytes"], facts["cgroup_cpu_limit"]) == (2, 1000, 1.5)


def test_paths(tmp_path: Path) -> None:
    found = disks.collect(paths=[str(tmp_path / "none")], write=[str(tmp_path), "/proc"])["paths"]
    assert found[str(tmp_path / "none")] == {"exists": False}
    assert found[str(tmp_path)]["write_error"] is None
    assert found[str(tmp_path)]["free_bytes"] > 0
    assert found["/proc"]["filesystem"] == "proc"
    assert found["/proc"]["write_error"]
    assert list(tmp_path.iterdir()) == []


def test_packages_agree_with_their_metadata(tmp_path: Path) -> None:
    facts = software.collect(python=sys.executable, files=[__file__, str(tmp_path / "none")])
    for name, version in facts["packages"].items():
        assert importlib.metadata.version(name) == version
    assert "numpy" in facts["packages"]
    assert facts["hvdtrain_sha256"] == software.sources_hash(Path(software.__file__).parents[1])
    assert (facts["python_asked_executable"], facts["python_asked_is_running"]) == (True, True)
    assert facts["files"][__file__]["size_bytes"] == Path(__file__).stat().st_size
    assert not facts["files"][str(tmp_path / "none")]["exists"]


def test_gpus_of_a_recorded_machine(tmp_path: Path) -> None:
    row = ("0, NVIDIA A100-SXM4-80GB, GPU-1, 535.129.03, 00000000:07:00.0, 81920, 3, Enabled, 2, 0, 31, 0, 61.5,"
           " 400.00, 210, 1410, 4, 4, 16, 16, Enabled, Disabled, 0x0000000000000040\n")  # fmt: skip
    (tmp_path / "nvidia-smi-query.csv").write_text(row + row.replace("Enabled, 2, 0", "[N/A], [N/A], [N/A]"))
    (tmp_path / "nvidia-smi-processes.csv").write_text("GPU-1, 4711, 512\n")
    (tmp_path / "kernel.log").write_text(
        "6,1,2,-;NVRM: Xid (PCI:0000:07:00): 79, pid='<unknown>', GPU has fallen off\n"
    )
    facts = gpus.collect(tmp_path)
    first, second = facts["gpus"]
    assert (facts["count"], facts["driver_version"]) == (2, "535.129.03")
    assert (first["memory_total_bytes"], first["ecc_corrected"]) == (81920 << 20, 2)
    assert first["throttle_reasons"] == ["hw_thermal_slowdown"]
    assert (second["ecc_enabled"], second["ecc_corrected"]) == (None, None)
    assert facts["processes"][0]["pid"] == 4711
    assert (facts["xids"][0]["pci_bus_id"], facts["xids"][0]["xid"]) == ("0000:07:00", 79)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_reaching_a_host_and_telling_it_from_another(address: str) -> None:
    listener = reach.listen({})
    port = listener["ports"]["6" if ":" in address else "4"]
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))
        targets = [
            {"key": "right", "address": address, "port": port, "identity": listener["identity"]},
            {"key": "other", "address": address, "port": port, "identity": "somebody else"},
            {"key": "refused", "address": "127.0.0.1", "port": closed.getsockname()[1], "identity": "x"},
            {"key": "silent", "address": "127.0.0.1", "port": silent.getsockname()[1], "identity": "x"},
        ]
        results = reach.connect({"targets": targets, "timeout_s": 2.0})["results"]
    reasons = {key: result["reason"] for key, result in results.items()}
    assert reasons == {"right": None, "other": "other-host", "refused": "refused", "silent": "timeout"}
    assert results["right"]["local_address"] == address
