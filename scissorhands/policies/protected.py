"""Structural protection of the prompt's boundaries around any policy (Garcia, 2026, arXiv 2605.18053)."""

from dataclasses import replace

from scissorhands.budget import EvictionParameters
from scissorhands.policies.wrapper import Wrapper

# One in so many slots is reserved at each boundary.
SHARE = 10


class Protected(Wrapper):
    """Exempts a tenth of the budget at either end of the prompt; another policy scores the other slots.

    The paper reserves 10 % of the cache at each boundary of the prompt, and finds that this matters more than how the
    other slots are scored. So the first tokens are sinks here, and the last ones are the ``tail``. While a prompt is
    read, its last tokens so far are the tail; of several prompts, the latest counts. A sequence that is decoded from
    its first token has no tail.

    Differs from the published rule in this: the reserved slots are never more than the inner policy's own numbers
    leave over, so a budget is valid if it is valid without protection. What else is a boundary, such as the marks
    between the turns of a conversation, is not protected; the paper's tenths do not tell them apart either.
    """

    name = "protected"

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the inner policy's numbers for a budget of ``slots``, with both boundaries exempt."""
        inner = self.inner.parameters(slots)
        reserved = slots // SHARE
        spare = max(0, slots - inner.smallest_budget)
        more = min(max(0, reserved - inner.sinks), spare // 2)
        return replace(inner, sinks=inner.sinks + more, tail=min(reserved, spare - more))
