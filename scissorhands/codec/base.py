"""The base of all codecs: how keys and values become bytes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from scissorhands.errors import InvalidRequestError
from scissorhands.formats import Format


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
        return self.encode_rows(vectors).flatten(-2)

    def decode(self, data: torch.Tensor, count: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode row after row."""
        rows = data.reshape(*data.shape[:-1], count, self.row_bytes(head_dim, dtype))
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
    if not bool(torch.isfinite(vectors).all()):
        raise InvalidRequestError("vectors", "must be finite: keys or values contain NaN or infinity")
