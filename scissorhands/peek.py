"""Peeking: what the next tokens ask for, before they are read.

A forward pass over the next tokens of one row, of which nothing stays but their queries: it counts no evidence, and
what it has appended lies in free slots, where the tokens themselves will go when they are read.
"""

import torch

from scissorhands.new_tokens import NewTokens
from scissorhands.row import Row
from scissorhands.view import StepView


class PeekView(StepView):
    """A row in a forward pass that is never committed.

    Args:
        row: The row, in which there is room for the tokens.

    Attributes:
        queries: Of each layer that the pass has reached, ``[query_heads, a, head_dim]``, times the factor on scores.
    """

    def __init__(self, row: Row) -> None:
        super().__init__([row])
        self.queries: list[torch.Tensor] = []
        # As if the pass were repeated: whoever repeats one counts no evidence again.
        row.observed_layers = len(row.pool.layers)

    def attend(self, layer: int, new: NewTokens, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Note the queries, append and attend."""
        self.queries.append(new.query[0] * new.scaling)
        return super().attend(layer, new, mask)

    def leave(self) -> None:
        """Let the row be as it was."""
        self.rows[0].observed_layers = 0
