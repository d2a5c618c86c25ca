"""SnapKV (Li et al., NeurIPS 2024, arXiv 2404.14469), adapted to decoding."""

from functools import reduce

import numpy as np

from scissorhands.budget import EvictionParameters
from scissorhands.errors import InvalidRequestError
from scissorhands.policies.base import Policy, Scores, common_parameters
from scissorhands.snapshot import LayerEvidence

# The observation window, in queries, and the kernel of the pooling, in slots.
WINDOW = 32
KERNEL = 7
_MIN_WINDOW = 2


class SnapKV(Policy):
    """Keeps the slots around those that a window of the last queries attends to most, and the window itself.

    A slot's score is the largest attention mass of the :data:`KERNEL` slots around it (max pooling), so that what
    stands beside an important token stays with it.

    Differs from the published rule in this: SnapKV compresses a prompt once, by its last queries, and then keeps every
    token; here every eviction looks back on the queries before it. The window is two rotating buckets, so it spans the
    last ``w/2`` to ``w`` queries. Every KV head decides by the mean over its group. Neighbors are the slots that are
    left, in the order of their positions, and recent slots count as neighbors too. The sinks are exempt.
    """

    name = "snapkv"

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the numbers for a budget of ``slots``: the window is recent, but at most half of the budget is."""
        return common_parameters(slots, recent=min(WINDOW, slots // 2), window=WINDOW)

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the attention mass of the window, two buckets of a float32."""
        del parameters
        return {"window_mass": 8}

    def check(self, parameters: EvictionParameters) -> None:
        """Refuse windows that two buckets cannot share.

        Raises:
            InvalidRequestError: The window is out of range.
        """
        check_window(parameters)

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return the attention mass of the window, pooled over neighboring slots."""
        del step, parameters
        return pooled(evidence.signals["window_mass"].astype(np.float64))


def check_window(parameters: EvictionParameters) -> None:
    """Refuse windows that two buckets of any size cannot share.

    Raises:
        InvalidRequestError: The window is out of range.
    """
    window = parameters.window
    if window < _MIN_WINDOW or window % 2:
        raise InvalidRequestError(
            "policy.parameters.window", f"must be an even number of at least {_MIN_WINDOW} queries, got {window}"
        )


def pooled(mass: Scores) -> Scores:
    """Return ``[kv_heads, n]``, the largest ``mass`` of the :data:`KERNEL` slots around each slot."""
    reach = KERNEL // 2
    # No mass is negative, so slots of zero beyond both ends change nothing.
    padded = np.pad(mass, ((0, 0), (reach, reach)))
    slots = mass.shape[1]
    return reduce(np.maximum, (padded[:, first : first + slots] for first in range(KERNEL)))
