"""StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453): attention sinks and a recent window."""

import numpy as np

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.snapshot import LayerEvidence


class Streaming(Policy):
    """Keeps the first tokens and the newest."""

    name = "streaming"

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the numbers for a budget of ``slots``; recency is the score, so no slot needs an exemption."""
        return common_parameters(slots, recent=0)

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return the position: the oldest slots go first."""
        del step, parameters
        return evidence.positions.astype(np.float64)
