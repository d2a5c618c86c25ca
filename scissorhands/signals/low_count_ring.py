"""Low counts in an exact window, the evidence of Scissorhands' paper preset (arXiv 2305.17118, Algorithm 2)."""

from typing import Self

import torch

from scissorhands.budget import EvictionParameters
from scissorhands.signals.base import Observation, Resident, Signal


class LowCountRing(Signal):
    """Queries of exactly the last ``w`` that gave a slot less than ``1/t``, with ``t`` the tokens seen.

    Takes ``w`` bytes a slot, more than the slot's 4-bit key and value: for comparison only.

    Args:
        window: w, in queries.
    """

    name = "low_count_ring"

    def __init__(self, window: int) -> None:
        self.window = window

    @classmethod
    def build(cls, parameters: EvictionParameters, group: int) -> Self:
        """Return the signal over the window of ``parameters``."""
        del group
        return cls(parameters.window)

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots, w]`` bool zeros."""
        return torch.zeros(rows, kv_heads, slots, self.window, dtype=torch.bool, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Put each new query in its place of the ring."""
        low = seen.below(seen.averages(seen.span.steps))
        for row, step in enumerate(seen.span.steps):
            for query in range(seen.span.incoming):
                state[row, :, :, (step + query) % self.window] = low[row, :, query]

    def value(self, state: torch.Tensor, resident: Resident) -> torch.Tensor:
        """Return the number of queries in the ring that were low."""
        del resident
        return state.sum(dim=-1, dtype=torch.int32)
