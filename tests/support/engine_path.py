"""Drives a resident cache as an engine does: chunks of a prompt, then single tokens of a batch of rows."""

from collections.abc import Sequence

import torch
from support.dense_reference import Rules
from transformers import PreTrainedModel

from scissorhands.attention import NAME
from scissorhands.budget import BudgetRequest, Grant
from scissorhands.cache import ResidentCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.row import Eviction, Planner, Row
from scissorhands.view import StepView


def policy_of(rules: Rules) -> PolicyRequest:
    """Return the request for a reference's policy, every number spelled out."""
    name, _, preset = rules.policy.replace("default", "scissorhands").partition(":")
    if name in ("counts", "paper"):
        name, preset = "scissorhands", name
    numbers = {"recent": rules.r, "sinks": rules.s, "drop": rules.m, "lookahead": rules.L, "chunk": rules.c}
    numbers["tail"] = rules.t
    return PolicyRequest(name, preset, numbers | ({"window": rules.w} if rules.w else {}))


class EnginePath:
    """A model and a resident cache.

    Args:
        model: The model; it is switched to our attention.
        planner: Who is asked for plans.
    """

    def __init__(self, model: PreTrainedModel, planner: Planner | None = None) -> None:
        model.set_attn_implementation(NAME)
        self.model = model
        self.shape = model_shape(model)
        self.cache = ResidentCache(self.shape, model.dtype, model.device, planner)
        self.evictions: list[Eviction] = []

    def grant(self, rules: Rules) -> Grant:
        """Return the grant of a reference's rules."""
        return grant(BudgetRequest.tokens(rules.B), policy_of(rules), self.shape)

    def add(self, rules: Rules) -> Row:
        """Add a row under a reference's rules."""
        return self.cache.add_row(self.grant(rules))

    def read(self, row: Row, tokens: torch.Tensor, deadline: float = 0.0) -> torch.Tensor:
        """Read a prompt chunk by chunk, waiting for plans up to ``deadline`` seconds; return all tokens' logits."""
        logits = []
        while len(tokens):
            size = row.next_chunk(len(tokens))
            self._note(self.cache.prepare_prefill(row, size, deadline))
            logits.append(self.forward([row], tokens[:size].unsqueeze(0))[0])
            tokens = tokens[size:]
        return torch.cat(logits)

    def decode(self, rows: Sequence[Row], tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each row; return ``[rows, vocabulary]`` logits."""
        for row in rows:
            self._note(self.cache.prepare_decode(row))
        return self.forward(rows, tokens.unsqueeze(1))[:, 0]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], tokens: torch.Tensor) -> torch.Tensor:
        """Run one forward pass of ``[rows, a]`` tokens; return ``[rows, a, vocabulary]`` logits."""
        view = StepView(rows)
        positions = torch.tensor([[row.step] for row in rows]) + torch.arange(tokens.shape[1])
        logits: torch.Tensor = self.model(input_ids=tokens, position_ids=positions, cache=view, use_cache=True).logits
        view.commit(tokens.shape[1])
        return logits

    def _note(self, eviction: Eviction | None) -> None:
        if eviction:
            self.evictions.append(eviction)


def kept_positions(row: Row) -> list[list[list[int]]]:
    """Return the positions in a row's slots, of each global layer and head."""
    return [
        pool.positions[row.index, :, :length].tolist()
        for pool, length in zip(row.pool.layers, row.lengths, strict=True)
        if not pool.window
    ]
