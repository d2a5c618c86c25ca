"""Structural protection of the prompt's boundaries around any policy (Garcia, 2026, arXiv 2605.18053)."""

from dataclasses import replace
from typing import ClassVar

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import Policy, Scores
from scissorhands.policies.catalog import STANDALONE, labels
from scissorhands.policies.full import Full
from scissorhands.snapshot import LayerEvidence

# One in so many slots is reserved at each boundary.
SHARE = 10

_INNER = {
    label: (policy, preset) for policy in STANDALONE if policy is not Full for label, preset in labels(policy).items()
}


class Protected(Policy):
    """Exempts a tenth of the budget at either end of the prompt; another policy scores the other slots.

    Presets:
        The policy that is protected, as in ``protected:h2o`` or ``protected:scissorhands:paper``. The first is taken
        when none is named.

    The paper reserves 10 % of the cache at each boundary of the prompt, and finds that this matters more than how the
    other slots are scored. So the first tokens are sinks here, and the last ones are the ``tail``. While a prompt is
    read, its last tokens so far are the tail; of several prompts, the latest counts. A sequence that is decoded from
    its first token has no tail.

    Differs from the published rule in this: the reserved slots are never more than the inner policy's own numbers
    leave over, so a budget is valid if it is valid without protection. What else is a boundary, such as the marks
    between the turns of a conversation, is not protected; the paper's tenths do not tell them apart either.
    """

    name = "protected"
    presets: ClassVar[tuple[str, ...]] = tuple(_INNER)

    def __init__(self, preset: str = next(iter(_INNER))) -> None:
        super().__init__(preset)
        policy, inner = _INNER[preset]
        self.inner = policy(inner)

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the inner policy's numbers for a budget of ``slots``, with both boundaries exempt."""
        inner = self.inner.parameters(slots)
        reserved = slots // SHARE
        spare = max(0, slots - inner.smallest_budget)
        more = min(max(0, reserved - inner.sinks), spare // 2)
        return replace(inner, sinks=inner.sinks + more, tail=min(reserved, spare - more))

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the inner policy's signals: protection goes by position."""
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
