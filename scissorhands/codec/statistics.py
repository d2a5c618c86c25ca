"""What was measured of a model's keys and values, for codecs that are fitted to it; a file of safetensors."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from scissorhands.codec.block_gtq import block_gtq
from scissorhands.codec.by_head import ByHead
from scissorhands.codec.klt import klt
from scissorhands.codec.scaled import Scaled
from scissorhands.errors import InvalidRequestError
from scissorhands.formats import STATISTICS_FILE

_SIDES = ("keys", "values")
_PARTS = ("analysis", "spectrum")
_ENERGY = "rotary.energy"
_DIGITS = 16
_ATTRIBUTE = "_scissorhands_statistics"


class Statistics:
    """A model's transforms of keys and values; see :mod:`scissorhands.codec.klt`.

    Args:
        tensors: ``{side}.analysis``, float16 ``[heads, head_dim, head_dim]``, and ``{side}.spectrum``, float32
            ``[heads, head_dim]``, for the sides ``keys`` and ``values``; heads are the KV heads of all global layers,
            layer by layer. Of a model with rotary positions also ``rotary.energy``, float32 ``[heads, head_dim / 2]``;
            see :mod:`scissorhands.codec.block_gtq`.
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
        shapes = {
            f"{side}.{part}": (self.heads, self.head_dim, *([] if part == "spectrum" else [self.head_dim]))
            for side in _SIDES
            for part in _PARTS
        }
        if _ENERGY in tensors:
            shapes[_ENERGY] = (self.heads, self.head_dim // 2)
        for name, wanted in shapes.items():
            tensor = tensors.get(name)
            dtype = torch.float16 if name.endswith(".analysis") else torch.float32
            if tensor is None or tensor.shape != wanted or tensor.dtype != dtype:
                raise InvalidRequestError("statistics", f"{name} must be {dtype} {wanted}: make it anew")
            if not bool(torch.isfinite(tensor).all()):
                raise InvalidRequestError("statistics", f"{name} contains NaN or infinity: make it anew")
        self._tensors = {name: tensors[name] for name in sorted(shapes)}
        digest = hashlib.sha256()
        for name, tensor in self._tensors.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        self.digest = digest.hexdigest()[:_DIGITS]
        self._made = lru_cache(maxsize=None)(self._make)
        self._made_rotary = lru_cache(maxsize=None)(self._make_rotary)

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

    def rotary_codec(self, bits: float, heads: slice | None = None) -> ByHead:
        """Return what encodes the keys of some heads by the energy of their rotary pairs, all by default.

        Raises:
            InvalidRequestError: The model has no rotary positions, or they have not been measured.
        """
        if _ENERGY not in self._tensors:
            raise InvalidRequestError(
                "codec",
                "block-gtq needs rotary positions, and the statistics say nothing of them: the model has none, or the "
                "statistics are older; take another codec, or run scissorhands calibrate again",
            )
        start, stop, _ = (heads or slice(None)).indices(self.heads)
        return self._made_rotary(bits, start, stop)

    def _make_rotary(self, bits: float, start: int, stop: int) -> ByHead:
        analysis, spectrum = (self._tensors[f"keys.{part}"][start:stop].double() for part in _PARTS)
        # The second moments of the keys, undoing the transform: the mean squares of their elements.
        second = torch.einsum("hij,hj->hi", torch.linalg.inv(analysis).square(), spectrum)
        energies = self._tensors[_ENERGY][start:stop]
        return ByHead([block_gtq(energy, own, bits) for energy, own in zip(energies, second, strict=True)])

    def _make(self, side: str, bits: float, start: int, stop: int) -> Scaled:
        analysis, spectrum = (self._tensors[f"{side}.{part}"][start:stop] for part in _PARTS)
        return klt(analysis, spectrum, bits)


def attach(model: torch.nn.Module, found: Statistics | None) -> None:
    """Keep a model's statistics with it, for the caches that are made for it."""
    setattr(model, _ATTRIBUTE, found)


def attached(model: torch.nn.Module) -> Statistics | None:
    """Return the statistics that were kept with a model."""
    found: Statistics | None = getattr(model, _ATTRIBUTE, None)
    return found


def find(model: Path) -> Statistics | None:
    """Return the statistics that lie beside a model, if there are any."""
    path = model / STATISTICS_FILE
    return Statistics.read(path) if path.is_file() else None
