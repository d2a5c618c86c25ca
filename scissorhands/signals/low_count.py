"""Low counts in two rotating buckets, the evidence of Scissorhands' default preset (arXiv 2305.17118)."""

import torch

from scissorhands.signals.base import Observation, Signal


class LowCount(Signal):
    """Queries of the last ``w/2`` to ``w`` that gave a slot less than ``1/n``, the average over the slots in use.

    Query ``t`` counts in bucket ``t // (w/2) % 2``, which is emptied when it comes round again. An exact window would
    take a bit for every query and slot; this takes two bytes a slot.

    Args:
        window: w, in queries; even, at most 510.
    """

    name = "low_count"

    def __init__(self, window: int) -> None:
        self.half = window // 2

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots, 2]`` uint8 zeros."""
        return torch.zeros(rows, kv_heads, slots, 2, dtype=torch.uint8, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Count the new queries."""
        low = seen.below(seen.averages(seen.lengths))
        queries, slots = low.shape[2:]
        if queries == 1:
            self._observe_one(state[:, :, :slots], low.squeeze(2), seen.steps)
            return
        for row, step in enumerate(seen.steps):
            done = 0
            while done < queries:
                bucket, into = divmod(step + done, self.half)
                span = min(queries - done, self.half - into)
                counts = state[row, :, :, bucket % 2]
                if into == 0:
                    counts.zero_()
                counts[:, :slots] += low[row, :, done : done + span].sum(dim=1, dtype=torch.uint8)
                done += span

    def _observe_one(self, state: torch.Tensor, low: torch.Tensor, steps: tuple[int, ...]) -> None:
        buckets = [step // self.half % 2 for step in steps]
        for row, step in enumerate(steps):
            if step % self.half == 0:
                state[row, ..., buckets[row]] = 0
        if len(set(buckets)) == 1:
            state[..., buckets[0]] += low
            return
        chosen = torch.tensor(buckets, device=state.device).view(-1, 1, 1, 1) == torch.arange(2, device=state.device)
        state += low.unsqueeze(-1) & chosen

    def value(self, state: torch.Tensor) -> torch.Tensor:
        """Return the sum of both buckets."""
        return state.sum(dim=-1, dtype=torch.int16)
