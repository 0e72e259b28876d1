"""The hosts of a job, from flags, the spec, or this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError
from hvdtrain.hosts.hostfile import parse_hosts, read_hostfile
from hvdtrain.hosts.models import Host
from hvdtrain.hosts.select import select

if TYPE_CHECKING:  # the spec's models take longer to load than all the rest, and some commands have no spec
    from hvdtrain.spec.models import Hosts

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def resolve_hosts(
    spec_hosts: Hosts | None,
    *,
    hosts_option: str | None,
    hostfile_option: Path | None,
    include: Iterable[str],
    exclude: Iterable[str],
    default_slots: int,
) -> tuple[Host, ...]:
    """Hosts in order: those of the flags, else of the spec, else this machine with ``default_slots``.

    The flags' ``include`` and ``exclude`` add to the spec's, if there is one.

    Raises:
        UsageError: both flags are given.
        InputError: a hostfile or list has faults, or nothing is left.
    """
    if hosts_option is not None and hostfile_option is not None:
        raise UsageError("--hosts and --hostfile are both given", fix="give one of them")
    if hosts_option is not None:
        hosts = parse_hosts([hosts_option], "--hosts")
    elif hostfile_option is not None:
        hosts = read_hostfile(hostfile_option)
    elif spec_hosts and spec_hosts.file is not None:
        hosts = read_hostfile(spec_hosts.file)
    elif spec_hosts and spec_hosts.list:
        hosts = parse_hosts(spec_hosts.list, "hosts.list")
    else:
        hosts = (Host("localhost", default_slots),)
    if spec_hosts:
        include, exclude = (*spec_hosts.include, *include), (*spec_hosts.exclude, *exclude)
    return select(hosts, include, exclude)


def default_slots() -> int:
    """Slots of this machine: one for each NVIDIA GPU, or for each core that this process may use."""
    return nvidia_gpus() or len(os.sched_getaffinity(0))


def nvidia_gpus() -> int:
    """How many NVIDIA GPUs this machine has."""
    try:
        return len(list(_NVIDIA_GPUS.iterdir()))
    except OSError:
        return 0
