"""GPUs' speeds: what is counted, on a GPU that is made up, and what is said of what was measured."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from hvdtrain.cluster.gpu_speed import FIGURES, figures, judge
from hvdtrain.cluster.models import Finding
from hvdtrain.tasks import gpu_speed

H100 = "NVIDIA H100 80GB HBM3"


# --- measuring ---------------------------------------------------------------------------------------------------


class MadeUpTorch(types.ModuleType):
    """As much of PyTorch as is asked for, on GPUs of known speeds with a clock of their own."""

    def __init__(self, count: int = 1, free_bytes: int = 80 << 30, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__("torch")
        self.flop_per_s, self.memory, self.up, self.down, self.peer = 7e14, 3e12, 50e9, 40e9, 300e9
        self.now_s, self.free_bytes, self.used_bytes = 0.0, free_bytes, 0
        self.sizes: list[int] = []
        self.bfloat16, self.float16, self.uint8 = "torch.bfloat16", "torch.float16", "torch.uint8"
        self.cuda = types.SimpleNamespace(
            is_available=lambda: count > 0,
            device_count=lambda: count,
            set_device=lambda number: None,
            get_device_name=lambda number: H100,
            get_device_capability=lambda number: capability,
            mem_get_info=lambda number: (self.free_bytes, 80 << 30),
            empty_cache=lambda: None,
            Event=lambda enable_timing: Event(self),
        )

    def spend(self, seconds: float) -> None:
        self.now_s += seconds

    def randn(self, rows: int, columns: int, device: str, dtype: str) -> Tensor:
        return Tensor(self, 2 * rows * columns, device, rows)

    def empty_like(self, tensor: Tensor) -> Tensor:
        return Tensor(self, tensor.size, tensor.device, tensor.rows)

    def mm(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        assert len({left.rows, right.rows, out.rows}) == 1
        self.spend(2 * left.rows**3 / self.flop_per_s)

    def empty(self, size: int, dtype: str, pin_memory: bool) -> Tensor:
        assert pin_memory
        return Tensor(self, size, "cpu", 0)

    def zeros(self, size: int, dtype: str, device: str) -> Tensor:
        return Tensor(self, size, device, 0)


class Tensor:
    def __init__(self, torch: MadeUpTorch, size: int, device: str, rows: int) -> None:
        self.torch, self.size, self.device, self.rows = torch, size, device, rows
        if device != "cpu":
            torch.sizes.append(size)

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        assert source.size == self.size
        if source.device == self.device:
            # The memory carries each byte twice.
            self.torch.spend(2 * self.size / self.torch.memory)
        elif "cpu" not in (source.device, self.device):
            self.torch.spend(self.size / self.torch.peer)
        else:
            self.torch.spend(self.size / (self.torch.up if source.device == "cpu" else self.torch.down))


class Event:
    def __init__(self, torch: MadeUpTorch) -> None:
        self.torch = torch

    def record(self) -> None:
        self.at_s = self.torch.now_s

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at_s - self.at_s)


def measured(monkeypatch: pytest.MonkeyPatch, torch: MadeUpTorch, rank: int = 0, seconds: float = 2) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "torch", torch)
    return gpu_speed.measure(rank, seconds)


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = MadeUpTorch()
    assert measured(monkeypatch, torch, rank=3) == {
        "local_rank": 3,
        "model": H100,
        "dtype": "bfloat16",
        "matmul_flop_per_s": pytest.approx(7e14),
        "copy_bytes_per_s": pytest.approx(3e12),
        "host_to_device_bytes_per_s": pytest.approx(50e9),
        "device_to_host_bytes_per_s": pytest.approx(40e9),
        "peer": None,
        "peer_bytes_per_s": None,
    }
    # About the time that was given, of the GPU's.
    assert 1.5 < torch.now_s < 2.5


def test_the_next_gpu_is_copied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, MadeUpTorch(4), rank=3)
    assert (found["peer"], found["peer_bytes_per_s"]) == (0, pytest.approx(300e9))


def test_little_free_memory_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = MadeUpTorch(free_bytes=64 << 20)
    assert measured(monkeypatch, torch)["copy_bytes_per_s"] == pytest.approx(3e12)
    assert max(torch.sizes) <= 16 << 20


def test_older_gpus_multiply_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, MadeUpTorch(capability=(7, 0)))["dtype"] == "float16"


def test_no_gpu_and_no_pytorch_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, MadeUpTorch(0)) == {"skipped": "no GPU"}
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_speed.measure(0, 1.0) == {"skipped": "PyTorch isn't installed"}


def test_an_error_of_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = MadeUpTorch()

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with …")

    monkeypatch.setattr(torch, "mm", fails)
    assert measured(monkeypatch, torch) == {"error": "CUDA error: an illegal memory access was encountered"}


def test_it_loads_without_pytorch() -> None:
    program = "import sys; sys.modules['torch'] = None; import hvdtrain.tasks.gpu_speed"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- judging -----------------------------------------------------------------------------------------------------


def gpu(number: int = 0, model: str = H100, **speeds: float) -> dict[str, Any]:
    healthy = {
        "matmul_flop_per_s": 700e12,
        "copy_bytes_per_s": 2.9e12,
        "host_to_device_bytes_per_s": 55e9,
        "device_to_host_bytes_per_s": 53e9,
        "peer_bytes_per_s": 350e9,
    }
    return {"local_rank": number, "model": model, **healthy, **speeds}


def findings(**hosts: list[Any]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {"gpu-matmul": [], "gpu-memory": [], "gpu-host-copy": []}
    for finding in judge(hosts):
        found[finding.check].append(finding)
    return found


def blamed(found: Mapping[str, list[Finding]]) -> dict[str, list[tuple[str, ...]]]:
    return {
        check: [finding.hosts for finding in own if finding.status == "warn"]
        for check, own in found.items()
        if any(finding.status == "warn" for finding in own)
    }


def test_healthy_gpus_are_one_finding_each() -> None:
    found = findings(h1=[gpu(0), gpu(1)], h2=[gpu(0), gpu(1)])
    assert [(finding.status, finding.hosts) for own in found.values() for finding in own] == 3 * [("ok", ("h1", "h2"))]
    assert found["gpu-matmul"][0].found == f"700 TFLOP/s is usual for {H100}"
    assert found["gpu-host-copy"][0].found.startswith(
        "55 GB/s from the host, 53 GB/s to the host, 350 GB/s to the next"
    )


def test_a_gpu_below_its_model_s_figure() -> None:
    # 60 % of 989.5 TFLOP/s and of 3.35 TB/s.
    assert blamed(findings(h1=[gpu(matmul_flop_per_s=595e12, copy_bytes_per_s=2.02e12)])) == {}
    found = findings(h1=[gpu(2, matmul_flop_per_s=590e12, copy_bytes_per_s=2.00e12)])
    assert blamed(found) == {"gpu-matmul": [("h1",)], "gpu-memory": [("h1",)]}
    assert found["gpu-matmul"][0].found == "GPU 2: 590 TFLOP/s"
    assert found["gpu-matmul"][0].expected == f"at least 594 TFLOP/s of {H100}"


def test_a_gpu_below_its_fellows_on_all_hosts() -> None:
    slow = {"host_to_device_bytes_per_s": 12e9, "copy_bytes_per_s": 2.02e12}
    found = findings(h1=[gpu(0), gpu(1)], h2=[gpu(0), gpu(1, **slow)], h3=[gpu(0), gpu(1)])
    assert blamed(found) == {"gpu-memory": [("h2",)], "gpu-host-copy": [("h2",)]}
    assert found["gpu-host-copy"][0].found == "GPU 1: 12 GB/s from the host"
    assert found["gpu-host-copy"][0].expected == "nearly 55 GB/s from the host, the others' median"


def test_the_way_to_the_next_gpu_may_differ_inside_a_host() -> None:
    across = {"peer_bytes_per_s": 20e9}
    assert blamed(findings(h1=[gpu(0), gpu(1, **across)], h2=[gpu(0), gpu(1, **across)])) == {}
    found = findings(h1=[gpu(0), gpu(1)], h2=[gpu(0), gpu(1, **across)])
    assert blamed(found) == {"gpu-host-copy": [("h2",)]}


def test_an_unknown_model_is_held_against_its_fellows_only() -> None:
    other = "NVIDIA Something 9"
    assert blamed(findings(h1=[gpu(model=other, matmul_flop_per_s=1e12)], h2=[gpu()])) == {}
    found = findings(h1=[gpu(model=other)], h2=[gpu(model=other, matmul_flop_per_s=300e12)])
    assert blamed(found) == {"gpu-matmul": [("h2",)]}


def test_hosts_without_gpus_or_with_broken_ones() -> None:
    found = findings(
        h1=[{"skipped": "no GPU"}], h2=[gpu(0), {"error": "CUDA error: unspecified launch failure"}], h3=[]
    )
    for own in found.values():
        assert [(finding.status, finding.hosts) for finding in own] == [
            ("skip", ("h1",)),
            ("warn", ("h2",)),
            ("skip", ("h3",)),
        ]
        assert own[1].found == "CUDA error: unspecified launch failure"


def test_what_hosts_tell_may_be_anything() -> None:
    odd: list[Any] = [None, 3, [], {}, {"model": 3}, {"model": H100, "error": 4}, {"skipped": {}}]
    odd += [gpu(copy_bytes_per_s=value) for value in (float("nan"), float("inf"), -1, 10**400, True, "fast", None)]  # type: ignore[arg-type]
    for finding in judge({"h1": odd, "h2": [gpu(number="x")]}):  # type: ignore[arg-type]
        assert "inf" not in finding.found


@pytest.mark.parametrize(
    ("name", "tflops", "gbytes"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA H100 80GB HBM3", 989.5, 3350),
        ("NVIDIA H100 PCIe", 756.5, 2000),
        ("NVIDIA H200", 989.5, 4800),
        ("NVIDIA GH200 480GB", 989.5, 4000),
        ("Tesla V100-SXM2-32GB", 125, 900),
        ("Tesla V100S-PCIE-32GB", 130, 1134),
        ("Tesla T4", 65, 300),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA A10", 125, 600),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("NVIDIA RTX 6000 Ada Generation", 364, 960),
    ],
)
def test_models_by_the_driver_s_names(name: str, tflops: float, gbytes: float) -> None:
    found = figures(name)
    assert found is not None
    assert (found.tflops, found.gbytes) == (tflops, gbytes)


@pytest.mark.parametrize(
    "name",
    ["", "NVIDIA A10G", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID A100-10C", "NVIDIA A40-48Q", "NVIDIA T400",
     "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "Quadro RTX 6000", "AMD Instinct MI300X"],
)  # fmt: skip
def test_parts_and_namesakes_have_no_figures(name: str) -> None:
    assert figures(name) is None


def test_no_figures_are_hidden_by_earlier_ones() -> None:
    assert all(figures(one.words) is one for one in FIGURES)


def test_ten_thousand_gpus_take_no_time() -> None:
    hosts = {
        f"h{number}": [gpu(place, copy_bytes_per_s=2.9e12 + number) for place in range(8)] for number in range(1250)
    }
    assert len(judge(hosts)) == 3
