"""The base of all signals: what is learned about a slot, on the device."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Self

import torch

from scissorhands.budget import EvictionParameters
from scissorhands.span import Span


@dataclass(frozen=True)
class Observation:
    """What ``a`` new queries of ``R`` rows saw in one layer.

    Args:
        attention: ``[R, kv_heads, group, a, n]`` float32, of every query head; 0 where a query does not see a slot.
        span: The rows and where their new tokens went.
        scores: ``[R, kv_heads, group, a, n]`` float32, scaled products of queries and keys, of every query head; -inf
            where a query does not see a slot.
        positions: ``[R, kv_heads, n]`` int32, of the token in each slot; beyond a row's slots in use they mean nothing.
        kinds: ``[R, a]`` uint8, :class:`~scissorhands.snapshot.TokenKind` of each new token; None if nobody tells.
    """

    attention: torch.Tensor
    span: Span
    scores: torch.Tensor
    positions: torch.Tensor
    kinds: torch.Tensor | None = None

    @cached_property
    def probabilities(self) -> torch.Tensor:
        """``[R, kv_heads, a, n]`` float32, attention averaged over the query heads of each group."""
        return self.attention.mean(dim=2)

    def below(self, averages: torch.Tensor) -> torch.Tensor:
        """Return ``[R, kv_heads, a, n]`` bool: visible slots that got less than ``averages`` ``[R or 1, 1, a, 1]``."""
        low = self.probabilities < averages
        return low if self.span.visible is None else low & self.span.visible

    def averages(self, before: tuple[int, ...]) -> torch.Tensor:
        """Return ``[R, 1, a, 1]`` float32: one over ``before + 1`` for each row's first query, and so on upwards."""
        return _averages(before, self.attention.shape[3], self.attention.device)


@lru_cache(maxsize=16)  # The layers of a pass share them.
def _averages(before: tuple[int, ...], queries: int, device: torch.device) -> torch.Tensor:
    old = torch.tensor(before, dtype=torch.float32, device=device).view(-1, 1, 1, 1)
    new = torch.arange(1, queries + 1, dtype=torch.float32, device=device).view(1, 1, -1, 1)
    return 1.0 / (old + new)


@dataclass(frozen=True)
class Resident:
    """What a row holds in one layer when its evidence is taken.

    Args:
        keys: ``[kv_heads, n, head_dim]``, after position embedding.
        values: ``[kv_heads, n, head_dim]``.
        positions: ``[kv_heads, n]`` int32, ascending within a head.
        step: Tokens that the row has seen.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    step: int


class Signal(ABC):
    """One kind of evidence. Its state is a tensor ``[rows, kv_heads, slots, ...]`` that is compacted with the slots.

    The state of a free slot is zero: it is zeroed when the slot is freed. What needs the keys or values of all slots is
    worked out when a snapshot is taken, and takes no state: see :meth:`value`.
    """

    name: ClassVar[str]

    @classmethod
    def build(cls, parameters: EvictionParameters, group: int) -> Self:
        """Return the signal for a policy's numbers and ``group`` query heads to a KV head, if it depends on them."""
        del parameters, group
        return cls()

    @abstractmethod
    def allocate(self, rows: int, kv_heads: int, slots: int, device: torch.device) -> torch.Tensor:
        """Return a zeroed state."""

    @abstractmethod
    def observe(self, state: torch.Tensor, seen: Observation) -> None:
        """Add what new queries saw to ``state`` ``[R, kv_heads, n, ...]``, in place."""

    def value(self, state: torch.Tensor, resident: Resident) -> torch.Tensor:
        """Return the signal ``[kv_heads, n]`` of one row's state ``[kv_heads, n, ...]`` and of what the row holds.

        It is the state as it is, unless an author overrides this.
        """
        del resident
        return state

    @property
    def is_its_state(self) -> bool:
        """Whether :meth:`value` is the state as it is."""
        return type(self).value is Signal.value

    def recalled(self, state: torch.Tensor, resident: Resident, positions: torch.Tensor) -> torch.Tensor:
        """Return the state ``[d, ...]`` that slots start with which are recalled into one head.

        What they deserve, the next queries will tell. Until then they count as much as the head's slots on average:
        less would drop them before anybody could have asked for them.

        Args:
            state: ``[n, ...]``, of the slots that the head holds.
            resident: What they are, of one head: without the dimension of heads.
            positions: ``[d]`` of the recalled slots.
        """
        del resident
        mean = state.float().mean(dim=0, keepdim=True)
        if not state.is_floating_point():
            mean = mean.round()
        return mean.to(state.dtype).expand(len(positions), *state.shape[1:])
