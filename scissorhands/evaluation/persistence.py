"""The persistence of importance, as the paper measures it.

The paper is Liu et al., NeurIPS 2023, arXiv 2305.17118. Its hypothesis: only tokens that were pivotal before are
pivotal later.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from scissorhands.evaluation.recorder import above_average, interval_sums

Shares = npt.NDArray[np.float64]

# A token is pivotal in a half if more than this share of the half's queries that see it give it more than the average
# attention. The paper's sets are unions over queries, so one is enough: 0. In a small model that is nearly every token
# of a long text, so stricter sets are measured too.
SHARES = (0.0, 0.1, 0.5)


@dataclass(frozen=True)
class Persistence:
    """How far importance persists, ``[sequences, layers, kv_heads]`` each.

    Args:
        ratio: Of the tokens of the earlier half that are pivotal in the later, the share that were so in the earlier;
            NaN where there are none.
        pivotal: Share of the tokens of the earlier half that were pivotal in it. Were importance drawn anew, the ratio
            would be this share: it is what chance gives.
    """

    ratio: Shares
    pivotal: Shares

    @property
    def beyond_chance(self) -> Shares:
        """0 for a ratio that chance gives, 1 for perfect persistence; 0 where every token is pivotal."""
        room = 1 - self.pivotal
        return np.divide(self.ratio - self.pivotal, room, out=np.zeros_like(room), where=room > 0)


def persistence_ratio(earlier: npt.NDArray[np.bool_], later: npt.NDArray[np.bool_]) -> Persistence:
    """Return the persistence ratio of sets of pivotal tokens (section 3 and Figure 2 of the paper).

    With ``S`` the set of tokens to which a query of that part gives more than the average attention, and ``t`` half of
    the length ``l``, the ratio is ``|S(0..t) & S(t..l)| / |{x in S(t..l), x <= t}|``. The paper shows it beside the
    size of the set, ``|S(0..t)| / t``, since a set of all tokens would persist for certain.

    Args:
        earlier: ``[..., t]``, whether each token of the earlier half is pivotal in it.
        later: The same tokens, whether they are pivotal in the later half.

    Returns:
        Both shares, ``[...]``. The ratio is NaN where the later half needs none of these tokens.
    """
    again = np.count_nonzero(earlier & later, axis=-1)
    needed = np.count_nonzero(later, axis=-1)
    ratio = np.divide(again, needed, out=np.full(needed.shape, np.nan), where=needed > 0)
    return Persistence(ratio, np.count_nonzero(earlier, axis=-1) / earlier.shape[-1])


def measure_persistence(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[float, Persistence]:
    """Measure persistence in every layer and KV head; the mean over a group of query heads comes first.

    Args:
        model: A model that attends through our attention.
        tokens: ``[sequences, length]``.
        progress: Told how many more tokens are done.

    Returns:
        By each of :data:`SHARES`.
    """
    length = tokens.shape[1]
    half = length // 2
    counts = interval_sums(model, tokens, (0, half), above_average, progress)
    # [sequences, layers, kv_heads, halves, tokens of the earlier half]
    found = torch.stack(counts, dim=1)[..., :half].cpu().numpy()
    # Queries of each half that see each of these tokens.
    queries = np.stack([half - np.arange(half), np.full(half, length - half)])
    measured = {}
    for share in SHARES:
        pivotal = found > share * queries
        measured[share] = persistence_ratio(pivotal[..., 0, :], pivotal[..., 1, :])
    return measured
