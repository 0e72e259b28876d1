"""Measures Horovod's allreduce inside hosts, between pairs of them and over all: a program, one process for each rank.

``python -m hvdtrain.tasks.collectives REQUEST`` with REQUEST as JSON: {hosts: number of hosts, per_host: ranks on each,
rounds: list of rounds of pairs of host numbers, no host twice in a round, sizes: bytes, seconds: for each size, gpu_s:
for each GPU's own speed, if not 0}. Each result is a line on standard output that begins with
`contract.COLLECTIVE_MARK`:

``{"hosts": [numbers], "ranks": n, "bytes": size, "seconds": median of one allreduce}`` from a group's first rank, and
``{"wrong": number of elements, "host": number, "bytes": size, "hosts": [numbers]}`` from any rank with a wrong sum.
``{"gpu": what `gpu_speed.measure` gives, "host": number}`` from every rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, Protocol

import numpy as np

from hvdtrain import contract
from hvdtrain.tasks import gpu_speed

_MOST = 50
_PATTERN = 251  # a prime: neighbours, and elements a power of two apart, differ


class _Backend(Protocol):
    """Horovod under one of its frameworks; float32 throughout."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, values: Any, name: str, group: Any) -> Any:
        """Sum of an array over the group's ranks."""

    def repeat(self, size: int, name: str, group: Any) -> Any:
        """A function that reduces so many elements once, and returns when that is done."""


class _Torch:
    """On GPUs where Horovod has NCCL, else on the CPU."""

    def __init__(self, groups: list[Any]) -> None:
        import horovod.torch as hvd
        import torch

        hvd.init(process_sets=groups)
        self._hvd, self._torch = hvd, torch
        self._device = torch.device("cpu")
        if hvd.nccl_built() and torch.cuda.is_available():
            self._device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        self.rank, self.size = hvd.rank, hvd.size

    def allreduce(self, values: Any, name: str, group: Any) -> Any:
        tensor = self._torch.from_numpy(values).to(self._device)
        return self._hvd.allreduce(tensor, name=name, op=self._hvd.Sum, process_set=group).cpu().numpy()

    def repeat(self, size: int, name: str, group: Any) -> Any:
        tensor = self._torch.zeros(size, device=self._device)

        def once() -> None:
            self._hvd.allreduce_(tensor, name=name, op=self._hvd.Sum, process_set=group)
            if self._device.type == "cuda":
                self._torch.cuda.synchronize()

        return once


class _TensorFlow:
    def __init__(self, groups: list[Any]) -> None:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init(process_sets=groups)
        self._hvd, self._tf = hvd, tf
        self.rank, self.size = hvd.rank, hvd.size

    def allreduce(self, values: Any, name: str, group: Any) -> Any:
        return self._hvd.allreduce(self._tf.constant(values), name=name, op=self._hvd.Sum, process_set=group).numpy()

    def repeat(self, size: int, name: str, group: Any) -> Any:
        tensor = self._tf.zeros(size)
        return lambda: self._hvd.allreduce(tensor, name=name, op=self._hvd.Sum, process_set=group).numpy()


def main() -> None:
    """Measure all stages, one after the other; within a stage all groups at the same time."""
    request = json.loads(sys.argv[1])
    hosts, per_host = request["hosts"], request["per_host"]
    stages: list[list[tuple[int, ...]]] = [[(host,) for host in range(hosts)]] if per_host > 1 else []
    stages += [[tuple(pair) for pair in pairs] for pairs in request["rounds"]]
    stages += [[tuple(range(hosts))]] if hosts > 1 else []
    members = {group: _ranks(group, hosts, per_host) for stage in stages for group in stage}
    backend, sets = _start(members, hosts * per_host)
    own = backend.rank() // per_host
    if request["gpu_s"]:
        # All ranks at the same time: in copies to another GPU that one is busy too.
        _tell({"gpu": gpu_speed.measure(backend.rank() % per_host, request["gpu_s"]), "host": own})
    for number, stage in enumerate(stages):
        backend.allreduce(np.zeros(1, np.float32), f"stage {number}", sets[None])
        for group in stage:
            if backend.rank() in members[group]:
                for size in request["sizes"]:
                    _measure(backend, group, members[group], sets[group], size, request["seconds"], own)
    # Nobody leaves while others measure: its end would end them.
    backend.allreduce(np.zeros(1, np.float32), "end", sets[None])


def _ranks(group: tuple[int, ...], hosts: int, per_host: int) -> list[int]:
    """A host's own ranks; one rank of each of two hosts, so that only their link counts; or all."""
    if len(group) == 2 and hosts > 2:
        return [host * per_host for host in group]
    return [host * per_host + local for host in group for local in range(per_host)]


def _start(members: dict[tuple[int, ...], list[int]], size: int) -> tuple[_Backend, dict[tuple[int, ...] | None, Any]]:
    """Horovod with a process set for each group; ranks that are all of them have one already."""
    backend: type[_Torch | _TensorFlow]
    try:
        import horovod.torch as hvd

        backend = _Torch
    except ImportError:
        import horovod.tensorflow as hvd

        backend = _TensorFlow
    sets = {group: hvd.ProcessSet(ranks) for group, ranks in members.items() if len(ranks) < size}
    started = backend(list(sets.values()))
    if started.size() != size:
        raise SystemExit(f"{started.size()} ranks were started, and {size} are expected")
    return started, dict.fromkeys([None, *members], hvd.global_process_set) | sets


def _measure(
    backend: _Backend, group: tuple[int, ...], ranks: list[int], process_set: Any, size: int, seconds: float, own: int
) -> None:
    elements, place = max(1, size // 4), ranks.index(backend.rank())
    name = f"{group} {size}"
    pattern = (np.arange(elements) % _PATTERN).astype(np.float32)
    total = np.float32(len(ranks) * (len(ranks) + 1) / 2)
    found = backend.allreduce(pattern * np.float32(place + 1), f"{name} sum", process_set)
    if wrong := int(np.count_nonzero(found != pattern * total)):
        _tell({"wrong": wrong, "host": own, "bytes": 4 * elements, "hosts": group})
    once = backend.repeat(elements, f"{name} time", process_set)
    once()
    began = time.perf_counter()
    once()
    took = np.array([time.perf_counter() - began], np.float32)
    # All do it equally often.
    mean_s = float(backend.allreduce(took, f"{name} count", process_set)[0]) / len(ranks)
    times = []
    for _ in range(max(2, min(_MOST, int(seconds / max(mean_s, 1e-6))))):
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    if place == 0:
        _tell({"hosts": group, "ranks": len(ranks), "bytes": 4 * elements, "seconds": statistics.median(times)})


def _tell(result: dict[str, Any]) -> None:
    # In one piece: other ranks of this host write to the same place.
    sys.stdout.write(f"{contract.COLLECTIVE_MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
