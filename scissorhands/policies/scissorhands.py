"""Scissorhands (Liu et al., NeurIPS 2023, arXiv 2305.17118, Algorithm 2), in its consistent reading.

The printed algorithm adds up ``alpha > 1/t``, calls the sum a low score, and zeroes the wrong side of the recent
window. Here a slot's *low count* is the number of queries in the window of the last ``w`` that gave it less than the
average attention; the slots with the largest low count are dropped.
"""

from typing import ClassVar

import numpy as np

from scissorhands.budget import EvictionParameters
from scissorhands.errors import InvalidRequestError
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.snapshot import LayerEvidence

# Queries that the default's two rotating buckets span together. Each counts at most 128, so a byte a bucket does.
DEFAULT_WINDOW = 256
# The windows that two one-byte buckets count, and the longest ring that is worth its bytes.
_MIN_WINDOW = 2
_MAX_WINDOW = 510
_MAX_RING = 4096


class Scissorhands(Policy):
    """Keeps the slots that were least often below the average attention.

    Presets:
        default: The average over the ``n`` slots in use, counts per query observed in two rotating buckets of
            ``w / 2`` queries, sinks, and three tenths of the budget recent.
        paper: The numbers of the paper: ``w = 400`` as an exact ring, ``r = 10``, ``m = B / 2``, no sinks, the
            average taken as ``1/t``, counts as they are; planned on the spot.
    """

    name = "scissorhands"
    presets: ClassVar[tuple[str, ...]] = ("default", "paper")

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the preset's numbers for a budget of ``slots``."""
        if self.preset == "paper":
            drop = max(1, slots // 2)
            chunk = max(1, min(256, drop, slots - drop - 10))
            return EvictionParameters(recent=10, sinks=0, drop=drop, lookahead=0, chunk=chunk, window=400)
        return common_parameters(slots, recent=slots * 3 // 10, window=DEFAULT_WINDOW)

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Low counts: an exact ring of a byte a query for the paper, two one-byte buckets otherwise."""
        if self.preset == "paper":
            return {"low_count_ring": parameters.window}
        return {"low_count": 2}

    def check(self, parameters: EvictionParameters) -> None:
        """Refuse windows that the low counts cannot span.

        Raises:
            InvalidRequestError: The window is out of range.
        """
        field, window = "policy.parameters.window", parameters.window
        if self.preset == "paper":
            if not 1 <= window <= _MAX_RING:
                raise InvalidRequestError(field, f"must be 1 to {_MAX_RING} queries, got {window}")
        elif not _MIN_WINDOW <= window <= _MAX_WINDOW or window % 2:
            raise InvalidRequestError(
                field, f"must be an even number of {_MIN_WINDOW} to {_MAX_WINDOW} queries, got {window}"
            )

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return minus the low count, in the default preset per query observed."""
        if self.preset == "paper":
            ring: Scores = evidence.signals["low_count_ring"].astype(np.float64)
            return -ring
        observed = step - np.maximum(evidence.positions.astype(np.int64), window_start(step, parameters.window))
        low: Scores = evidence.signals["low_count"].astype(np.float64)
        scores: Scores = -low / observed
        return scores


def window_start(step: int, window: int) -> int:
    """Return the position of the first query that two rotating buckets of ``window / 2`` queries still count."""
    half = window // 2
    return max(0, ((step - 1) // half - 1) * half)
