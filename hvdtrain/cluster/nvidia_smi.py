"""What ``nvidia-smi -q -x`` says of GPUs that need their owner's hand. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from hvdtrain.cluster.checks.common import Verdict, ok
from hvdtrain.cluster.models import Status

_RESET = "reset the GPU (nvidia-smi --gpu-reset) or restart the host"
_UNTOLD = {"", "N/A", "None", "Unknown Error", "Not Supported", "Requested functionality has been deprecated"}


@dataclass(frozen=True)
class _Trouble:
    status: Status
    found: str
    fix: str


def judge_nvidia_smi(exit_status: int, output: str) -> Verdict:
    """The worst of all GPUs; each trouble once, with the GPUs that have it, numbered as nvidia-smi does."""
    try:
        gpus = _gpus(output)
    except (ValueError, ElementTree.ParseError):
        gpus = []
    troubles: dict[_Trouble, list[int]] = {}
    for number, gpu in enumerate(gpus):
        for trouble in _troubles(gpu):
            troubles.setdefault(trouble, []).append(number)
    found = [f"GPU {', '.join(map(str, numbers))}: {trouble.found}" for trouble, numbers in troubles.items()]
    fixes = [trouble.fix for trouble in troubles]
    if exit_status or not gpus:
        found.insert(0, f"nvidia-smi ended with status {exit_status}: {_remark(output)}")
        fixes.insert(0, "see that the driver is loaded and fits the GPUs ('dmesg'), and restart the host")
    if not found:
        return ok(f"{len(gpus)} GPU{'s are' if len(gpus) > 1 else ' is'} well")
    failed = exit_status or not gpus or any(trouble.status == "fail" for trouble in troubles)
    return "fail" if failed else "warn", "; ".join(found), "nothing to repair", "; ".join(dict.fromkeys(fixes))


def _gpus(output: str) -> list[ElementTree.Element]:
    """Its elements ``gpu``; warnings may stand before and after the document."""
    begin, end = output.find("<nvidia_smi_log"), output.rfind("</nvidia_smi_log>")
    document = output[begin : end + len("</nvidia_smi_log>")]
    # nvidia-smi declares no entities; what does is made to take this machine's memory.
    if begin < 0 or end < begin or "<!" in document:
        raise ValueError("it is no answer of nvidia-smi's")
    return ElementTree.fromstring(document).findall("gpu")  # noqa: S314 -- see above


def _remark(output: str) -> str:
    """What is said beside the document."""
    outside = output[: output.find("<?xml")] if "<?xml" in output else output
    outside += output.rpartition("</nvidia_smi_log>")[2] if "</nvidia_smi_log>" in output else ""
    lines = [line.strip() for line in outside.splitlines() if line.strip()]
    return " ".join(lines[-2:])[:300] or "it says nothing of its GPUs"


def _troubles(gpu: ElementTree.Element) -> Iterator[_Trouble]:
    def told(path: str) -> str:
        value = (gpu.findtext(path) or "").strip()
        return "" if value in _UNTOLD else value

    if told("remapped_rows/remapped_row_failure") == "Yes":
        yield _Trouble("fail", "a row of its memory is broken and can't be replaced", "replace the GPU")
    if told("remapped_rows/remapped_row_pending") == "Yes":
        yield _Trouble("warn", "rows of its memory wait to be replaced", _RESET)
    # Drivers print either name, or both.
    if "Yes" in (told("retired_pages/pending_retirement"), told("retired_pages/pending_blacklist")):
        yield _Trouble("warn", "pages of its memory wait to be retired", _RESET)
    if action := told("gpu_recovery_action"):
        yield _Trouble("fail", f"the driver asks for '{action[:60]}'", _RESET)
    state, status = told("fabric/state"), told("fabric/status")
    if (state and state != "Completed") or (status and status != "Success"):
        found = f"NVLink's fabric is '{' '.join(filter(None, (state, status)))[:60]}'"
        yield _Trouble("fail", found, "start nvidia-fabricmanager, of the driver's version")
    link = "pci/pci_gpu_link_info/link_widths"
    now, most = (told(f"{link}/{name}_link_width").rstrip("x") for name in ("current", "max"))
    # The generation falls while a GPU idles, the width doesn't.
    if now.isdecimal() and most.isdecimal() and int(now) < int(most):
        fix = "reseat the GPU or its riser, and look for PCIe errors in the kernel log"
        yield _Trouble("warn", f"{int(now)} of {int(most)} PCIe lanes", fix)
    if told("persistence_mode") == "Disabled":
        fix = "run nvidia-persistenced: else the driver forgets error counts and starts anew with each job"
        yield _Trouble("warn", "persistence mode is off", fix)
