"""How fast this process's GPU is: its memory, its copies from and to the host and the next GPU, its tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# More than any cache holds, so that memory is measured.
_COPY_BYTES = 1 << 30
_HOST_BYTES = 256 << 20
# Large enough to keep all of a B200's tensor cores busy; a multiple of all their tiles.
_MATRIX = 8192
# Of free memory, no more than one part in so many is used at once: the job's own processes may be there already.
_SPARED = 4
# A GPU that idled raises its clocks within some tenths of a second.
_WARM_UP = 0.25
_MIB = 1 << 20


def measure(local_rank: int, seconds: float) -> dict[str, Any]:
    """Measure one GPU.

    Args:
        local_rank: of this process among those of its host; its GPU is that of the same number, modulo their count.
        seconds: for all measurements together, about.

    Returns:
        ``local_rank``; ``model``: as the driver names it; ``dtype``: ``bfloat16`` or ``float16``;
        ``matmul_flop_per_s``: 2 n³ for each product of n x n matrices; ``copy_bytes_per_s``: inside the GPU's memory,
        bytes read plus bytes written; ``host_to_device_bytes_per_s`` and ``device_to_host_bytes_per_s``: with pinned
        memory; ``peer`` and ``peer_bytes_per_s``: the next GPU's number and copies to it, None where there is no other.
        Or ``skipped``: why there is nothing to measure, or ``error``: what CUDA says.
    """
    try:
        import torch
    except ImportError:
        return {"skipped": "PyTorch isn't installed"}
    # On ROCm the same names stand for AMD's.
    if not torch.cuda.is_available():
        return {"skipped": "no GPU"}
    try:
        return _measure(torch, local_rank, seconds)
    except RuntimeError as error:  # CUDA's errors, of which too little memory is one
        return {"error": str(error).partition("\n")[0][:300]}


def _measure(torch: Any, local_rank: int, seconds: float) -> dict[str, Any]:
    number = local_rank % torch.cuda.device_count()
    peer = (number + 1) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    # Tensor cores have bfloat16 from compute capability 8.0 on; before, PyTorch emulates it.
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(number) >= (8, 0) else torch.float16
    each = seconds / (4 if peer == number else 5)
    found = {
        "local_rank": local_rank,
        "model": torch.cuda.get_device_name(number),
        "dtype": str(dtype).removeprefix("torch."),
        "matmul_flop_per_s": _products(torch, number, dtype, each),
        "copy_bytes_per_s": 2 * _copies(torch, _COPY_BYTES, each, number, f"cuda:{number}", f"cuda:{number}"),
        "host_to_device_bytes_per_s": _copies(torch, _HOST_BYTES, each, number, "cpu", f"cuda:{number}"),
        "device_to_host_bytes_per_s": _copies(torch, _HOST_BYTES, each, number, f"cuda:{number}", "cpu"),
        "peer": None,
        "peer_bytes_per_s": None,
    }
    if peer != number:
        to_peer = _copies(torch, _HOST_BYTES, each, number, f"cuda:{number}", f"cuda:{peer}")
        found.update(peer=peer, peer_bytes_per_s=to_peer)
    return found


def _products(torch: Any, number: int, dtype: Any, seconds: float) -> float:
    """FLOP/s of square matrix products, three matrices in memory."""
    torch.cuda.empty_cache()
    size = _MATRIX
    while size > 1024 and 3 * 2 * size**2 > torch.cuda.mem_get_info(number)[0] // _SPARED:
        size //= 2
    # Random numbers: a GPU draws less power with zeros, and clocks higher.
    left, right = (torch.randn(size, size, device=f"cuda:{number}", dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 * _per_second(torch, lambda: torch.mm(left, right, out=product), seconds)


def _copies(torch: Any, most: int, seconds: float, number: int, source: str, target: str) -> float:
    """Bytes/s that are copied from one place to the other, where ``cpu`` is pinned memory."""
    torch.cuda.empty_cache()
    free = min(torch.cuda.mem_get_info(int(place.partition(":")[2]))[0] for place in (source, target) if place != "cpu")
    size = max(_MIB, min(most, free // _SPARED // _MIB * _MIB))
    one, other = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        if place == "cpu"
        else torch.zeros(size, dtype=torch.uint8, device=place)
        for place in (source, target)
    )
    torch.cuda.set_device(number)
    return size * _per_second(torch, lambda: other.copy_(one, non_blocking=True), seconds)


def _per_second(torch: Any, step: Callable[[], object], seconds: float) -> float:
    """How many steps the GPU does in a second, by its own clock."""

    def timed(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            step()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    # The first step also loads the library.
    timed(1)
    once = max(timed(1), 1e-6)
    once = timed(count := max(1, int(_WARM_UP * seconds / once))) / count
    count = max(1, int((1 - _WARM_UP) * seconds / max(once, 1e-6)))
    return count / timed(count)
