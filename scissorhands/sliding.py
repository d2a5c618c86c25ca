"""Sliding layers: a ring of the window's own tokens, whatever the budget is.

A query of such a layer sees itself and the ``W - 1`` tokens before it, so a token that has left the window can never be
attended to by this layer again. It is overwritten, not archived; no policy decides, and nothing is learned about it. A
ring of W slots is all that one token at a time needs. The first queries of a chunk see further back than the ring holds
once the chunk is in, so a chunk attends to what the ring held before, followed by the chunk itself: a copy that lives
for the time of that one layer's computation.
"""

import torch

from scissorhands.attended import Attended
from scissorhands.errors import EngineError, InvalidRequestError
from scissorhands.layer_pool import LayerPool
from scissorhands.span import Span


class SlidingLayer(LayerPool):
    """The rings of a sliding layer. Slots have neither positions nor evidence: the tokens seen tell what each holds.

    Args:
        rows: R, number of rows.
        kv_heads: H, key-value heads.
        slots: W, or the length of the sequence if that is smaller.
        head_dim: D, elements of a key.
        window: W.
        dtype: Number type of keys and values.
        device: Where the tensors live.
    """

    def __init__(
        self,
        rows: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(rows, kv_heads, slots, head_dim, (), dtype, device)
        self.window = window
        self.slots = slots
        self.positions = self.positions[:, :, :0].clone()

    def append(self, span: Span, keys: torch.Tensor, values: torch.Tensor, *, fresh: bool = True) -> Attended:
        """Put new keys and values ``[R, H, a, D]`` where tokens have left the window, or will when the chunk is in.

        Args:
            span: The rows and their new tokens.
            keys: The keys.
            values: The values.
            fresh: False when a pass is repeated.

        Returns:
            What the new tokens' queries attend to.

        Raises:
            InvalidRequestError: A sequence is longer than its ring was made for.
            EngineError: A chunk is repeated over a ring in which it has already replaced what it needs.
        """
        longest = max(span.steps) + span.incoming
        if self.slots < min(self.window, longest):
            raise InvalidRequestError("total_tokens", f"was {self.slots}, but the sequence has {longest} tokens")
        ring = span.ring(self.slots)
        if span.incoming == 1:
            self._write(span, keys, values)
            used = (span.rows, slice(None), slice(max(ring.after)))
            return Attended(self.keys[used], self.values[used], ring.visible_of_one)
        if not fresh and longest > self.slots:
            raise EngineError("a chunk cannot be repeated over a sliding window")
        used = (span.rows, slice(None), slice(ring.before))
        attended = Attended(
            torch.cat([self.keys[used], keys], dim=2), torch.cat([self.values[used], values], dim=2), ring.visible
        )
        self._write(span, keys, values)
        return attended

    def observe(
        self, span: Span, attention: torch.Tensor, scores: torch.Tensor, kinds: torch.Tensor | None = None
    ) -> None:
        """Learn nothing: nobody decides about these tokens."""

    def _write(self, span: Span, keys: torch.Tensor, values: torch.Tensor) -> None:
        ring = span.ring(self.slots)
        first = span.steps[0] % self.slots
        if ring.even and first + span.incoming <= self.slots:
            place = (span.rows, slice(None), slice(first, first + span.incoming))
            self.keys[place] = keys
            self.values[place] = values
            return
        at = (span.row_index, slice(None), ring.slot_index)
        self.keys[at] = keys[:, :, -ring.written :].transpose(1, 2)
        self.values[at] = values[:, :, -ring.written :].transpose(1, 2)
