"""Kinds of tokens, the evidence of FastGen (arXiv 2310.01801) that does not come from attention."""

import torch

from scissorhands.errors import InvalidRequestError
from scissorhands.signals.base import Observation, Resident, Signal


class TokenKinds(Signal):
    """The :class:`~scissorhands.snapshot.TokenKind` of the token in a slot, a byte.

    It is kept for every layer and head, as positions are, because each head keeps other tokens.
    """

    name = "token_kind"

    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return ``[rows, kv_heads, slots]`` uint8 zeros."""
        return torch.zeros(rows, kv_heads, slots, dtype=torch.uint8, device=device)

    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Note the kinds of the new tokens.

        Raises:
            InvalidRequestError: Nobody tells what kinds they are.
        """
        if seen.kinds is None:
            raise InvalidRequestError(
                "policy.name",
                "it needs to know which tokens are special or punctuation: call tell_kinds(model, "
                "token_kinds(tokenizer)) of scissorhands.kinds once, and give the model input_ids",
            )
        for row, (first, kinds) in enumerate(zip(seen.span.lengths, seen.kinds, strict=True)):
            state[row, :, first : first + len(kinds)] = kinds

    def recalled(self, state: torch.Tensor, resident: Resident, positions: torch.Tensor) -> torch.Tensor:
        """Return no kind: it is not known any more."""
        del resident
        return state.new_zeros(len(positions))
