"""R-KV, redundancy-aware compression (Cai et al., NeurIPS 2025, arXiv 2505.24133)."""

from dataclasses import replace

import numpy as np

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.policies.scissorhands import window_start
from scissorhands.policies.snapkv import check_window, pooled
from scissorhands.snapshot import LayerEvidence

# lambda, the weight of importance against redundancy (equation 7, section 4.1).
IMPORTANCE = 0.1
# alpha, the queries that importance looks back on at least; as many newest slots are exempt.
OBSERVED = 8
# Slots dropped at once, as published: redundancy compares all keys with all others, so evictions should be few. Small
# budgets would be left with little to remember with, and drop this share of theirs.
BUFFER = 128
_BUFFER_SHARE = 32


class RKV(Policy):
    """Keeps slots that recent queries attend to and whose keys are unlike the others'.

    A slot's score is ``lambda I - (1 - lambda) R`` (equation 7). The importance I is the mean attention of a window of
    queries, of which the largest of the seven slots around counts (equation 4). The redundancy R is the softmax over a
    head's slots of the mean cosine similarity to the other keys (equations 5 and 6; see
    :class:`scissorhands.signals.redundancy.Redundancy`).

    Differs from the published rule in this: the window is two rotating buckets of :data:`OBSERVED` queries, so it spans
    that many to twice as many; a group of query heads counts by the mean of its attention, not the largest score before
    the softmax; pooling follows the mean over queries, as in the authors' code; budgets below 4,096 drop fewer slots at
    once than :data:`BUFFER`; the sinks are exempt.
    """

    name = "r-kv"

    @property
    def reads_vectors(self) -> bool:
        """Yes."""
        return True

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the numbers for a budget of ``slots``."""
        common = common_parameters(slots, recent=min(OBSERVED, slots // 2), window=2 * OBSERVED)
        return replace(common, drop=max(common.drop, min(BUFFER, slots // _BUFFER_SHARE)))

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the attention mass of the window, two buckets of a float32, and the redundancy, which takes none."""
        del parameters
        return {"window_mass": 8, "redundancy": 0}

    def check(self, parameters: EvictionParameters) -> None:
        """Refuse windows that two buckets cannot share.

        Raises:
            InvalidRequestError: The window is out of range.
        """
        check_window(parameters)

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return importance against redundancy."""
        queries = step - window_start(step, parameters.window)
        importance = pooled(evidence.signals["window_mass"].astype(np.float64) / queries)
        similarity = np.exp(evidence.signals["redundancy"].astype(np.float64))
        redundancy = similarity / similarity.sum(axis=1, keepdims=True)
        joint: Scores = IMPORTANCE * importance - (1 - IMPORTANCE) * redundancy
        return joint
