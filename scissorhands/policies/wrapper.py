"""The base of policies that change how another policy works."""

from typing import ClassVar

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import Policy, Scores
from scissorhands.policies.catalog import STANDALONE, labels
from scissorhands.policies.full import Full
from scissorhands.snapshot import LayerEvidence

_INNER = {
    label: (policy, preset) for policy in STANDALONE if policy is not Full for label, preset in labels(policy).items()
}


class Wrapper(Policy):
    """Has the numbers, the signals and the scores of another policy, except for what an author overrides.

    Presets:
        The policy that is wrapped, as in ``protected:h2o`` or ``protected:scissorhands:paper``. The first is taken
        when none is named.
    """

    presets: ClassVar[tuple[str, ...]] = tuple(_INNER)

    def __init__(self, preset: str = next(iter(_INNER))) -> None:
        super().__init__(preset)
        policy, inner = _INNER[preset]
        self.inner = policy(inner)

    @property
    def reads_vectors(self) -> bool:
        """Whether the inner policy does."""
        return self.inner.reads_vectors

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the inner policy's numbers for a budget of ``slots``."""
        return self.inner.parameters(slots)

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the inner policy's signals."""
        return self.inner.signals(parameters)

    def evidence_bytes(self, parameters: EvictionParameters, group: int) -> int:
        """Return what the inner policy's signals take."""
        return self.inner.evidence_bytes(parameters, group)

    def check(self, parameters: EvictionParameters) -> None:
        """Refuse numbers that the inner policy cannot work with.

        Raises:
            InvalidRequestError: A number is out of range.
        """
        self.inner.check(parameters)

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return the inner policy's scores."""
        return self.inner.score(evidence, step, parameters)
