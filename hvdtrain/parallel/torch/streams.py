"""Random numbers in a group that computes one model together.

What all its ranks have whole (a block's output, say) they must drop alike: the common seed sees to that, as long as
all draw the same numbers from it. Of what is cut each has other elements, which must not be dropped by the same
pattern: these draw from streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hvdtrain.parallel.groups import Group


@contextmanager
def own_stream(group: Group) -> Iterator[None]:
    """Within it PyTorch's random numbers, on the CPU and on the current GPU, are this rank's own.

    Each use begins a new stream, whose seed is drawn from the common one (the CPU's). So there is no state beside
    PyTorch's own: where that is set anew (``torch.manual_seed``), restored from a checkpoint or replayed (activation
    checkpointing), the own streams follow. Behind it the common streams go on, all of them alike on all ranks.

    In a group of one it does nothing, so that the numbers are those of a plain model.
    """
    if group.size == 1:
        yield
        return
    seed = int(torch.randint(2**62, (group.size,), device="cpu")[group.rank])
    # Not torch.manual_seed, which would seed every GPU, and queue that up where CUDA isn't in use.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
