"""What a host has of each thing that a profile can expect; None where it isn't known. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdtrain.cluster.measured import Measured
from hvdtrain.cluster.models import Evidence
from hvdtrain.fabric.models import HostFabric, Port, host_fabric

_PACKAGES = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu"), "horovod": ("horovod",)}
_KINDS = {"InfiniBand": "infiniband", "Ethernet": "roce"}


@dataclass(frozen=True)
class Has:
    """One host."""

    evidence: Evidence
    host: str
    measured: Measured | None = None

    def system(self, name: str) -> Any:
        """A fact of section ``system``."""
        return self.evidence.value(self.host, "system", name)

    # --- disks

    @property
    def nvme_bytes(self) -> int | None:
        """All NVMe disks together."""
        disks = self.evidence.value(self.host, "disks", "nvme")
        return None if disks is None else sum(disk.get("size_bytes") or 0 for disk in disks)

    @property
    def free_bytes(self) -> int | None:
        """In the working directory."""
        directory = self.evidence.request.directory
        return self.evidence.value(self.host, "disks", "paths", directory, "free_bytes") if directory else None

    # --- GPUs

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        """As the driver tells of them."""
        return self.evidence.value(self.host, "gpus", "gpus") or []

    @property
    def gpu_models(self) -> list[str]:
        """Each model once."""
        return sorted({gpu["model"] for gpu in self.gpus if gpu.get("model")})

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Of the GPU that has the least."""
        sizes = [gpu.get("memory_total_bytes") for gpu in self.gpus]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def gpu_ecc(self) -> bool | None:
        """Whether every GPU has it on."""
        states = [gpu.get("ecc_enabled") for gpu in self.gpus]
        return None if not states or None in states else all(states)

    # --- networks

    @property
    def fabric(self) -> HostFabric | None:
        """Its RDMA adapters; None where it doesn't tell of any in the way that the probe does."""
        section = self.evidence.value(self.host, "infiniband")
        try:
            return None if section is None else host_fabric(self.host, {"infiniband": section})
        except ValueError:
            return None

    @property
    def active_ports(self) -> tuple[Port, ...]:
        """Ports of RDMA adapters through which traffic can pass."""
        return tuple(port for port in self.fabric.ports if port.is_active) if self.fabric else ()

    @property
    def adapters(self) -> int | None:
        """RDMA adapters with a port that is up."""
        return len({port.hca for port in self.active_ports}) if self.fabric else None

    @property
    def fabric_kinds(self) -> list[str]:
        """``infiniband``, ``roce``: of the ports that are up."""
        return sorted({_KINDS.get(port.link_layer or "", str(port.link_layer)) for port in self.active_ports})

    @property
    def port_rates(self) -> list[float]:
        """Bit/s of each port that is up."""
        return sorted({port.gbit_per_s * 1e9 for port in self.active_ports if port.gbit_per_s})

    # --- software

    def package(self, name: str) -> str | None:
        """Version of a package in the job's Python."""
        found = (self.evidence.value(self.host, "software", "packages", one) for one in _PACKAGES[name])
        return next((version for version in found if version), None)

    def horovod(self, name: str) -> Any:
        """What Horovod's build has: ``frameworks``, ``controllers``, ``nccl``."""
        return self.evidence.value(self.host, "software", "horovod", name)

    # --- measurements

    @property
    def bandwidth(self) -> float | None:
        """Bit/s; a host's own link is judged by its best partner, and by its slower direction."""
        rates = self.measured.bit_per_s if self.measured else {}
        best = [max((rate for pair, rate in rates.items() if pair[side] == self.host), default=None) for side in (0, 1)]
        return None if None in best else min(best)  # type: ignore[type-var]

    @property
    def latency_s(self) -> float | None:
        """Median round trip with others."""
        times = self.measured.rtt_s if self.measured else {}
        own = [rtt_s for pair, rtt_s in times.items() if self.host in pair]
        return median(own) if own else None

    @property
    def allreduce(self) -> float | None:
        """Bus bandwidth over all ranks, bit/s: every host's, since all take part."""
        reduced = self.measured.allreduces if self.measured else None
        over_all = reduced.over_all if reduced else None
        return over_all.bus_bit_per_s if over_all else None

    def speed(self, name: str) -> float | None:
        """Bytes/s of ``disk-write``, ``disk-read`` or ``memory-bandwidth``."""
        return self.measured.speeds.get(name, {}).get(self.host) if self.measured else None
