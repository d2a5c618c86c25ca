"""What was measured of a model's keys and values, for codecs that are fitted to it; a file of safetensors."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from scissorhands.codec.klt import klt
from scissorhands.codec.scaled import Scaled
from scissorhands.errors import InvalidRequestError

FILE_NAME = "scissorhands-statistics.safetensors"
_SIDES = ("keys", "values")
_PARTS = ("analysis", "synthesis", "spectrum")
_DIGITS = 16
_ATTRIBUTE = "_scissorhands_statistics"


class Statistics:
    """A model's transforms of keys and values; see :mod:`scissorhands.codec.klt`.

    Args:
        tensors: ``{side}.analysis`` and ``{side}.synthesis`` ``[heads, head_dim, head_dim]`` and ``{side}.spectrum``
            ``[heads, head_dim]``, float32, for the sides ``keys`` and ``values``; heads are the KV heads of all global
            layers, layer by layer.
        made_by: What made them: the model's weights and the command.

    Raises:
        InvalidRequestError: A tensor is missing or has another shape.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], made_by: dict[str, str]) -> None:
        self.made_by = made_by
        spectrum = tensors.get("keys.spectrum")
        if spectrum is None or spectrum.dim() != 2:  # noqa: PLR2004 - heads and elements
            raise InvalidRequestError("statistics", "has no keys.spectrum of two dimensions: make it anew")
        self.heads, self.head_dim = spectrum.shape
        for side in _SIDES:
            for part in _PARTS:
                wanted = (
                    (self.heads, self.head_dim) if part == "spectrum" else (self.heads, self.head_dim, self.head_dim)
                )
                tensor = tensors.get(f"{side}.{part}")
                if tensor is None or tensor.shape != wanted or tensor.dtype != torch.float32:
                    raise InvalidRequestError("statistics", f"{side}.{part} must be float32 {wanted}: make it anew")
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        digest = hashlib.sha256()
        for name, tensor in self._tensors.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        self.digest = digest.hexdigest()[:_DIGITS]
        self._made = lru_cache(maxsize=None)(self._make)

    @classmethod
    def read(cls, path: Path) -> "Statistics":
        """Read a file.

        Raises:
            InvalidRequestError: It cannot be read, or is not a file of statistics.
        """
        try:
            data = path.read_bytes()
            tensors = load(data)
        except (OSError, SafetensorError) as error:
            raise InvalidRequestError("statistics", f"cannot read {path}: {error}") from error
        size = int.from_bytes(data[:8], "little")
        made_by = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        return cls(tensors, made_by)

    def write(self, path: Path) -> None:
        """Write a file."""
        path.write_bytes(save(self._tensors, self.made_by))

    def check_size(self, heads: int, head_dim: int) -> None:
        """Make sure that a model has so many KV heads in its global layers.

        Raises:
            InvalidRequestError: It has not.
        """
        if (heads, head_dim) != (self.heads, self.head_dim):
            raise InvalidRequestError(
                "statistics",
                f"are of a model with {self.heads} KV heads of {self.head_dim}, this one has {heads} of {head_dim}",
            )

    def codec(self, side: str, bits: float, heads: slice | None = None) -> Scaled:
        """Return what encodes the keys or values of some heads, all by default."""
        start, stop, _ = (heads or slice(None)).indices(self.heads)
        return self._made(side, bits, start, stop)

    def _make(self, side: str, bits: float, start: int, stop: int) -> Scaled:
        analysis, synthesis, spectrum = (self._tensors[f"{side}.{part}"][start:stop] for part in _PARTS)
        return klt(analysis, synthesis, spectrum, bits)


def attach(model: torch.nn.Module, found: Statistics | None) -> None:
    """Keep a model's statistics with it, for the caches that are made for it."""
    setattr(model, _ATTRIBUTE, found)


def attached(model: torch.nn.Module) -> Statistics | None:
    """Return the statistics that were kept with a model."""
    found: Statistics | None = getattr(model, _ATTRIBUTE, None)
    return found


def find(model: Path) -> Statistics | None:
    """Return the statistics that lie beside a model, if there are any."""
    path = model / FILE_NAME
    return Statistics.read(path) if path.is_file() else None
