"""What new queries attend to: the slots of adjacent rows, exact or packed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from scissorhands.codec.base import RowCodec, Unpacked

# Numbers that are unpacked at once: two megabytes of float32. Smaller tiles cost more calls than their reach saves.
TILE = 2**19


@dataclass(frozen=True)
class Attended:
    """Exact slots.

    Args:
        keys: ``[R, H, n, D]``.
        values: ``[R, H, n, D]``.
        visible: ``[R, 1, a, n]`` bool, which of them each query sees; None when each sees all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None

    @property
    def extent(self) -> int:
        """Number n of slots."""
        return self.keys.shape[2]

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the products of ``[R, H, q, D]`` queries with the keys: ``[R, H, q, n]`` float32."""
        return torch.matmul(queries, self.keys.transpose(-1, -2)).float()

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the sums of the values by ``[R, H, q, n]`` weights: ``[R, H, q, D]``."""
        return torch.matmul(weights.to(self.values.dtype), self.values)


@dataclass(frozen=True)
class PackedAttended:
    """Packed slots. They are multiplied in their codec's basis, and no more than a tile of them is unpacked at once.

    Args:
        keys: ``[R, H, n, key bytes]`` uint8.
        values: ``[R, H, n, value bytes]`` uint8.
        visible: As in :class:`Attended`.
        key_codec: What unpacks keys, and
        value_codec: values.
        head_dim: D, elements of a key.
        dtype: Number type of the model's keys and values.
    """

    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None
    key_codec: RowCodec
    value_codec: RowCodec
    head_dim: int
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """Number n of slots."""
        return self.keys.shape[2]

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the products of ``[R, H, q, D]`` queries with the keys: ``[R, H, q, n]`` float32."""
        projected = self.key_codec.project(queries).float()
        scores = projected.new_empty(*queries.shape[:3], self.extent)
        for place, (numbers, scale) in self._tiles(self.keys, self.key_codec):
            torch.matmul(projected, numbers.transpose(-1, -2), out=scores[..., place])
            if scale is not None:
                scores[..., place] *= scale.unsqueeze(-2)
        return scores

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the sums of the values by ``[R, H, q, n]`` weights: ``[R, H, q, D]``."""
        total: torch.Tensor | None = None
        for place, (numbers, scale) in self._tiles(self.values, self.value_codec):
            own = weights[..., place]
            part = torch.matmul(own if scale is None else own * scale.unsqueeze(-2), numbers)
            total = part if total is None else total.add_(part)
        assert total is not None
        return self.value_codec.restore(total).to(self.dtype)

    def _tiles(self, data: torch.Tensor, codec: RowCodec) -> Iterator[tuple[slice, Unpacked]]:
        rows, heads, extent, _ = data.shape
        # Tiles of about equal size: each costs some calls, however small it is.
        count = -(-rows * heads * extent * self.head_dim // TILE)
        for index in range(count):
            place = slice(extent * index // count, extent * (index + 1) // count)
            numbers, scale = codec.unpack(data[:, :, place], self.head_dim, self.dtype)
            yield place, Unpacked(numbers.float(), scale)
