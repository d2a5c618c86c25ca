"""Slots on their own: what was taken out of a row."""

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
