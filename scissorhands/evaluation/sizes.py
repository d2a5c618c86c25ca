"""What a row takes, and how much smaller that is than a full cache."""

from dataclasses import dataclass
from typing import Any

import torch

from scissorhands.budget import HALF_BYTES, Grant, ModelShape
from scissorhands.cache import ResidentCache

COMPRESSION_BASIS = (
    "a full cache of 16-bit keys and values, over all bytes of the row with its keys and values in 16 bits: "
    "positions and evidence as they are"
)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a row.

    Args:
        allocated: What it allocates: keys, values, positions and evidence.
        in_halves: What it would allocate with keys and values in 16 bits, and all else as it is.
    """

    allocated: int
    in_halves: int

    def fields(self, shape: ModelShape, length: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return what a row of results tells of them, for sequences of ``length`` tokens."""
        return {
            # The full cache would hold the last token too, if it were fed; a row that evicts is no smaller without it.
            "compression": shape.full_bytes(length, HALF_BYTES) / self.in_halves,
            "compression_basis": COMPRESSION_BASIS,
            "bytes_16_bit": self.in_halves,
            "bytes_per_sequence": self.allocated,
            "dtype": str(dtype).removeprefix("torch."),
        }


def governed_slots(granted: Grant, shape: ModelShape) -> int:
    """Return B, the slots of each global layer; those of the windows if all layers slide."""
    stored = granted.shape_of(shape)
    return max(granted.layer_slots[layer] for layer in stored.global_layers or range(stored.layers))


def sizes_of(cache: ResidentCache) -> Sizes:
    """Return the bytes of one of a cache's rows, which are all of one grant."""
    stored = [tensor for layer in cache.rows[0].pool.layers for tensor in (layer.keys, layer.values)]
    beyond = sum(max(0, tensor.element_size() - HALF_BYTES) * tensor.numel() for tensor in stored)
    rows = len(cache.rows)
    return Sizes(cache.allocated_bytes() // rows, (cache.allocated_bytes() - beyond) // rows)
