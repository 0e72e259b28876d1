"""Whether Horovod's Adasum can combine the gradients of a placement, and whose it combines."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.errors import UsageError
from hvdtrain.spec.checks import is_power_of_two


def what_adasum_does(counts: Sequence[int], *, nccl: bool) -> str:
    """One sentence for the plan.

    Horovod combines tensors in the CPU's memory over all processes. Those of GPUs, where it has NCCL, it averages in
    each host and combines over the hosts (``horovod/common/ops/adasum_gpu_operations.cc``).

    Args:
        counts: of processes, on each host that has some.
        nccl: whether Horovod carries GPU tensors by NCCL.

    Raises:
        UsageError: it can't combine the gradients of so many processes.
    """
    processes = sum(counts)
    if not is_power_of_two(processes):
        below = 1 << (processes.bit_length() - 1)
        raise UsageError(
            f"horovod.adasum combines gradients in pairs, and {processes} processes aren't a power of two",
            fix=f"give processes: {below} or {2 * below}, or take horovod.adasum out",
        )
    if nccl and len(set(counts)) > 1:
        raise UsageError(
            "horovod.adasum on GPUs needs equally many processes on each host, and there are "
            f"{', '.join(map(str, counts))}",
            fix="give the hosts equally many slots, or take horovod.adasum out",
        )
    if processes == 1:
        return "adasum has no effect: there is one process"
    if not nccl:
        return f"adasum: gradients of {processes} processes are combined, not averaged"
    if len(counts) == 1:
        return "adasum: GPU tensors are averaged all the same, as all processes are on one host"
    return f"adasum: GPU tensors are averaged in each host by NCCL, then combined over {len(counts)} hosts"
