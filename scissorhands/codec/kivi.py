"""Keys quantized by channel over blocks of tokens, as in KIVI (Liu et al., ICML 2024, arXiv 2402.02750, section 3)."""

import torch

from scissorhands.codec.base import VectorCodec, require_finite
from scissorhands.codec.grouped import dequantize, quantize
from scissorhands.codec.packing import packed_bytes, packing_of
from scissorhands.formats import BLOCK, RANGE_BYTES


class ByChannel(VectorCodec):
    """Cuts vectors into blocks of 32, in order; each channel of a block is stored as minimum, step and levels.

    A channel of keys that is large for all tokens then has a range of its own. A block is laid out as the minima of its
    channels (float16), their steps (float16), then the packed levels of one vector after the other
    (:mod:`scissorhands.codec.packing`); the last block may be shorter. A whole block takes a bit an element on top of
    the levels. An element is off by at most half a step, ``(max - min) / 2 / (2 ** bits - 1)`` of its channel in the
    block, plus the rounding of minimum and step to float16: 2^-11 of each (at least 3e-8), the step's up to
    ``2 ** bits - 1`` times over. Magnitudes above 65,504 saturate.

    No vector can be taken out of its block, so slots cannot be resident like this.

    Args:
        bits: Bits of an element, 2 or 4.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def block_bytes(self, count: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the levels' bytes and those of all blocks' ranges."""
        del dtype
        return count * packed_bytes(head_dim, self.bits) + -(-count // BLOCK) * RANGE_BYTES * head_dim

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """Encode block after block."""
        require_finite(vectors)
        count, head_dim = vectors.shape[-2:]
        whole = count - count % BLOCK
        blocks = vectors[..., :whole, :].reshape(*vectors.shape[:-2], whole // BLOCK, BLOCK, head_dim)
        encoded = [self._encode(blocks).flatten(-2)]
        if whole < count:
            encoded.append(self._encode(vectors[..., whole:, :]))
        return torch.cat(encoded, dim=-1)

    def decode(self, data: torch.Tensor, count: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode block after block."""
        whole = count - count % BLOCK
        end = self.block_bytes(whole, head_dim, dtype)
        blocks = data[..., :end].reshape(*data.shape[:-1], whole // BLOCK, self.block_bytes(BLOCK, head_dim, dtype))
        decoded = [self._decode(blocks, BLOCK, head_dim, dtype).flatten(-3, -2)]
        if whole < count:
            decoded.append(self._decode(data[..., end:], count - whole, head_dim, dtype))
        return torch.cat(decoded, dim=-2)

    def _encode(self, block: torch.Tensor) -> torch.Tensor:
        """Encode ``[..., n, head_dim]`` as one block of n vectors."""
        low, step, levels = quantize(block.transpose(-1, -2), self.bits)
        rows = packing_of(block.shape[-1], self.bits).pack(levels.mT)
        return torch.cat([low, step, rows.flatten(-2)], dim=-1)

    def _decode(self, data: torch.Tensor, count: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        start = RANGE_BYTES * head_dim
        rows = data[..., start:].reshape(*data.shape[:-1], count, packed_bytes(head_dim, self.bits))
        levels = packing_of(head_dim, self.bits).unpack_rows(rows)
        return dequantize(data[..., :start], levels.mT, dtype).mT.to(dtype)
