"""No eviction: the budget is the whole length."""

from scissorhands.budget import EvictionParameters
from scissorhands.errors import InvalidRequestError
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.snapshot import LayerEvidence


class Full(Policy):
    """Keeps everything. A budget below the length is refused when it is resolved."""

    name = "full"

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the numbers for a budget of ``slots``; only the chunk matters."""
        return common_parameters(slots, recent=0)

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Refuse: this policy never evicts.

        Raises:
            InvalidRequestError: The sequence outgrew its budget.
        """
        del parameters
        raise InvalidRequestError(
            "budget", f"policy full keeps every token, but {step} tokens have filled {evidence.length} slots"
        )
