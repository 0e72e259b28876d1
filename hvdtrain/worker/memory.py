"""Whether the kernel has ended processes for lack of memory."""

from __future__ import annotations

from pathlib import Path


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """How many processes of this host it has, since boot: by a container's limit or for the whole host.

    Linux counts both since 4.13 (``oom_kill`` of /proc/vmstat); 0 where it doesn't.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
