"""Each planted fault is found, named on the right host, and no healthy host is blamed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from host_faults import NamespaceHost
from host_faults import fault as planted
from namespace_hosts import Cluster, why_no_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))]

SITE = next(Path(sys.prefix, "lib").glob("python3*/site-packages"))
PACKAGE = Path(__file__).parents[1] / "hvdtrain"
VICTIM, HEALTHY = "h3", {"h2", "h4"}


@dataclass(frozen=True)
class Fault:
    """`script` runs on the victim, in its own mounts; `words` name a fault of the harness."""

    name: str
    check: str
    script: str = "true"
    status: str = "fail"
    words: str = ""


def bound(file: str | Path, edit: str) -> str:
    """A changed copy of a file in its place: nothing but the victim sees it."""
    return f"{edit} {file} > {{work}}/changed && chmod 755 {{work}}/changed && mount --bind {{work}}/changed {file}"


def replaced(file: str, *lines: str) -> str:
    """Other lines in a file's place."""
    text = " ".join(f"'{line}'" for line in lines)
    return f"printf '%s\\n' {text} > {{work}}/new && chmod 755 {{work}}/new && mount --bind {{work}}/new {file}"


def package(name: str, version: str) -> str:
    """Another version of an installed package, over a layer on top of the real folder."""
    return (
        f"mount -t tmpfs tmpfs {{work}} && mkdir {{work}}/up {{work}}/tmp && mount -t overlay overlay "
        f"-o lowerdir={SITE},upperdir={{work}}/up,workdir={{work}}/tmp {SITE} && cd {SITE} && "
        f"old=$(echo {name}-[0-9]*.dist-info) && cp -r $old {{work}}/copy && rm -r $old && "
        f"sed -i 's/^Version: .*/Version: {version}/' {{work}}/copy/METADATA && "
        f"cp -r {{work}}/copy {name}-{version}.dist-info"
    )


ADAPTER = (
    "mount -t tmpfs tmpfs /sys/class && mkdir -p /sys/class/infiniband/mlx5_0/ports/1"
    " && cd /sys/class/infiniband/mlx5_0 && echo {rate} > ports/1/rate && echo '{state}' > ports/1/state"
    " && echo InfiniBand > ports/1/link_layer"
    " && echo {firmware} > fw_ver"
)


def adapter(rate: str = "100 Gb/sec (4X EDR)", state: str = "4: ACTIVE", firmware: str = "20.31") -> str:
    return ADAPTER.replace("{rate}", f"'{rate}'").replace("{state}", state).replace("{firmware}", firmware)


FAULTS = (
    Fault("no key let in", "ssh", words="no-login"),
    Fault("sshd down", "port", words="sshd-down"),
    Fault("ssh port filtered", "port", words="no-tcp=22"),
    Fault("host key unknown", "host-key", words="unknown-host-key"),
    Fault("host key changed", "host-key", words="wrong-host-key"),
    Fault("slow login", "answer", words="slow-login=90"),
    Fault("lying host", "answer", words="lying-host"),
    Fault("clock ahead", "clock", words="clock-skew=30"),
    Fault("login shell without end", "answer", replaced("/bin/bash", "#!/bin/dash", "exec cat /dev/zero")),
    Fault("login shell that fails", "answer", replaced("/bin/bash", "#!/bin/dash", "exit 3")),
    Fault("no Python of the job", "python-path", f"mount -t tmpfs tmpfs {sys.prefix}/bin"),
    Fault("other torch", "torch", package("torch", "2.9.1")),
    Fault("other TensorFlow", "tensorflow", package("tensorflow_cpu", "2.19.0")),
    Fault("other Horovod", "horovod", package("horovod", "0.27.0")),
    Fault("Horovod built for another torch", "horovod-fits", package("torch", "2.9.1")),
    Fault("other sources of hvdtrain", "hvdtrain", bound(PACKAGE / "errors.py", "sed '$a # changed'")),
    Fault("other MPI", "mpi", replaced("$(readlink -f /usr/bin/mpirun)", "#!/bin/sh", "echo mpirun [Open MPI] 5.0.1")),
    Fault("no directory", "directory", "mount -t tmpfs tmpfs {job}"),
    Fault("no data", "path {job}/code/data", "mount -t tmpfs tmpfs {job}/code"),
    Fault("full disk", "disk-space", "mount -t tmpfs -o size=1m tmpfs {job} && mkdir -p {job}/code/data"),
    Fault("no inodes", "inodes", "mount -t tmpfs -o size=9g,nr_inodes=50 tmpfs {job} && mkdir -p {job}/code/data"),
    Fault("few open files", "open-files", "prlimit --pid {sshd} --nofile=256:256"),
    Fault("little memory", "memory", bound("/proc/meminfo", "sed 's/^MemTotal:.*/MemTotal: 8000000 kB/'")),
    Fault("no free memory", "memory-free", bound("/proc/meminfo", "sed 's/^MemAvailable:.*/MemAvailable: 90000 kB/'")),
    Fault("other OS", "os", bound("/etc/os-release", "sed s/Debian/Ubuntu/")),
    Fault("other CPU", "cpu-model", bound("/proc/cpuinfo", "sed 's/^model name.*/model name : Xeon/'"), "warn"),
    Fault("load", "load", replaced("/proc/loadavg", "90.5 80.1 70.0 1/2 3"), "warn"),
    Fault("adapter missing elsewhere", "hca-count", adapter()),
    Fault("port down", "hca-state", adapter(state="1: DOWN")),
    Fault("little locked memory", "locked-memory", adapter() + " && prlimit --pid {sshd} --memlock=65536:65536"),
)


@contextmanager
def three_and_a_launcher() -> Iterator[tuple[Cluster, NamespaceHost]]:
    with Cluster(4) as cluster:
        yield cluster, cluster.hosts[2]


def validated(cluster: Cluster, *arguments: str, hosts: str = "h[2-4]") -> dict[str, Any]:
    argv = [sys.executable, "-m", "hvdtrain", "validate-cluster", "--hosts", hosts, "--format", "json", *arguments]
    done = cluster.hosts[0].run(argv, check=False, capture_output=True, text=True, timeout=180)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    return report


def blamed(report: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {
        (f["status"], f["check"], h) for f in report["findings"] if f["status"] in ("fail", "warn") for h in f["hosts"]
    }


def only_the_victim(found: set[tuple[str, str, str]]) -> bool:
    # Tests load the machine that the hosts share.
    return {host for _, check, host in found if check != "load"} <= {VICTIM}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_on_one_host(fault: Fault, tmp_path: Path) -> None:
    job, work = tmp_path / "job", tmp_path / "work"
    for folder in (job / "code" / "data", work):
        folder.mkdir(parents=True)
    with three_and_a_launcher() as (cluster, victim):
        names = {"{work}": work, "{folder}": cluster.folder, "{job}": job, "{sshd}": victim.sshd.pid}
        script, check = fault.script, fault.check
        for name, value in names.items():
            script, check = script.replace(name, str(value)), check.replace(name, str(value))
        victim.run(["sh", "-ec", script])
        with planted(victim, fault.words) if fault.words else nullcontext():
            report = validated(cluster, "--directory", f"{job}/code", "--path", f"{job}/code/data", "--timeout", "20")
    found = blamed(report)
    assert (fault.status, check, VICTIM) in found
    assert only_the_victim(found), found
    assert all(f["found"] and f["expected"] and f["fix"] for f in report["findings"] if f["status"] == "fail")


def test_healthy_hosts_have_no_fault() -> None:
    with three_and_a_launcher() as (cluster, _):
        report = validated(cluster)
    assert report["ok"], blamed(report)


def test_a_link_that_is_down_and_a_name_that_is_unknown() -> None:
    with three_and_a_launcher() as (cluster, victim):
        with victim.link_down():
            assert ("fail", "port", VICTIM) in blamed(validated(cluster, "--timeout", "20"))
        found = blamed(validated(cluster, hosts="h2,nosuchhost,h4"))
    assert ("fail", "name", "nosuchhost") in found
    assert {host for _, check, host in found if check != "load"} == {"nosuchhost"}


def test_host_key_checks_turned_off() -> None:
    with three_and_a_launcher() as (cluster, _):
        cluster.hosts[0].run(["sh", "-ec", "printf 'Host h3\\n StrictHostKeyChecking no\\n' >> ~root/.ssh/config"])
        found = blamed(validated(cluster))
    assert ("warn", "key-checks", VICTIM) in found
    assert only_the_victim(found)


def test_a_profile_of_good_hosts_names_the_one_that_is_worse(tmp_path: Path) -> None:
    profile = tmp_path / "good.yaml"
    with three_and_a_launcher() as (cluster, victim):
        assert validated(cluster, "--write-profile", str(profile))["ok"]
        assert {
            host for _, check, host in blamed(validated(cluster, "--profile", str(profile))) if check != "load"
        } == set()
        # More than quick itself asks for, and less than the hosts had.
        victim.run(["prlimit", "--pid", str(victim.sshd.pid), "--nofile=2048:2048"])
        report = validated(cluster, "--profile", str(profile), "--write-profile", str(tmp_path / "bad.yaml"))
        fewer = validated(cluster, "--profile", str(profile), hosts="h[2,4]")
    assert report["profile"] == "good"
    assert {found for found in blamed(report) if found[1] != "load"} == {("fail", "limits.open_files", VICTIM)}
    assert not (tmp_path / "bad.yaml").exists()
    assert {(status, check) for status, check, _ in blamed(fewer) if check != "load"} == {("fail", "hosts")}


def test_what_changed_since_is_told(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    with three_and_a_launcher() as (cluster, victim):
        validated(cluster, "--output", str(kept))
        assert kept.stat().st_mode & 0o777 == 0o600
        victim.run(["prlimit", "--pid", str(victim.sshd.pid), "--nofile=256:256"])
        changes = validated(cluster, "--compare", str(kept))["changes"]
    assert [(c["check"], c["hosts"]) for c in changes if c["check"] != "load"] == [("open-files", [VICTIM])]
    assert subprocess.run([sys.executable, "-m", "hvdtrain", "validate-cluster", "--hosts", "localhost", "--compare",
                           __file__], capture_output=True, check=False).returncode == 2  # fmt: skip
