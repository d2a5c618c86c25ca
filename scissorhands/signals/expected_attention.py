"""What future queries are expected to give a slot, the evidence of Expected Attention (arXiv 2510.00636)."""

from typing import Self

import torch

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import SINKS
from scissorhands.signals.base import Observation, Resident, Signal


class ExpectedAttention(Signal):
    """Expected attention of future queries, times the norm of the slot's value (arXiv 2510.00636; NVIDIA's kvpress).

    The paper takes the queries of a head as Gaussian with mean ``mu`` and covariance ``C``, so that a key k expects the
    attention ``E[exp(q k / sqrt(d))] = exp(mu k / sqrt(d) + k C k / 2d)`` before normalization. Along one key such a
    Gaussian has one dimension: the two terms are the mean and half the variance of the scores ``q k / sqrt(d)``. So
    here mean and variance of the scores are kept with each slot, instead of ``d + d²`` numbers for each query head of
    a row. Then, as published: for each query head a softmax over the slots but the first tokens, the mean over the
    heads of a group, times the norm of the value. The first :data:`~scissorhands.policies.base.SINKS` tokens get 0.

    What differs from the published rule: the queries are those that came after the token, each at its own position,
    where the paper takes all queries of the prompt without their positions and then puts the mean over the next 512
    positions in.

    Args:
        group: Query heads that share a KV head.
    """

    name = "expected_attention"

    def __init__(self, group: int) -> None:
        self.group = group

    @classmethod
    def build(cls, parameters: EvictionParameters, group: int) -> Self:
        """Return the signal for ``group`` query heads to a KV head."""
        del parameters
        return cls(group)

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots, group, 2]`` float32 zeros: mean score, sum of squared deviations from it."""
        return torch.zeros(rows, kv_heads, slots, self.group, 2, dtype=torch.float32, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Add the scores of the new queries to means and deviations (Chan, Golub and LeVeque 1979, equation 2.1)."""
        means, squares = state.permute(0, 1, 3, 2, 4).unbind(-1)
        # Queries that have seen a slot, before and now. A slot's position tells the former.
        old = (seen.span.positions[:, :1, None, None] - seen.positions.unsqueeze(2)).clamp_min_(0)
        new: torch.Tensor | int
        if seen.span.visible is None:
            new, mean = 1, seen.scores.squeeze(3)
        else:
            visible = seen.span.visible.unsqueeze(2)
            new = visible.sum(dim=3, dtype=torch.float32)
            mean = seen.scores.masked_fill(~visible, 0).sum(dim=3) / new.clamp_min(1)
            squares += (seen.scores - mean.unsqueeze(3)).masked_fill(~visible, 0).square().sum(dim=3)
        share = new / (old + new).clamp_min_(1)
        apart = mean - means
        squares.addcmul_(apart.square(), old * share)
        means.addcmul_(apart, share)

    def value(self, state: torch.Tensor, resident: Resident) -> torch.Tensor:
        """Return the expected attention times the norm of the value, float32."""
        queries = resident.step - resident.positions
        logits = state[..., 0] + state[..., 1] / (2 * queries.unsqueeze(-1))
        first = resident.positions < SINKS
        shares = torch.softmax(logits.masked_fill(first.unsqueeze(-1), float("-inf")), dim=1).nan_to_num()
        norms: torch.Tensor = torch.linalg.vector_norm(resident.values.float(), dim=-1)
        return shares.mean(dim=-1) * norms
