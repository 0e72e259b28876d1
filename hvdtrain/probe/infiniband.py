"""RDMA adapters (InfiniBand, RoCE, EFA), their ports and GIDs, and how near they are to the GPUs.

``hcas``: list of
    name (``mlx5_0``), node_type, board_id, firmware, hca_type, driver, vendor (``0x15b3``), pci_address: str or None.
    numa_node: int or None. net_devices: list of str.
    ports: list of {port: int, link_layer: ``InfiniBand`` or ``Ethernet`` (EFA: another), rate: str as the kernel says
    it, rate_gbit_per_s: float, state: ``ACTIVE``, ``DOWN`` …, physical_state: ``LinkUp`` …, lid: int,
    gids: list of {index: int, gid: str, type: ``IB/RoCE v1`` or ``RoCE v2``, net_device: str or None},
    counters: {name: int}, errors since the driver was loaded}.
``gpus``: list of {pci_address: str, model: str or None, numa_node: int or None}.
``distances``: {HCA: {GPU's PCI address: ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS``}}, as ``nvidia-smi topo`` says.
``gpu_direct``: str, what lets an HCA reach a GPU's memory: ``nvidia_peermem``, ``nv_peer_mem`` or ``dma-buf``; or None.
``memlock_soft_bytes``: int, memory that a process may pin; -1 for unlimited; None if unknown.
``open_mpi``: None, or {version: str, pml, btl, mtl: list of str (components), ipv6: bool}; version and ipv6 are None
    where neither an adapter nor an IPv6 address makes them matter.
``nccl_ofi``: str, path of the plugin that NCCL needs for libfabric (EFA), or None.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hvdtrain.probe.annotations import Any
from hvdtrain.probe.network import PCI_ADDRESS
from hvdtrain.probe.reading import integer, output, text, to_integer, which

_COUNTERS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors",
             "port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors")  # fmt: skip
_HW_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rx_icrc_encapsulated")
_OMPI_INFO_TIMEOUT_S = 5.0
_KINDS = ("pml", "btl", "mtl")
# Below the folder that Open MPI is installed in; the second is Debian's.
_COMPONENT_FOLDERS = ("lib*/openmpi*", "lib/*/openmpi/lib/openmpi*")
# Where AWS's installers put the plugin; the others are the library path's.
_OFI_FOLDERS = ("opt/amazon/ofi-nccl/lib", "opt/amazon/ofi-nccl/lib64", "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
                "opt/aws-ofi-nccl/lib", "opt/aws-ofi-nccl/install/lib", "usr/local/lib", "usr/lib/x86_64-linux-gnu",
                "usr/lib64")  # fmt: skip
_OFI_NAMES = ("libnccl-net-ofi.so", "libnccl-net-aws-ofi.so", "libnccl-net.so")
# The first kernel whose RDMA drivers take DMA-BUFs.
_DMA_BUF_KERNEL = (5, 12)


def collect(root: Path = Path("/")) -> dict[str, Any]:
    """Facts of section ``infiniband``; the module's docstring names them.

    A recorded tree holds what ``ompi_info --parsable`` printed in ``ompi_info.txt``.
    """
    hcas = [_hca(folder) for folder in _folders(root / "sys/class/infiniband")]
    gpus = _gpus(root)
    return {
        "hcas": hcas,
        "gpus": gpus,
        "distances": _distances(root, hcas, gpus),
        "gpu_direct": _gpu_direct(root) if gpus else None,
        "memlock_soft_bytes": _memlock(root),
        "open_mpi": _open_mpi(root, bool(hcas)),
        "nccl_ofi": _nccl_ofi(root),
    }


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: _natural(path.name))
    except OSError:
        return []


def _natural(name: str) -> list[Any]:
    """Sorts ``mlx5_10`` after ``mlx5_2``."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)]


def _hca(folder: Path) -> dict[str, Any]:
    pci = PCI_ADDRESS.findall(os.path.realpath(folder / "device"))
    numa_node = integer(folder / "device/numa_node")
    driver = folder / "device/driver"
    return {
        "name": folder.name,
        "node_type": _after_colon(text(folder / "node_type")),
        "board_id": text(folder / "board_id"),
        "firmware": text(folder / "fw_ver"),
        "hca_type": text(folder / "hca_type"),
        "driver": os.path.basename(os.readlink(driver)) if driver.is_symlink() else None,  # noqa: PTH115, PTH119
        "vendor": text(folder / "device/vendor"),
        "pci_address": pci[-1] if pci else None,
        "numa_node": numa_node if numa_node is not None and numa_node >= 0 else None,
        "net_devices": [path.name for path in _folders(folder / "device/net")],
        "ports": [_port(path) for path in _folders(folder / "ports") if path.name.isdigit()],
    }


def _port(folder: Path) -> dict[str, Any]:
    rate = text(folder / "rate")
    gbit = re.match(r"([0-9.]+) Gb/sec", rate or "")
    lid = text(folder / "lid")
    counters = {name: integer(folder / "counters" / name) for name in _COUNTERS}
    counters.update({name: integer(folder / "hw_counters" / name) for name in _HW_COUNTERS})
    return {
        "port": int(folder.name),
        "link_layer": text(folder / "link_layer"),
        "rate": rate,
        "rate_gbit_per_s": float(gbit.group(1)) if gbit else None,
        "state": _after_colon(text(folder / "state")),
        "physical_state": _after_colon(text(folder / "phys_state")),
        "lid": int(lid, 16) if lid and re.fullmatch(r"0x[0-9a-fA-F]+", lid) else to_integer(lid),
        "gids": _gids(folder),
        "counters": {name: value for name, value in counters.items() if value is not None},
    }


def _after_colon(words: str | None) -> str | None:
    """``ACTIVE`` of ``4: ACTIVE``."""
    return words.partition(":")[2].strip() if words and ":" in words else words


def _gids(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in _folders(folder / "gids"):
        gid = text(path)
        if not gid or not gid.replace(":", "").strip("0"):
            continue
        # Reading the type of an entry that isn't in use is an error.
        found.append({"index": to_integer(path.name), "gid": gid, "type": text(folder / "gid_attrs/types" / path.name),
                      "net_device": text(folder / "gid_attrs/ndevs" / path.name)})  # fmt: skip
    return found


def _gpus(root: Path) -> list[dict[str, Any]]:
    found = []
    for folder in _folders(root / "proc/driver/nvidia/gpus"):
        address = folder.name.lower()
        model = re.search(r"^Model:\s*(.*)$", text(folder / "information") or "", re.MULTILINE)
        numa_node = integer(root / "sys/bus/pci/devices" / address / "numa_node")
        found.append({"pci_address": address, "model": model.group(1) if model else None,
                      "numa_node": numa_node if numa_node is not None and numa_node >= 0 else None})  # fmt: skip
    return found


def _distances(root: Path, hcas: list[dict[str, Any]], gpus: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    return {
        hca["name"]: {
            gpu["pci_address"]: pci_distance(
                _pci_path(root, hca["pci_address"]),
                _pci_path(root, gpu["pci_address"]),
                hca["numa_node"] is not None and hca["numa_node"] == gpu["numa_node"],
            )
            for gpu in gpus
        }
        for hca in hcas
        if hca["pci_address"]
    }


def _pci_path(root: Path, address: str) -> list[str]:
    """Bridges from the root bus to a device, and the device."""
    path = (root / "sys/bus/pci/devices" / address).resolve().parts
    starts = [place for place, name in enumerate(path) if name.startswith("pci") and ":" in name]
    return list(path[starts[0] :]) if starts else [address]


def pci_distance(one: list[str], other: list[str], same_node: bool) -> str:
    """How far two PCI devices are from each other, in the words of ``nvidia-smi topo --matrix``.

    PIX: one switch at most; PXB: several switches; PHB: through the CPU's host bridge; NODE: from one host bridge to
    another in the same NUMA node; SYS: between NUMA nodes.
    """
    common = 0
    for ours, theirs in zip(one, other):  # noqa: B905
        if ours != theirs:
            break
        common += 1
    if common == 0:
        return "NODE" if same_node else "SYS"
    if common == 1:
        return "PHB"
    # In one switch the paths part at its downstream ports: a port and a device each.
    return "PIX" if common >= max(len(one), len(other)) - 2 else "PXB"


def _gpu_direct(root: Path) -> str | None:
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if (root / "sys/module" / module).exists():
            return module
    kernel = re.match(r"(\d+)\.(\d+)", text(root / "proc/sys/kernel/osrelease") or "")
    is_open = "Open Kernel Module" in (text(root / "proc/driver/nvidia/version") or "")
    if is_open and kernel and (int(kernel.group(1)), int(kernel.group(2))) >= _DMA_BUF_KERNEL:
        return "dma-buf"
    return None


def _memlock(root: Path) -> int | None:
    found = re.search(r"^Max locked memory\s+(\S+)", text(root / "proc/self/limits") or "", re.MULTILINE)
    if not found:
        return None
    return -1 if found.group(1) == "unlimited" else to_integer(found.group(1))


def _open_mpi(root: Path, has_adapters: bool) -> dict[str, Any] | None:
    """From its own report; from its components' files where those are all that can matter.

    The report takes longer than everything else here together, and of many hosts that is all the time there is.
    """
    if not has_adapters and not _has_ipv6(root):
        components = _component_files(root)
        if components["pml"] and components["btl"]:
            return {"version": None, "ipv6": None, **components}
    if root == Path("/"):
        told, _ = output(["ompi_info", "--parsable"], _OMPI_INFO_TIMEOUT_S)
    else:
        told = text(root / "ompi_info.txt")
    if not told:
        return None
    version = re.search(r"^ompi:version:full:(.*)$", told, re.MULTILINE)
    ipv6 = re.search(r"^options:ipv6:(\w+)$", told, re.MULTILINE)
    found = re.findall(r"^mca:(pml|btl|mtl):([^:]+):version:", told, re.MULTILINE)
    return {"version": version.group(1).strip() if version else None, "ipv6": ipv6.group(1) == "yes" if ipv6 else None,
            **{kind: sorted({name for other, name in found if other == kind}) for kind in _KINDS}}  # fmt: skip


def _component_files(root: Path) -> dict[str, list[str]]:
    """Components of the Open MPI on PATH, which are files of their own unless they were built in."""
    mpirun = which("mpirun") if root == Path("/") else str(root / "usr/bin/mpirun")
    prefix = Path(os.path.realpath(mpirun)).parents[1] if mpirun else root / "none"
    found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for folder in (place for pattern in _COMPONENT_FOLDERS for place in prefix.glob(pattern)):
        for path in folder.glob("mca_*.so"):
            kind, _, component = path.name[len("mca_") :].partition("_")
            if kind in found:
                found[kind].append(component[: -len(".so")])
    return {kind: sorted(set(names)) for kind, names in found.items()}


def _has_ipv6(root: Path) -> bool:
    """Whether an address of IPv6 may be reached from elsewhere: its scope is global (0)."""
    return any(line.split()[3] == "00" for line in (text(root / "proc/net/if_inet6") or "").splitlines())


def _nccl_ofi(root: Path) -> str | None:
    folders = list(_OFI_FOLDERS)
    if root == Path("/"):
        folders = [word.strip("/") for word in os.environ.get("LD_LIBRARY_PATH", "").split(":") if word] + folders
    for folder in folders:
        for name in _OFI_NAMES:
            if (root / folder / name).exists():
                return f"/{folder}/{name}"
    return None
