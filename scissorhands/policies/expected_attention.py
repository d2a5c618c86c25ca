"""Expected Attention (Devoto et al., 2025, arXiv 2510.00636): keep what future queries are expected to attend to."""

import numpy as np

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.snapshot import LayerEvidence

# A mean and a sum of squares, both float32, for each query head.
_BYTES = 8


class ExpectedAttention(Policy):
    """Keeps the slots that the next query is expected to give the most attention, times the norm of their values.

    The formula, and what differs from the published one, is told where it is computed
    (:class:`scissorhands.signals.expected_attention.ExpectedAttention`). Beside that, new tokens are exempt here, whose
    mean and variance come from few queries, and evictions are small and many.
    """

    name = "expected-attention"

    @property
    def reads_vectors(self) -> bool:
        """Yes."""
        return True

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the numbers for a budget of ``slots``: a fifth is recent."""
        return common_parameters(slots, recent=slots // 5)

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the expected attention, a mean and a sum of squares for one query head to a KV head."""
        del parameters
        return {"expected_attention": _BYTES}

    def evidence_bytes(self, parameters: EvictionParameters, group: int) -> int:
        """Return the bytes per slot: a mean and a sum of squares for each of ``group`` query heads."""
        del parameters
        return _BYTES * group

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return the expected attention."""
        del step, parameters
        return evidence.signals["expected_attention"].astype(np.float64)
