"""The base of all codecs: how keys and values become bytes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from scissorhands.errors import InvalidRequestError
from scissorhands.formats import Format

# Numbers that a CPU encodes or decodes at once: what comes in between then stays in its second-level cache.
_TILE = 2**17


class VectorCodec(ABC):
    """Encodes blocks of vectors of ``head_dim`` elements: all keys, or all values."""

    def of_head(self, head: int) -> "VectorCodec":
        """Return what encodes the vectors of one of its KV heads alone, ``[..., n, head_dim]``."""
        del head
        return self

    @abstractmethod
    def block_bytes(self, count: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of ``count`` encoded vectors."""

    @abstractmethod
    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """Encode ``[..., n, head_dim]`` into ``[..., block_bytes]`` uint8.

        Raises:
            InvalidRequestError: A number is not finite.
        """

    def encode_each(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Encode several blocks, the number of whose vectors may differ. Raises as :meth:`encode` does."""
        return [self.encode(block) for block in blocks]

    @abstractmethod
    def decode(self, data: torch.Tensor, count: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode ``[..., block_bytes]`` uint8 into ``[..., count, head_dim]`` of ``dtype``; no number is infinite."""


class Unpacked(NamedTuple):
    """Vectors in the codec's own basis.

    Args:
        numbers: ``[..., n, head_dim]`` float.
        scale: ``[..., n]`` float, which the numbers of a vector are to be multiplied by; None for 1.
    """

    numbers: torch.Tensor
    scale: torch.Tensor | None


class Layout(NamedTuple):
    """Packed vectors as a kernel can read them: all elements have the same bits, in planes of one width.

    Args:
        bits: Bits of an element, 1, 2, 4 or 8; 0 where they are as they are.
        group: Elements with a float16 minimum and step in common, which come first; 0 where one bfloat16 scale does.
        bend: With a scale, the number of a doubled level t is ``t + bend * t ** 3``.
    """

    bits: int
    group: int
    bend: float


EXACT_LAYOUT = Layout(0, 0, 0.0)


class RowCodec(VectorCodec):
    """Encodes every vector on its own, so that slots can be kept, moved and evicted packed.

    Attention needs no vector in the model's basis: a query is brought into the codec's (:meth:`project`), and what
    comes out of values is brought back once (:meth:`restore`).
    """

    @abstractmethod
    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of one encoded vector."""

    @abstractmethod
    def encode_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Encode ``[..., head_dim]`` into ``[..., row_bytes]`` uint8; numbers that are not finite do no harm."""

    @abstractmethod
    def unpack(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> Unpacked:
        """Unpack ``[..., row_bytes]`` uint8 into numbers of the codec's basis."""

    def layout(self, head_dim: int) -> Layout | None:
        """Return how vectors are packed, if it is in the one way that kernels read; None otherwise."""
        del head_dim
        return None

    def project(self, queries: torch.Tensor) -> torch.Tensor:
        """Bring ``[..., kv_heads, n, head_dim]`` queries to where their products with unpacked keys are the scores."""
        return queries

    def restore(self, vectors: torch.Tensor) -> torch.Tensor:
        """Bring ``[..., kv_heads, n, head_dim]`` sums of unpacked vectors back to the model's basis."""
        return vectors

    def block_bytes(self, count: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the rows' bytes."""
        return count * self.row_bytes(head_dim, dtype)

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """Encode row after row."""
        require_finite(vectors)
        tiles = [self.encode_rows(vectors[..., place, :]) for place in tiles_of(vectors, vectors.shape[-1], _TILE)]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-2)).flatten(-2)

    def encode_each(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Encode blocks of as many vectors as one, unless each head has its own way: small ones take long to begin."""
        if self.of_head(0) is not self:
            return super().encode_each(blocks)
        alike: dict[torch.Size, list[int]] = {}
        for index, block in enumerate(blocks):
            alike.setdefault(block.shape[1:], []).append(index)
        found: dict[int, torch.Tensor] = {}
        for indices in alike.values():
            own = [blocks[index] for index in indices]
            encoded = torch.split(self.encode(torch.cat(own)), [len(block) for block in own])
            found.update(zip(indices, encoded, strict=True))
        return [found[index] for index in range(len(blocks))]

    def decode(self, data: torch.Tensor, count: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode row after row."""
        rows = data.reshape(*data.shape[:-1], count, self.row_bytes(head_dim, dtype))
        tiles = [self.decode_rows(rows[..., place, :], head_dim, dtype) for place in tiles_of(rows, head_dim, _TILE)]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-2)

    def decode_rows(self, rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode ``[..., n, row_bytes]`` uint8 into ``[..., n, head_dim]`` of ``dtype``."""
        numbers, scale = self.unpack(rows, head_dim, dtype)
        vectors = self.restore(numbers if scale is None else numbers * scale.unsqueeze(-1))
        limit = torch.finfo(dtype).max
        return vectors if vectors.dtype == dtype else vectors.clamp(-limit, limit).to(dtype)


@dataclass(frozen=True)
class Codec:
    """How keys and values are encoded.

    Args:
        format: What its name says.
        version: Version of the bytes; another version is another codec.
        keys: How keys are.
        values: How values are.
    """

    format: Format
    version: str
    keys: VectorCodec
    values: VectorCodec

    @property
    def name(self) -> str:
        """Its full name."""
        return self.format.name

    def of_head(self, head: int) -> "Codec":
        """Return the codec of one of its KV heads; codecs that need no statistics are the same for all."""
        return replace(self, keys=self.keys.of_head(head), values=self.values.of_head(head))


def require_finite(vectors: torch.Tensor) -> None:
    """Refuse NaN and infinity, which no scale can express.

    Raises:
        InvalidRequestError: A number is not finite.
    """
    # One pass: no sum that meets one of them is finite. A sum of large numbers may leave float32, and is looked into.
    if not math.isfinite(vectors.sum(dtype=torch.float32)) and not bool(torch.isfinite(vectors).all()):
        raise InvalidRequestError("vectors", "must be finite: keys or values contain NaN or infinity")


def tiles_of(vectors: torch.Tensor, head_dim: int, numbers: int) -> Iterator[slice]:
    """Yield which of the vectors of ``[..., n, :]`` to work on at once: all of them on a device with a launch cost.

    Args:
        vectors: The vectors, encoded or not.
        head_dim: Elements of one.
        numbers: Elements of a tile, about.
    """
    count = vectors.shape[-2]
    others = vectors.shape[:-2].numel() * head_dim
    size = max(1, numbers // max(1, others)) if vectors.device.type == "cpu" else max(1, count)
    for start in range(0, max(1, count), size):
        yield slice(start, start + size)
