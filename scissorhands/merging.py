"""Merging: folding evicted slots into kept ones, so that less of what they carried is lost.

Each evicted slot goes to the kept slot of the same head whose key is nearest, if that is nearer than the kept keys
are to their mean (root mean square); else it is dropped. With ``rate``, the mean attention of the queries that could
see a slot, a kept slot ``i`` that takes in the slots ``J`` gets

    value_i  <-  (rate_i value_i + sum_J rate_j value_j) / (rate_i + sum_J rate_j)
    weight_i <-  weight_i (rate_i + sum_J rate_j) / rate_i

and its key stays: keys carry their positions, and a mean of two is the key of neither. The logarithm of the weight is
added to the slot's scores, so a query that resembles those before it gives the slot what it would have given to all
of them, and finds the mean of what they held. A slot that hardly anybody attended to would come to weigh too much for
the query that does, so one eviction multiplies a weight by no more than 20.

That values go to the most similar key is from D2O (Wan et al., arXiv 2406.13035), who average keys too and weigh by
similarity, and that attention decides the shares is from CaM (Zhang et al., ICML 2024), who fold values only. Neither
changes the scores. Without that, it gained nothing here (docs/quality.md).
"""

import torch

from scissorhands.slots import Slots

# Below any attention that matters. A slot that nobody attended to would weigh infinitely more for what it takes in.
_LEAST_RATE = 1e-9
_MOST_GROWTH = 20.0
# Distances by way of products round so much that another slot may seem nearest.
_EXACT = "donot_use_mm_for_euclid_dist"


def fold(kept: Slots, weights: torch.Tensor, evicted: Slots) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold evicted slots into kept ones, of one layer of a row.

    Args:
        kept: ``k`` slots of each head; the last is the newest token's.
        weights: ``[kv_heads, k]`` float32, logarithms of their weights.
        evicted: ``d`` slots of each head.

    Returns:
        The kept slots' new values ``[kv_heads, k, head_dim]`` and logarithms of weights.
    """
    step = kept.positions[:, -1:] + 1
    keys = kept.keys.float()
    distance, nearest = torch.cdist(evicted.keys.float(), keys, compute_mode=_EXACT).min(dim=-1)
    spread = (keys - keys.mean(dim=1, keepdim=True)).square().sum(dim=-1).mean(dim=1, keepdim=True)
    own = _rates(kept, step)
    more = _rates(evicted, step) * (distance.square() < spread)
    total = own.scatter_add(1, nearest, more)
    sums = kept.values.float() * own.unsqueeze(-1)
    sums.scatter_add_(1, nearest.unsqueeze(-1).expand_as(evicted.values), evicted.values.float() * more.unsqueeze(-1))
    growth = (total / own).clamp_(max=_MOST_GROWTH)
    return (sums / total.unsqueeze(-1)).to(kept.values.dtype), weights + growth.log()


def _rates(slots: Slots, step: torch.Tensor) -> torch.Tensor:
    """Return ``[kv_heads, n]`` mean attention of the queries that could see a slot."""
    return (slots.mass / (step - slots.positions)).clamp_(min=_LEAST_RATE)
