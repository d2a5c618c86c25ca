"""Scissorhands (Liu et al., NeurIPS 2023, arXiv 2305.17118, Algorithm 2), in its consistent reading.

The printed algorithm adds up ``alpha > 1/t``, calls the sum a low score, and zeroes the wrong side of the recent
window. Here a slot's *low count* is the number of queries in the window of the last ``w`` that gave it less than the
average attention; the slots with the largest low count are dropped. Measured on real text, the mean attention per
query observed keeps more of what a model says than counts do, so that is the default.
"""

from typing import ClassVar

import numpy as np

from scissorhands.budget import EvictionParameters
from scissorhands.errors import InvalidRequestError
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.snapshot import LayerEvidence

# Queries that the two rotating buckets span together. Each counts at most 128, so a byte a bucket does.
DEFAULT_WINDOW = 256
# The windows that two one-byte buckets count, and the longest ring that is worth its bytes.
_MIN_WINDOW = 2
_MAX_WINDOW = 510
_MAX_RING = 4096


class Scissorhands(Policy):
    """Keeps the slots that mattered to the queries that could see them.

    Presets:
        default: The mean attention of the queries that could see a slot, sinks, and three tenths of the budget recent.
            KV heads share the budget by what eviction costs them (:mod:`scissorhands.profile`), if that was measured.
        uniform: The same, and every KV head gets as much.
        counts: The paper's rule, smoothed: low counts against the average over the ``n`` slots in use, per query
            observed in two rotating buckets of ``w / 2`` queries, sinks, and three tenths of the budget recent.
        paper: The numbers of the paper: ``w = 400`` as an exact ring, ``r = 10``, ``m = B / 2``, no sinks, the
            average taken as ``1/t``, counts as they are; planned on the spot.
    """

    name = "scissorhands"
    presets: ClassVar[tuple[str, ...]] = ("default", "uniform", "counts", "paper")

    @property
    def shares_by_loss(self) -> bool:
        """Only the default does; the other presets are there to compare with."""
        return self.preset == "default"

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the preset's numbers for a budget of ``slots``."""
        if self.preset == "paper":
            drop = max(1, slots // 2)
            chunk = max(1, min(256, drop, slots - drop - 10))
            return EvictionParameters(recent=10, sinks=0, drop=drop, lookahead=0, chunk=chunk, window=400)
        window = DEFAULT_WINDOW if self.preset == "counts" else 0
        return common_parameters(slots, recent=slots * 3 // 10, window=window)

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Low counts, if any: an exact ring of a byte a query for the paper, or two one-byte buckets."""
        if self.preset == "paper":
            return {"low_count_ring": parameters.window}
        return {"low_count": 2} if self.preset == "counts" else {}

    def check(self, parameters: EvictionParameters) -> None:
        """Refuse windows that the low counts cannot span.

        Raises:
            InvalidRequestError: The window is out of range.
        """
        field, window = "policy.parameters.window", parameters.window
        if self.preset == "paper":
            if not 1 <= window <= _MAX_RING:
                raise InvalidRequestError(field, f"must be 1 to {_MAX_RING} queries, got {window}")
        elif self.preset == "counts" and (not _MIN_WINDOW <= window <= _MAX_WINDOW or window % 2):
            raise InvalidRequestError(
                field, f"must be an even number of {_MIN_WINDOW} to {_MAX_WINDOW} queries, got {window}"
            )

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return the mean attention of the queries that saw a slot, or minus its low count (per query observed)."""
        if self.preset in ("default", "uniform"):
            mean: Scores = evidence.signals["mass"].astype(np.float64) / (step - evidence.positions.astype(np.int64))
            return mean
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
