"""Programs that stand for NVIDIA's and perftest's: they print what the real ones do, as far as it is looked at."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The real dialogue: the server listens at -p, both ends exchange parameters over TCP, and each prints the table.
_PERFTEST = """
import socket, sys, time
argv = sys.argv[1:]
value = lambda option: argv[argv.index(option) + 1]
assert "--report_gbits" in argv and int(value("-D")) > 2 * int(value("-f"))
port = int(value("-p"))
if argv[-1] == "--report_gbits":
    with socket.create_server(("", port)) as server:
        print("* Waiting for client to connect... *")
        client, _ = server.accept()
        rate = client.recv(64).decode()
else:
    client = socket.create_connection((argv[-1], port), 60)
    rate = RATES[value("-d")]
    client.sendall(rate.encode())
if rate == "fails":
    sys.exit(" Unable to Connect the HCA's through the link")
rule = 87 * "-"
print(rule, "                    RDMA_Write BW Test", " Device         : " + value("-d"), rule, sep="\\n")
print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
print(f" 1048576    35098            0.00               {rate}              0.023399", rule, sep="\\n")
"""


def install(folder: Path, name: str, script: str) -> None:
    """A program of this name, in Python."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable} -IS\n{script}")
    path.chmod(0o755)


def saying(output: str, status: int = 0) -> str:
    """A program that prints this."""
    return f"import sys\nprint({output!r})\nsys.exit({status})\n"


def ib_write_bw(rates: Mapping[str, str]) -> str:
    """By the client's adapter, the rate in Gbit/s, or ``fails``."""
    return f"RATES = {dict(rates)!r}\n{_PERFTEST}"


def smi_log(*gpus: Mapping[str, str]) -> str:
    """What ``nvidia-smi -q -x`` prints of healthy GPUs but for what is given, by the tags' names."""
    healthy = {
        "persistence_mode": "Enabled",
        "gpu_recovery_action": "None",
        "max_link_width": "16x",
        "current_link_width": "16x",
        "pending_retirement": "N/A",
        "remapped_row_pending": "No",
        "remapped_row_failure": "No",
        "state": "Completed",
        "status": "Success",
    }
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
    return head + "".join(_smi_gpu({**healthy, **gpu}) for gpu in gpus) + "</nvidia_smi_log>\n"


def _smi_gpu(values: Mapping[str, str]) -> str:
    def tags(*names: str) -> str:
        return "".join(f"\t\t<{name}>{values[name]}</{name}>\n" for name in names)

    return (
        f'\t<gpu id="00000000:18:00.0">\n\t\t<product_name>NVIDIA H100 80GB HBM3</product_name>\n'
        f"{tags('persistence_mode', 'gpu_recovery_action')}"
        f"<pci><pci_gpu_link_info><link_widths>{tags('max_link_width', 'current_link_width')}</link_widths>"
        f"</pci_gpu_link_info></pci><retired_pages>{tags('pending_retirement')}</retired_pages>"
        f"<remapped_rows>{tags('remapped_row_pending', 'remapped_row_failure')}</remapped_rows>"
        f"<fabric>{tags('state', 'status')}</fabric></gpu>\n"
    )


def dcgm_4(*tests: tuple[str, Sequence[Mapping[str, Any]]]) -> str:
    """What DCGM 4's ``dcgmi diag -r 1 -j`` prints: each test and its results."""
    found = [
        {"name": name, "results": list(results), "test_summary": {"status": _worst(results)}} for name, results in tests
    ]
    document = {
        "DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": found}]},
        "entity_groups": [{"entity_group": "GPU", "entity_group_id": 1, "entities": [{"entity_id": 0}]}],
        "metadata": {"version": "4.2.3", "Driver Version Detected": "570.124.06"},
    }
    return json.dumps(document, indent=4)


def _worst(results: Sequence[Mapping[str, Any]]) -> str:
    statuses = [result["status"] for result in results]
    return next((status for status in ("Fail", "Warn", "Pass") if status in statuses), "Skip")


def dcgm_4_result(gpu: int, status: str, warning: str = "", severity: int = 2) -> dict[str, Any]:
    """Of one GPU."""
    told: dict[str, Any] = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": gpu, "status": status}
    if warning:
        told["warnings"] = [{"error_category": 8, "error_id": 29, "error_severity": severity, "warning": warning}]
    return told
