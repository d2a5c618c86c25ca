"""TOVA, token omission via attention (Oren et al., EMNLP 2024, arXiv 2401.06104)."""

import numpy as np

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.snapshot import LayerEvidence


class Tova(Policy):
    """Keeps the slots that the newest query attends to most.

    Differs from the published rule in this: every KV head decides for itself, by the mean over its group of query
    heads, where TOVA takes the mean over all heads of a layer and drops the same token in each; several slots go at
    once, where TOVA drops one a step; and the sinks are exempt, which TOVA leaves to their attention.
    """

    name = "tova"

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the numbers for a budget of ``slots``: no slot is exempt for being recent, as published."""
        return common_parameters(slots, recent=0)

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the attention of the newest query, a float32."""
        del parameters
        return {"last_attention": 4}

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return the attention of the newest query."""
        del step, parameters
        return evidence.signals["last_attention"].astype(np.float64)
