"""Weights: how much more a slot counts in attention for what was folded into it (:mod:`scissorhands.merging`)."""

import torch

from scissorhands.signals.base import Observation, Resident, Signal


class Weight(Signal):
    """The logarithm of a slot's weight, float32, added to its scores; 0 for a slot that stands for one token.

    It is no evidence of importance, but it lives, moves and is counted like evidence.
    """

    name = "weight"

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots]`` float32 zeros."""
        return torch.zeros(rows, kv_heads, slots, dtype=torch.float32, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Change nothing: only folding does."""

    def recalled(self, state: torch.Tensor, resident: Resident, positions: torch.Tensor) -> torch.Tensor:
        """Return the weight of one token."""
        del resident
        return state.new_zeros(len(positions))
