"""Attention mass of a window of queries in two rotating buckets, the evidence of SnapKV (arXiv 2404.14469)."""

import torch

from scissorhands.signals.base import Observation, Resident
from scissorhands.signals.buckets import Buckets


class WindowMass(Buckets):
    """Sum over the queries of the last ``w/2`` to ``w`` of the group's mean attention, float32, in queries.

    Takes eight bytes a slot. The exact window of the paper would take ``4 w``.
    """

    name = "window_mass"
    dtype = torch.float32

    def amounts(self, seen: Observation) -> torch.Tensor:
        """Return the new queries' attention."""
        return seen.probabilities

    def value(self, state: torch.Tensor, resident: Resident) -> torch.Tensor:
        """Return the sum of both buckets."""
        del resident
        return state.sum(dim=-1)
