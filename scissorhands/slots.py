"""Slots on their own: what was taken out of a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slots:
    """Slots of one layer, taken out of a row.

    Args:
        keys: ``[kv_heads, d, head_dim]``, after position embedding.
        values: ``[kv_heads, d, head_dim]``.
        positions: ``[kv_heads, d]`` int32, ascending within a head.
        mass: ``[kv_heads, d]`` float32, attention received, in queries.
        packed: Whether keys and values are the bytes of the codec that they were resident in, ``[kv_heads, d, bytes]``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    mass: torch.Tensor
    packed: bool = False


@dataclass(frozen=True)
class LooseSlots:
    """Slots of one head that are to be put into a row.

    Args:
        positions: ``[d]`` int32.
        keys: ``[d, head_dim]`` as the row's pool holds them, or ``[d, bytes]`` packed.
        values: The same of values.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def at(self, chosen: torch.Tensor) -> "LooseSlots":
        """Return some of them."""
        return LooseSlots(self.positions[chosen], self.keys[chosen], self.values[chosen])

    @classmethod
    def join(cls, parts: "Sequence[LooseSlots]") -> "LooseSlots":
        """Return all of several parts."""
        return cls(
            torch.cat([part.positions for part in parts]),
            torch.cat([part.keys for part in parts]),
            torch.cat([part.values for part in parts]),
        )
