"""No compression: the numbers as they are."""

import torch

from scissorhands.codec.base import Codec, require_finite


class NoCodec(Codec):
    """Stores every number in its own type, little-endian. Exact."""

    name = "none"
    version = 1

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return ``head_dim`` numbers' bytes."""
        return head_dim * dtype.itemsize

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """Reinterpret the numbers as bytes."""
        require_finite(vectors)
        return vectors.contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Reinterpret the bytes as numbers."""
        del head_dim
        return data.contiguous().view(dtype)
