"""What new tokens bring to one layer's attention."""

from collections.abc import Iterator
from typing import NamedTuple

import torch


class NewTokens(NamedTuple):
    """The ``a`` new tokens of each of ``R`` rows, as one layer sees them.

    Args:
        query: ``[R, query_heads, a, head_dim]``; the heads of a group are adjacent.
        keys: ``[R, kv_heads, a, head_dim]``.
        values: ``[R, kv_heads, a, head_dim]``.
        scaling: Factor on the scores.
        kinds: ``[R, a]`` uint8, kinds of the tokens (:mod:`scissorhands.kinds`); None if nobody tells.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    kinds: torch.Tensor | None = None

    def at(self, rows: slice, tokens: slice = slice(None)) -> "NewTokens":
        """Return some of the tokens of some of the rows."""
        place = (rows, slice(None), tokens)
        kinds = None if self.kinds is None else self.kinds[rows, tokens]
        return NewTokens(self.query[place], self.keys[place], self.values[place], self.scaling, kinds)

    def parts(self, count: int) -> Iterator["NewTokens"]:
        """Yield ``count`` equal shares of the heads."""
        if count == 1:
            yield self
            return
        shares = (states.chunk(count, dim=1) for states in self[:3])
        for query, keys, values in zip(*shares, strict=True):
            yield NewTokens(query, keys, values, self.scaling, self.kinds)
