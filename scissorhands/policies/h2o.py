"""H2O, the heavy-hitter oracle (Zhang et al., NeurIPS 2023, arXiv 2306.14048, Algorithm 1)."""

import numpy as np

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.snapshot import LayerEvidence


class H2O(Policy):
    """Keeps the slots that have received the most attention in all, and half of the budget recent."""

    name = "h2o"

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the numbers for a budget of ``slots``: half of it recent, as published, and four sinks."""
        return common_parameters(slots, recent=slots // 2)

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return the attention mass received so far."""
        del step, parameters
        return evidence.signals["mass"].astype(np.float64)
