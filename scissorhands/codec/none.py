"""No compression: the numbers as they are."""

import torch

from scissorhands.codec.base import RowCodec, Unpacked


class Exact(RowCodec):
    """Stores every number in its own type, little-endian. Exact."""

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return ``head_dim`` numbers' bytes."""
        return head_dim * dtype.itemsize

    def encode_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Reinterpret the numbers as bytes."""
        return vectors.contiguous().view(torch.uint8)

    def unpack(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> Unpacked:
        """Reinterpret the bytes as numbers."""
        del head_dim
        # contiguous() would not copy a single row, whose start may be odd.
        return Unpacked(data.clone(memory_format=torch.contiguous_format).view(dtype), None)
