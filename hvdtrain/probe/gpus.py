"""NVIDIA GPUs, as their driver tells through ``nvidia-smi``, and the errors that the kernel noted of them."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from hvdtrain.probe.annotations import Any
from hvdtrain.probe.reading import output, text, to_float, to_integer

_TIMEOUT_S = 10.0
_MIB = 1 << 20
_MAX_XIDS = 100
_KERNEL_LOG_BYTES = 1 << 20

# nvidia-smi's name, our name, kind.
_FIELDS = (
    ("index", "index", "int"),
    ("name", "model", "str"),
    ("uuid", "uuid", "str"),
    ("driver_version", "driver_version", "str"),
    ("pci.bus_id", "pci_bus_id", "str"),
    ("memory.total", "memory_total_bytes", "mib"),
    ("memory.used", "memory_used_bytes", "mib"),
    ("ecc.mode.current", "ecc_enabled", "bool"),
    ("ecc.errors.corrected.volatile.total", "ecc_corrected", "int"),
    ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected", "int"),
    ("temperature.gpu", "temperature_celsius", "float"),
    ("utilization.gpu", "utilization_percent", "float"),
    ("power.draw", "power_watts", "float"),
    ("power.limit", "power_limit_watts", "float"),
    ("clocks.sm", "clock_sm_mhz", "float"),
    ("clocks.max.sm", "clock_sm_max_mhz", "float"),
    ("pcie.link.gen.current", "pcie_generation", "int"),
    ("pcie.link.gen.max", "pcie_generation_max", "int"),
    ("pcie.link.width.current", "pcie_width", "int"),
    ("pcie.link.width.max", "pcie_width_max", "int"),
    ("persistence_mode", "persistence", "bool"),
    ("mig.mode.current", "mig_enabled", "bool"),
    ("clocks_throttle_reasons.active", "throttle_reasons", "throttle"),
)
# Bits of NVML's nvmlClocksThrottleReasons that mean slower than the clock that the load asks for.
_THROTTLE = (
    (0x04, "sw_power_cap"),
    (0x08, "hw_slowdown"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
)
QUERY_FIELDS = ",".join(field for field, _, _ in _FIELDS)


def collect(root: Path = Path("/")) -> dict[str, Any]:
    """Facts of section ``gpus``; the package's docstring names them.

    In a recorded tree ``nvidia-smi-query.csv`` and ``nvidia-smi-processes.csv`` hold what nvidia-smi printed, and
    ``kernel.log`` the kernel's messages.
    """
    facts: dict[str, Any] = {"count": 0, "driver_version": None, "error": None, "gpus": [], "processes": [],
                             "xids": None}  # fmt: skip
    if (root / "proc/driver/nvidia").exists() or root != Path("/"):
        facts["xids"] = _xids(root)
    answer, error = _ask(root, "nvidia-smi-query.csv", f"--query-gpu={QUERY_FIELDS}")
    if answer is None:
        # Without the driver's module there is nothing to ask, and so nothing wrong.
        facts["error"] = error if (root / "proc/driver/nvidia").exists() else None
        return facts
    facts["gpus"] = [_gpu(row) for row in _rows(answer) if len(row) == len(_FIELDS)]
    facts["count"] = len(facts["gpus"])
    facts["driver_version"] = next((gpu["driver_version"] for gpu in facts["gpus"]), None)
    processes, _ = _ask(root, "nvidia-smi-processes.csv", "--query-compute-apps=gpu_uuid,pid,used_gpu_memory")
    facts["processes"] = [_process(row, root) for row in _rows(processes or "") if len(row) == 3]
    return facts


def _ask(root: Path, recorded: str, query: str) -> tuple[str | None, str | None]:
    if root != Path("/"):
        return text(root / recorded), "the recorded tree has no answer of nvidia-smi's"
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        return None, None
    return output(["nvidia-smi", query, "--format=csv,noheader,nounits"], _TIMEOUT_S)


def _rows(answer: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]


def _gpu(row: list[str]) -> dict[str, Any]:
    return {name: _value(cell, kind) for (_, name, kind), cell in zip(_FIELDS, row)}  # noqa: B905


def _value(cell: str, kind: str) -> Any:
    if cell.startswith("[") or cell in ("", "N/A"):
        return None
    if kind == "bool":
        return cell == "Enabled"
    if kind == "int":
        return to_integer(cell)
    if kind == "float":
        return to_float(cell)
    if kind == "mib":
        amount = to_float(cell)
        return None if amount is None else int(amount * _MIB)
    if kind == "throttle":
        return _throttling(cell)
    return cell


def _throttling(cell: str) -> list[str] | None:
    try:
        active = int(cell, 16)
    except ValueError:
        return None
    return [name for bit, name in _THROTTLE if active & bit]


def _process(row: list[str], root: Path) -> dict[str, Any]:
    uuid, pid, memory = row
    folder = root / "proc" / pid
    user = None
    try:
        owner = folder.stat().st_uid
        user = str(owner)
        user = pwd.getpwuid(owner).pw_name
    except (OSError, KeyError):
        # In another namespace the process isn't seen, and an account of elsewhere has no name here.
        pass
    return {"gpu_uuid": uuid, "pid": to_integer(pid), "memory_used_bytes": _value(memory, "mib"), "user": user,
            "command": text(folder / "comm")}  # fmt: skip


def _xids(root: Path) -> list[dict[str, Any]] | None:
    log = _kernel_log() if root == Path("/") else text(root / "kernel.log")
    if log is None:
        return None
    found = []
    for line in log.splitlines():
        _, mark, rest = line.partition("NVRM: Xid (PCI:")
        bus, closed, words = rest.partition("):")
        if mark and closed:
            number = words.strip().partition(",")[0].split()[:1]
            found.append({"pci_bus_id": bus, "xid": to_integer(number[0] if number else None), "text": words.strip()})
    return found[-_MAX_XIDS:]


def _kernel_log() -> str | None:
    """The kernel's newest messages; None for a user who may not read them."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[bytes] = []
    size = 0
    try:
        while True:
            try:
                lines.append(os.read(log, 8192))
            except BrokenPipeError:  # It was overwritten while being read: the next is the oldest that is left.
                continue
            size += len(lines[-1])
            if size > 16 * _KERNEL_LOG_BYTES:
                break
    except OSError:
        pass  # BlockingIOError at the end, or a kernel that doesn't let this user read.
    finally:
        os.close(log)
    if not lines:
        return None
    return b"\n".join(lines)[-_KERNEL_LOG_BYTES:].decode("utf-8", "replace")
