"""Memory that collectives read and fill again and again: fresh memory costs as much as the sums in it."""

from __future__ import annotations

import torch


class Memory:
    """Named tensors of one dimension. Nobody uses one of them while another does."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def get(self, part: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Shape (size,), with anything in it. What was got under this name before is lost."""
        key = (part, dtype, device)
        kept = self._tensors.get(key)
        if kept is None or kept.numel() < size:
            kept = self._tensors[key] = torch.empty(size, dtype=dtype, device=device)
        return kept[:size]
