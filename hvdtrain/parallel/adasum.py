"""What Horovod 0.28.1's Adasum demands of whoever calls it, in any framework.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020. Two gradients a and b become
``(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b``: their sum where they are orthogonal, their mean where they are parallel.
More ranks are combined in pairs, then pairs of pairs. A gradient of zeros leaves the other as it is.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.errors import UsageError

# Horovod reserves its buffer by an int.
_MOST_BYTES = 2**31 - 1


def require_mpi(horovod: Any) -> None:
    """Horovod would end the process at the first gradient.

    Args:
        horovod: ``horovod.torch`` or ``horovod.tensorflow``, after ``hvd.init``.

    Raises:
        UsageError: the ranks run under Gloo.
    """
    if not horovod.mpi_enabled():
        raise UsageError(
            "Horovod's Adasum needs MPI, and these ranks run under Gloo",
            fix="give the job spec controller: mpi, or take adasum out",
        )


def require_size(size_bytes: int) -> None:
    """Horovod would write beyond its buffer.

    Raises:
        UsageError: a gradient of so many bytes is too large.
    """
    if size_bytes > _MOST_BYTES:
        raise UsageError(
            f"Horovod's Adasum combines gradients of 2 GiB at most, and one has {size_bytes / 2**30:.1f} GiB",
            fix="make two parameters of it, or take adasum out",
        )
