"""What was measured of GPUs (`hvdtrain.tasks.gpu_speed`), held against their models and each other. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from hvdtrain.cluster.models import Finding
from hvdtrain.cluster.profiles.checks import words_match
from hvdtrain.cluster.units import bytes_rate, flops

_OF_MODEL, _OF_FELLOWS = 0.6, 0.7
# Cards of 70 to 150 W can't hold their tensor cores' peak for longer than a moment; how much they hold is an estimate.
_OF_POWER_BOUND = 0.3
# What a host tells may be any number.
_NO_SPEED = 1e21


@dataclass(frozen=True)
class Figures:
    """A model's peak figures.

    Attributes:
        words: of its name, as the driver tells it.
        tflops: of dense matrix products in FP16 and BF16 with FP32 accumulation, 10¹² FLOP/s.
        gbytes: its memory's bandwidth, 10⁹ bytes/s.
        part: of ``tflops`` that a healthy one holds.
    """

    words: str
    tflops: float
    gbytes: float
    part: float = _OF_MODEL


# What NVIDIA publishes in data sheets, and for GeForce in white papers, as it is quoted in tables of third parties;
# the documents themselves weren't compared. Figures with sparsity are halved. In one table only, or from memory, are
# TFLOPS of GH200, H200 NVL, H100 NVL, A10, L4, V100 PCIe, V100S, RTX 6000 Ada, RTX A6000, RTX 5090 and RTX 3090, and
# GB/s of H200 NVL, H100 NVL and V100S. The first whose words the name has counts.
FIGURES = (
    Figures("B200", 2250, 7700),
    Figures("GH200 480GB", 989.5, 4000),
    Figures("H200 NVL", 835.5, 4800),
    Figures("H200", 989.5, 4800),
    Figures("H100 PCIe", 756.5, 2000),
    Figures("H100 NVL", 835.5, 3900),
    Figures("H100 80GB HBM3", 989.5, 3350),
    Figures("A100 SXM4 80GB", 312, 2039),
    Figures("A100 80GB PCIe", 312, 1935),
    Figures("A100", 312, 1555),
    Figures("A30", 165, 933),
    Figures("A40", 149.7, 696),
    Figures("A10", 125, 600, _OF_POWER_BOUND),
    Figures("L40S", 362, 864),
    Figures("L40", 181, 864),
    Figures("L4", 121, 300, _OF_POWER_BOUND),
    Figures("V100S PCIE", 130, 1134),
    Figures("V100 SXM2", 125, 900),
    Figures("V100 PCIE", 112, 900),
    Figures("T4", 65, 300, _OF_POWER_BOUND),
    Figures("RTX 6000 Ada", 364, 960),
    Figures("RTX A6000", 154.8, 768),
    Figures("RTX 5090", 209.5, 1792),
    Figures("RTX 4090", 165.2, 1008),
    Figures("RTX 3090", 71, 936),
)
# Parts of GPUs and slower ones of the same name.
_NOT_WHOLE = ("MIG", "GRID", "Laptop", "Max Q", "RTX 4090 D", "RTX 5090 D", "RTX 3090 Ti")
# vGPUs: "NVIDIA A40-48Q".
_VIRTUAL = re.compile(r"-\d+[ABCQ]$")
_Of = Callable[[Figures], float]


@dataclass(frozen=True)
class _Quantity:
    """Something measured of each GPU; ``same_place``: only GPUs of the same number are alike in it."""

    name: str
    what: str
    shown: Callable[[float], str]
    least: _Of | None = None
    same_place: bool = False


@dataclass(frozen=True)
class _Check:
    name: str
    quantities: tuple[_Quantity, ...]
    fix: str


@dataclass(frozen=True, eq=False)
class _Gpu:
    host: str
    number: int
    model: str
    speeds: Mapping[str, float]


_CHECKS = (
    _Check(
        "gpu-matmul",
        (_Quantity("matmul_flop_per_s", "", flops, lambda figures: figures.tflops * 1e12 * figures.part),),
        "see its clocks, temperature and power limit under load ('nvidia-smi -q -d CLOCK,POWER,PERFORMANCE'), and that "
        "nothing else uses it",
    ),
    _Check(
        "gpu-memory",
        (_Quantity("copy_bytes_per_s", "", bytes_rate, lambda figures: figures.gbytes * 1e9 * _OF_MODEL),),
        "see its memory clock and its errors ('nvidia-smi -q -d CLOCK,ECC,ROW_REMAPPER'), and that nothing uses it",
    ),
    _Check(
        "gpu-host-copy",
        (
            _Quantity("host_to_device_bytes_per_s", " from the host", bytes_rate),
            _Quantity("device_to_host_bytes_per_s", " to the host", bytes_rate),
            _Quantity("peer_bytes_per_s", " to the next GPU", bytes_rate, same_place=True),
        ),
        "see its PCIe generation and width under load ('nvidia-smi -q -d PCIE' or 'lspci -vv'), NVLink ('nvidia-smi "
        "nvlink -s'), and that each rank runs on its GPU's socket",
    ),
)
_QUANTITIES = tuple(quantity for check in _CHECKS for quantity in check.quantities)


@cache
def figures(model: str) -> Figures | None:
    """The figures of a model by the driver's name for it; None if there are none."""
    if _VIRTUAL.search(model) or any(words_match(words, model) for words in _NOT_WHOLE):
        return None
    return next((figures for figures in FIGURES if words_match(figures.words, model)), None)


def judge(speeds: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Finding, ...]:
    """Findings ``gpu-matmul``, ``gpu-memory`` and ``gpu-host-copy`` of each host.

    A GPU is held against 60 % of its model's figure, and 70 % of the median of the others of its model on all hosts.

    Args:
        speeds: host -> what `hvdtrain.tasks.gpu_speed.measure` gave for each of its GPUs; hosts told it, so that
            anything may be in it.
    """
    gpus = {host: tuple(_gpus(host, told)) for host, told in speeds.items()}
    fellows = _Fellows(gpu for own in gpus.values() for gpu in own)
    return tuple(finding for check in _CHECKS for finding in _judge(check, speeds, gpus, fellows))


class _Fellows:
    """The speeds of all GPUs that are alike, in order."""

    def __init__(self, gpus: Iterable[_Gpu]) -> None:
        self._speeds: dict[tuple[object, ...], list[float]] = {}
        for gpu in gpus:
            for quantity in _QUANTITIES:
                if quantity.name in gpu.speeds:
                    self._speeds.setdefault(self._kind(gpu, quantity), []).append(gpu.speeds[quantity.name])
        for speeds in self._speeds.values():
            speeds.sort()

    def usual(self, gpu: _Gpu, quantity: _Quantity) -> float | None:
        """Median of all others; None if there are none."""
        speeds = self._speeds[self._kind(gpu, quantity)]
        count = len(speeds) - 1
        own = bisect_left(speeds, gpu.speeds[quantity.name])
        middle = ((count - 1) // 2, count // 2)
        return sum(speeds[place + (place >= own)] for place in middle) / 2 if count else None

    def _kind(self, gpu: _Gpu, quantity: _Quantity) -> tuple[object, ...]:
        return quantity.name, gpu.model, gpu.number if quantity.same_place else None


def _gpus(host: str, told: Sequence[Mapping[str, Any]]) -> Iterator[_Gpu]:
    for place, one in enumerate(told):
        if not isinstance(one, Mapping) or not isinstance(one.get("model"), str):
            continue
        speeds = {q.name: float(one[q.name]) for q in _QUANTITIES if _is_speed(one.get(q.name))}
        number = one.get("local_rank")
        yield _Gpu(host, number if isinstance(number, int) else place, one["model"], speeds)


def _is_speed(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _NO_SPEED


def _judge(
    check: _Check,
    speeds: Mapping[str, Sequence[Mapping[str, Any]]],
    gpus: Mapping[str, Sequence[_Gpu]],
    fellows: _Fellows,
) -> Iterator[Finding]:
    fine: dict[str, list[str]] = {}
    for host, told in speeds.items():
        own = [gpu for gpu in gpus[host] if any(q.name in gpu.speeds for q in check.quantities)]
        errors = list(dict.fromkeys(str(one["error"])[:300] for one in told if _has(one, "error")))
        for error in errors:
            yield Finding(
                "gpus", check.name, (host,), "warn", error, "a measurement", "see 'nvidia-smi' and 'dmesg' there"
            )
        wanted = {
            (gpu, quantity): _wanted(gpu, quantity, fellows)
            for quantity in check.quantities
            for gpu in own
            if quantity.name in gpu.speeds
        }
        if slow := [(gpu, quantity) for (gpu, quantity), words in wanted.items() if words]:
            found = "; ".join(
                f"GPU {gpu.number}: {quantity.shown(gpu.speeds[quantity.name])}{quantity.what}"
                for gpu, quantity in slow
            )
            expected = "; ".join(dict.fromkeys(words for words in wanted.values() if words))
            yield Finding("gpus", check.name, (host,), "warn", found, expected, check.fix)
        elif own and not errors:
            fine.setdefault(", ".join(sorted({gpu.model[:60] for gpu in own})), []).append(host)
        elif not errors:
            reasons = (str(one["skipped"])[:300] for one in told if _has(one, "skipped"))
            yield Finding("gpus", check.name, (host,), "skip", next(reasons, "no GPU"))
    for models, hosts in fine.items():
        own = [gpu for host in hosts for gpu in gpus[host]]
        said = ", ".join(
            f"{quantity.shown(median(values))}{quantity.what}"
            for quantity in check.quantities
            if (values := [gpu.speeds[quantity.name] for gpu in own if quantity.name in gpu.speeds])
        )
        yield Finding("gpus", check.name, tuple(hosts), "ok", f"{said} is usual for {models}")


def _has(one: Any, name: str) -> bool:
    return isinstance(one, Mapping) and one.get(name) is not None


def _wanted(gpu: _Gpu, quantity: _Quantity, fellows: _Fellows) -> str:
    """What a slow GPU should have reached, in words; empty for one that isn't slow."""
    speed = gpu.speeds[quantity.name]
    model = figures(gpu.model)
    if model and quantity.least and speed < quantity.least(model):
        return f"at least {quantity.shown(quantity.least(model))}{quantity.what} of {gpu.model}"
    usual = fellows.usual(gpu, quantity)
    if usual is not None and speed < _OF_FELLOWS * usual:
        return f"nearly {quantity.shown(usual)}{quantity.what}, the others' median"
    return ""
