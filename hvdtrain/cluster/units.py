"""Quantities as people read them."""

from __future__ import annotations


def rate(bit_per_s: float) -> str:
    """As networks are rated, in powers of 1000."""
    return f"{bit_per_s / 1e9:.3g} Gbit/s" if bit_per_s >= 1e9 else f"{bit_per_s / 1e6:.3g} Mbit/s"


def bytes_rate(bytes_per_s: float) -> str:
    """Bytes/s as people read them, in powers of 1000."""
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def duration(seconds: float) -> str:
    """Seconds, or parts of one, as people read them."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def flops(flop_per_s: float) -> str:
    """FLOP/s as people read them."""
    return f"{flop_per_s / 1e12:.3g} TFLOP/s"
