"""KV heads that are encoded apart, each in its own way."""

from collections.abc import Iterable, Sequence

import torch

from scissorhands.codec.base import RowCodec, Unpacked


class ByHead(RowCodec):
    """Encodes each KV head with a codec of its own; all take equally many bytes, and the bound is that of each.

    Args:
        heads: The codecs, by KV head. Vectors have the heads in the dimension before the last two.
    """

    def __init__(self, heads: Sequence[RowCodec]) -> None:
        self.heads = tuple(heads)

    def of_head(self, head: int) -> RowCodec:
        """Return the codec of one KV head."""
        return self.heads[head]

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row, the same for all heads."""
        return self.heads[0].row_bytes(head_dim, dtype)

    def encode_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Encode head by head."""
        return self._stacked([codec.encode_rows(own) for codec, own in self._each(vectors)])

    def unpack(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> Unpacked:
        """Unpack head by head."""
        parts = [codec.unpack(own, head_dim, dtype) for codec, own in self._each(data)]
        scales = [part.scale for part in parts if part.scale is not None]
        # Transposed as they come, so that they are copied in runs.
        numbers = self._stacked([part.numbers.mT for part in parts])
        return Unpacked(numbers.mT, torch.stack(scales, dim=-2) if scales else None)

    def project(self, queries: torch.Tensor) -> torch.Tensor:
        """Project each head's queries."""
        return self._stacked([codec.project(own) for codec, own in self._each(queries)])

    def restore(self, vectors: torch.Tensor) -> torch.Tensor:
        """Restore each head's sums."""
        return self._stacked([codec.restore(own) for codec, own in self._each(vectors)])

    def _each(self, tensor: torch.Tensor) -> Iterable[tuple[RowCodec, torch.Tensor]]:
        return zip(self.heads, tensor.unbind(-3), strict=True)

    @staticmethod
    def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts), dim=-3)
