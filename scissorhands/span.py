"""Spans: where the new tokens of adjacent rows go in one forward pass, and what they see."""

from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass(frozen=True)
class Span:
    """Adjacent rows of a pool that take the same number of new tokens in one forward pass.

    Args:
        rows: The rows.
        lengths: Slots in use of each row before the new tokens.
        steps: Tokens that each row has seen before them.
        incoming: a, new tokens of each row.
        device: Where the index tensors live.
    """

    rows: slice
    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    incoming: int
    device: torch.device
    _rings: dict[int, "RingSpan"] = field(default_factory=dict, compare=False, repr=False)

    @property
    def extent(self) -> int:
        """Slots that the longest row uses once the new tokens are in."""
        return max(self.lengths) + self.incoming

    @cached_property
    def even(self) -> bool:
        """Whether all rows use equally many slots."""
        return min(self.lengths) == max(self.lengths)

    @cached_property
    def row_index(self) -> torch.Tensor:
        """``[R, 1]`` indices of the rows."""
        return torch.arange(self.rows.start, self.rows.stop, device=self.device).unsqueeze(1)

    @cached_property
    def slot_index(self) -> torch.Tensor:
        """``[R, a]`` slots that the new tokens go to."""
        first = torch.tensor(self.lengths, device=self.device).unsqueeze(1)
        return first + torch.arange(self.incoming, device=self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """``[R, a]`` int32 true positions of the new tokens."""
        first = torch.tensor(self.steps, dtype=torch.int32, device=self.device).unsqueeze(1)
        return first + torch.arange(self.incoming, dtype=torch.int32, device=self.device)

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """``[R, 1, a, extent]`` bool, which slots each new query sees; None when each sees all."""
        if self.incoming == 1 and self.even:
            return None
        slots = torch.arange(self.extent, device=self.device)
        return (slots <= self.slot_index.unsqueeze(-1)).unsqueeze(1)

    def ring(self, slots: int) -> "RingSpan":
        """Return where the new tokens go in a ring of ``slots`` slots; layers of equal windows share it."""
        return self._rings.setdefault(slots, RingSpan(self, slots))


@dataclass(frozen=True)
class RingSpan:
    """The same for a ring: the token at position p lives in slot ``p mod W``, where it replaces the one at ``p - W``.

    Args:
        span: The rows and their new tokens.
        slots: W, slots of the ring.
    """

    span: Span
    slots: int

    @property
    def written(self) -> int:
        """How many of the new tokens are still in the ring once all are through."""
        return min(self.span.incoming, self.slots)

    @cached_property
    def even(self) -> bool:
        """Whether all rows are at the same slot."""
        return len({step % self.slots for step in self.span.steps}) == 1

    @cached_property
    def before(self) -> int:
        """Slots that the longest row uses before the new tokens."""
        return min(max(self.span.steps), self.slots)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Slots that each row uses once the new tokens are in."""
        return tuple(min(step + self.span.incoming, self.slots) for step in self.span.steps)

    @cached_property
    def slot_index(self) -> torch.Tensor:
        """``[R, written]`` slots that the newest of the new tokens go to."""
        return self.span.positions[:, -self.written :].long() % self.slots

    @cached_property
    def visible_of_one(self) -> torch.Tensor | None:
        """``[R, 1, 1, extent]`` bool, which slots of the ring one new query sees; None when each row's sees all."""
        if min(self.after) == max(self.after):
            return None
        used = torch.tensor(self.after, device=self.span.device).unsqueeze(1)
        return (torch.arange(max(self.after), device=self.span.device) < used)[:, None, None]

    @cached_property
    def visible(self) -> torch.Tensor:
        """``[R, 1, a, before + a]`` bool: what each new query sees of the ring as it was, then of the new tokens."""
        steps = torch.tensor(self.span.steps, device=self.span.device).unsqueeze(1)
        newest = steps - 1
        slots = torch.arange(self.before, device=self.span.device)
        held = (newest - (newest - slots) % self.slots).unsqueeze(1)  # [R, 1, before] positions; negative: none
        new = torch.arange(self.span.incoming, device=self.span.device)
        queries = (steps + new).unsqueeze(-1)
        old = (held >= 0) & (held > queries - self.slots)
        age = new.unsqueeze(1) - new
        own = ((age >= 0) & (age < self.slots)).expand(len(self.span.steps), -1, -1)
        return torch.cat([old, own], dim=-1).unsqueeze(1)
