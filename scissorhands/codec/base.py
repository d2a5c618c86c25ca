"""The base of all codecs: how keys and values become bytes."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from scissorhands.errors import InvalidRequestError


class Codec(ABC):
    """Encodes vectors of ``head_dim`` elements, each on its own, so that rows can be read and evicted apart.

    A subclass states its name, its format's version and its error bound.
    """

    name: ClassVar[str]
    version: ClassVar[int]

    @abstractmethod
    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of one encoded vector.

        Raises:
            InvalidRequestError: The codec cannot encode vectors of this size.
        """

    @abstractmethod
    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """Encode ``[..., head_dim]`` into ``[..., row_bytes]`` uint8.

        Raises:
            InvalidRequestError: A number is not finite.
        """

    @abstractmethod
    def decode(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode ``[..., row_bytes]`` uint8 into ``[..., head_dim]`` of ``dtype``."""


def require_finite(vectors: torch.Tensor) -> None:
    """Refuse NaN and infinity, which no scale can express.

    Raises:
        InvalidRequestError: A number is not finite.
    """
    if not bool(torch.isfinite(vectors).all()):
        raise InvalidRequestError("vectors", "must be finite: keys or values contain NaN or infinity")
