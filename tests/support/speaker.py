"""Holds conversations greedily with a cache that is never suspended, as an engine would."""

import torch
from support.codec_data import statistics

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape, probe
from scissorhands.row import Row
from scissorhands.step import ModelStep

FORTY = BudgetRequest.tokens(40)


class Speaker:
    """A model with a cache of its own, in which another row lives already.

    Args:
        model: The model.
        policy: The policy, as name or name:preset.
        budget: The budget.
        total: Tokens of the longest conversation.
        codec: Format of resident slots.
    """

    def __init__(self, model, policy="h2o", budget=FORTY, total=400, codec="none"):
        probe(model)
        self.step = ModelStep(model)
        self.shape = model_shape(model)
        name, _, preset = policy.partition(":")
        self.grant = grant(budget, PolicyRequest(name, preset), self.shape, total, codec=codec)
        heads = self.shape.layers * self.shape.kv_heads
        own = None if codec == "none" else statistics(self.shape.head_dim, heads)
        self.cache = ResidentCache(self.shape, torch.float32, torch.device("cpu"), statistics=own)
        self.cache.add_row(self.grant)
        self.evictions = []

    @torch.inference_mode()
    def turn(self, row: Row, ids: list[int], new: int) -> torch.Tensor:
        """Read what a row has not seen of ``ids``, add ``new`` tokens to them greedily, and return all logits."""
        seen = []
        while (remaining := len(ids) - row.step) > 0:
            size = row.next_chunk(remaining)
            self._note(self.cache.prepare_prefill(row, size))
            logits = self.step([row], [ids[row.step : row.step + size]])
        for _ in range(new):
            seen.append(logits[0])
            ids.append(int(logits[0].argmax()))
            if len(seen) < new:
                self._note(self.cache.prepare_decode(row))
                logits = self.step([row], [ids[-1:]])
        return torch.stack(seen)

    def _note(self, eviction) -> None:
        if eviction:
            self.evictions.append([keep.tolist() for keep in eviction.plan.keep])
