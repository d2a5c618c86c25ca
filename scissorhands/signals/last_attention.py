"""Attention of the newest query, the evidence of TOVA (arXiv 2401.06104)."""

import torch

from scissorhands.signals.base import Observation, Signal


class LastAttention(Signal):
    """The group's mean attention of the newest query alone, float32, between 0 and 1."""

    name = "last_attention"

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots]`` float32 zeros."""
        return torch.zeros(rows, kv_heads, slots, dtype=torch.float32, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Put the last of the new queries in the place of what was there."""
        torch.mean(seen.attention[:, :, :, -1], dim=2, out=state)
