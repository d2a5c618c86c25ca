"""The base of signals that look back on a window of queries in two rotating buckets."""

from abc import abstractmethod
from typing import ClassVar, Self

import torch

from scissorhands.budget import EvictionParameters
from scissorhands.signals.base import Observation, Signal


class Buckets(Signal):
    """Sums what the queries of the last ``w/2`` to ``w`` gave a slot.

    Query ``t`` counts in bucket ``t // (w/2) % 2``, which is emptied when it comes round again. An exact window would
    take a number for every query and slot; this takes two a slot.

    Args:
        window: w, in queries; even, at least 2.
    """

    dtype: ClassVar[torch.dtype]

    def __init__(self, window: int) -> None:
        self.half = window // 2

    @classmethod
    def build(cls, parameters: EvictionParameters, group: int) -> Self:
        """Return the signal over the window of ``parameters``."""
        del group
        return cls(parameters.window)

    @abstractmethod
    def amounts(self, seen: Observation) -> torch.Tensor:
        """Return ``[R, kv_heads, a, n]``, what each new query adds to each slot; 0 where it does not see the slot."""

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots, 2]`` zeros."""
        return torch.zeros(rows, kv_heads, slots, 2, dtype=self.dtype, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Add the new queries."""
        amounts, span = self.amounts(seen), seen.span
        if span.incoming == 1:
            self._observe_one(state, amounts.squeeze(2), span.steps)
            return
        for row, step in enumerate(span.steps):
            done = 0
            while done < span.incoming:
                bucket, into = divmod(step + done, self.half)
                end = min(span.incoming, done + self.half - into)
                sums = state[row, :, :, bucket % 2]
                if into == 0:
                    sums.zero_()
                sums.add_(amounts[row, :, done:end].sum(dim=1, dtype=self.dtype))
                done = end

    def _observe_one(self, state: torch.Tensor, amounts: torch.Tensor, steps: tuple[int, ...]) -> None:
        buckets = [step // self.half % 2 for step in steps]
        for row, step in enumerate(steps):
            if step % self.half == 0:
                state[row, ..., buckets[row]] = 0
        if len(set(buckets)) == 1:
            state[..., buckets[0]].add_(amounts)
            return
        chosen = torch.tensor(buckets, device=state.device).view(-1, 1, 1, 1) == torch.arange(2, device=state.device)
        state += amounts.unsqueeze(-1) * chosen
