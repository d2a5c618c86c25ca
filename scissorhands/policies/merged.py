"""Merging: what an evicted slot carried is folded into a similar kept one (:mod:`scissorhands.merging`)."""

from scissorhands.budget import EvictionParameters
from scissorhands.policies.wrapper import Wrapper

# What a slot weighs: a float32.
_WEIGHT_BYTES = 4


class Merged(Wrapper):
    """Drops what another policy drops, and folds its values into the kept slots.

    What is evicted, when and by which budgets, is the inner policy's to decide. Folding changes what later queries see,
    so their attention, and with it later decisions, may differ.
    """

    name = "merged"

    @property
    def shares_by_loss(self) -> bool:
        """Whether the inner policy does."""
        return self.inner.shares_by_loss

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the inner policy's signals, and what slots weigh."""
        return {**super().signals(parameters), "weight": _WEIGHT_BYTES}

    def evidence_bytes(self, parameters: EvictionParameters, group: int) -> int:
        """Return what the inner policy's signals and the weights take."""
        return super().evidence_bytes(parameters, group) + _WEIGHT_BYTES
