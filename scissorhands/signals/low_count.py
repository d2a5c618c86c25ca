"""Low counts in two rotating buckets, the evidence of Scissorhands' default preset (arXiv 2305.17118)."""

import torch

from scissorhands.signals.base import Observation, Resident
from scissorhands.signals.buckets import Buckets


class LowCount(Buckets):
    """Queries of the last ``w/2`` to ``w`` that gave a slot less than ``1/n``, the average over the slots in use.

    Takes two bytes a slot, so a window is at most 510 queries.
    """

    name = "low_count"
    dtype = torch.uint8

    def amounts(self, seen: Observation) -> torch.Tensor:
        """Return 1 where a new query was low."""
        return seen.below(seen.averages(seen.span.lengths)).view(torch.uint8)

    def value(self, state: torch.Tensor, resident: Resident) -> torch.Tensor:
        """Return the sum of both buckets."""
        del resident
        return state.sum(dim=-1, dtype=torch.int16)
