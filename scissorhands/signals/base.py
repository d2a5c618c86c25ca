"""The base of all signals: what is learned about a slot, on the device."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

import torch

from scissorhands.budget import EvictionParameters


class Observation(NamedTuple):
    """What ``a`` new queries of ``R`` rows saw in one layer.

    Args:
        probabilities: ``[R, kv_heads, a, n]`` float32, attention averaged over the query heads of each group; 0 where
            a query does not see a slot.
        visible: ``[R, 1, a, n]`` bool, which slots each query sees; None when every query sees all.
        lengths: Of each row, slots in use that its first new query saw, itself included.
        steps: Of each row, position of its first new query.
        scores: ``[R, kv_heads, group, a, n]`` float32, scaled products of queries and keys, of every query head; -inf
            where a query does not see a slot.
        positions: ``[R, kv_heads, >= n]`` int32, of the token in each slot; beyond a row's slots in use they mean
            nothing.
        kinds: ``[R, a]`` uint8, :class:`~scissorhands.snapshot.TokenKind` of each new token; None if nobody tells.
    """

    probabilities: torch.Tensor
    visible: torch.Tensor | None
    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    scores: torch.Tensor
    positions: torch.Tensor
    kinds: torch.Tensor | None = None

    def below(self, averages: torch.Tensor) -> torch.Tensor:
        """Return ``[R, kv_heads, a, n]`` bool: visible slots that got less than ``averages`` ``[R or 1, 1, a, 1]``."""
        low = self.probabilities < averages
        return low if self.visible is None else low & self.visible

    def averages(self, firsts: tuple[int, ...]) -> torch.Tensor:
        """Return ``[R, 1, a, 1]`` float32: one over ``firsts`` for each row's first query, and so on upwards."""
        return _averages(firsts, self.probabilities.shape[2], self.probabilities.device)


@lru_cache(maxsize=16)  # The layers of a pass share them.
def _averages(firsts: tuple[int, ...], queries: int, device: torch.device) -> torch.Tensor:
    first = torch.tensor(firsts, dtype=torch.float32, device=device).view(-1, 1, 1, 1)
    later = torch.arange(queries, dtype=torch.float32, device=device).view(1, 1, -1, 1)
    return 1.0 / (first + later)


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
        """Add what new queries saw to ``state`` ``[R, kv_heads, >= n, ...]``, in place."""

    @abstractmethod
    def value(self, state: torch.Tensor, resident: Resident) -> torch.Tensor:
        """Return the signal ``[kv_heads, n]`` of one row's state ``[kv_heads, n, ...]`` and of what the row holds."""
