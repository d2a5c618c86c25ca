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

Packed slots are folded in the same way: keys are unpacked a tile at a time, and of the values only those that change,
which are encoded again. Where what is folded in is little, that gives the same levels as before, and only the weight
tells.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

# Below any attention that matters. A slot that nobody attended to would weigh infinitely more for what it takes in.
_LEAST_RATE = 1e-9
_MOST_GROWTH = 20.0


class Match(NamedTuple):
    """Where evicted slots go.

    Args:
        slots: ``[kv_heads, d]`` int64, of each the kept slot with the nearest key.
        near: ``[kv_heads, d]`` bool, whether that is near enough.
    """

    slots: torch.Tensor
    near: torch.Tensor


class Folded(NamedTuple):
    """What becomes of the slots of a match; where several go to one slot, they all say the same.

    Args:
        values: ``[kv_heads, d, head_dim]``, the new value of each match's slot.
        growth: ``[kv_heads, d]`` float32, what to multiply the slot's weight by.
        grown: ``[kv_heads, d]`` bool; False where the slot stays as it is.
    """

    values: torch.Tensor
    growth: torch.Tensor
    grown: torch.Tensor


def match(evicted: torch.Tensor, kept: Iterable[torch.Tensor]) -> Match:
    """Find where evicted slots go, by their keys.

    Args:
        evicted: ``[kv_heads, d, head_dim]``.
        kept: Keys ``[kv_heads, n, head_dim]``, piece by piece, in order.
    """
    keys = evicted.float()
    least = keys.new_full(keys.shape[:2], torch.inf)
    slots = torch.zeros(keys.shape[:2], dtype=torch.int64, device=keys.device)
    sums, squares, count = torch.zeros_like(keys[:, 0]), torch.zeros_like(keys[:, 0, 0]), 0
    for piece in kept:
        others = piece.float()
        lengths = others.square().sum(dim=-1)
        # The squared distances, but for the squares of the evicted keys, which do not change which is the least.
        distances, places = torch.baddbmm(lengths.unsqueeze(1), keys, others.mT, alpha=-2).min(dim=-1)
        nearer = distances < least
        least = torch.where(nearer, distances, least)
        slots = torch.where(nearer, places + count, slots)
        sums += others.sum(dim=1)
        squares += lengths.sum(dim=1)
        count += others.shape[1]
    spread = squares / count - (sums / count).square().sum(dim=-1)
    return Match(slots, least + keys.square().sum(dim=-1) < spread.unsqueeze(1))


def rates(mass: torch.Tensor, positions: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return the mean attention ``[kv_heads, n]`` of the queries that could see a slot.

    Args:
        mass: ``[kv_heads, n]`` float32, attention received.
        positions: ``[kv_heads, n]``.
        step: Tokens seen, ``[kv_heads, 1]``.
    """
    return (mass / (step - positions)).clamp_(min=_LEAST_RATE)


def fold(
    found: Match, kept: torch.Tensor, kept_rates: torch.Tensor, evicted: torch.Tensor, evicted_rates: torch.Tensor
) -> Folded:
    """Fold evicted slots into kept ones, of one layer of a row.

    Args:
        found: Where they go.
        kept: ``[kv_heads, d, head_dim]``, values of the match's slots.
        kept_rates: ``[kv_heads, d]``, their rates.
        evicted: ``[kv_heads, d, head_dim]``, values.
        evicted_rates: ``[kv_heads, d]``.
    """
    more = evicted_rates * found.near
    together = (found.slots.unsqueeze(2) == found.slots.unsqueeze(1)).float()
    added = (together @ more.unsqueeze(-1)).squeeze(-1)
    total = kept_rates + added
    sums = kept.float() * kept_rates.unsqueeze(-1) + together @ (evicted.float() * more.unsqueeze(-1))
    growth = (total / kept_rates).clamp_(max=_MOST_GROWTH)
    return Folded((sums / total.unsqueeze(-1)).to(kept.dtype), growth, added > 0)
