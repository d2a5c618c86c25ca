"""Attention mass: all attention that a slot has received, the evidence of H2O (arXiv 2306.14048)."""

import torch

from scissorhands.signals.base import Observation, Resident, Signal


class Mass(Signal):
    """Sum over all queries of the group's mean attention, float32, in queries. Always gathered."""

    name = "mass"

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots]`` float32 zeros."""
        return torch.zeros(rows, kv_heads, slots, dtype=torch.float32, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Add the new queries' attention."""
        add_mass(state, seen.attention)

    def recalled(self, state: torch.Tensor, resident: Resident, positions: torch.Tensor) -> torch.Tensor:
        """Return what the head's slots got of each query on average, for all queries that could have seen the slot."""
        ages = (resident.step - resident.positions).float()
        return (state / ages).mean() * (resident.step - positions).float()


def add_mass(state: torch.Tensor, attention: torch.Tensor) -> None:
    """Add the attention ``[R, kv_heads, group, a, n]`` of new queries to the mass ``[R, kv_heads, n]``, in place."""
    # One sum over group and queries: a mean over the group first would double the work.
    state.add_(attention.sum(dim=(2, 3)), alpha=1 / attention.shape[2])
