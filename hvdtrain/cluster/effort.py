"""How much the levels with measurements measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Of one level.

    Attributes:
        links_s: for one tournament of all pairs of hosts, about.
        repeats: tournaments; the median of each link counts.
        disk_bytes: written and read in the working directory, at most.
        disk_s: for each direction, at most.
        memory_bytes: of all buffers.
        memory_s: for the copies.
        sizes: of allreduces, bytes.
        allreduce_s: for each size.
        gpu_s: for each GPU's own speed; 0: not measured.
    """

    links_s: float
    repeats: int
    disk_bytes: int
    disk_s: float
    memory_bytes: int
    memory_s: float
    sizes: tuple[int, ...]
    allreduce_s: float
    gpu_s: float = 0.0


STANDARD = Effort(30.0, 1, 256 << 20, 2.0, 512 << 20, 0.6, (1 << 10, 1 << 16, 1 << 20, 16 << 20), 0.25)
FULL = Effort(60.0, 3, 2 << 30, 8.0, 2 << 30, 3.0, (1 << 10, 1 << 14, 1 << 17, 1 << 20, 16 << 20, 64 << 20), 1.0, 10.0)
