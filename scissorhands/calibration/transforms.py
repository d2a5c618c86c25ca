"""Measuring what the codecs ``klt`` and ``block-gtq`` are fitted to: second moments of keys, values and queries.

Errors in keys count by the second moments of the queries that they meet. Errors in values count alike in all
directions: weighing them by the gradients of the model's predictions made nothing better (``docs/compression.md``).
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from scissorhands.budget import ModelShape
from scissorhands.calibration.fisher import Recording
from scissorhands.policies.base import SINKS

# What is added to second moments, relative to their mean: directions that the texts never took are not worth nothing.
_FLOOR_OF_VECTORS = 1e-6
_FLOOR_OF_QUERIES = 1e-4


@dataclass(frozen=True)
class Moments:
    """Sums over sequences. D is head_dim; heads are those of all global layers, layer by layer.

    Args:
        keys: ``[heads, D, D]`` float64, second moments of keys of unit norm.
        values: ``[heads, D, D]``, of values of unit norm.
        queries: ``[heads, D, D]``, of queries.
        energy: ``[heads, D / 2]``, mean square of queries times that of keys, of the pair of elements that rotary
            positions turn together: as in Llama, ``b`` and ``b + D / 2``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    energy: torch.Tensor

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.keys + other.keys,
            self.values + other.values,
            self.queries + other.queries,
            self.energy + other.energy,
        )

    def tensors(self, *, rotary: bool) -> dict[str, torch.Tensor]:
        """Return the tensors of :class:`scissorhands.codec.Statistics`.

        Args:
            rotary: Whether the model turns pairs of elements by position.
        """
        alike = torch.eye(self.values.shape[-1], dtype=self.values.dtype).expand_as(self.values)
        found = {**_transform("keys", self.keys, self.queries), **_transform("values", self.values, alike)}
        if rotary:
            found["rotary.energy"] = self.energy.float()
        return found


def moments(recording: Recording, shape: ModelShape) -> Moments:
    """Return the sums of one sequence."""
    # The sinks' directions are their own, and a codec scales each vector.
    keys, values = (
        functional.normalize(part[:, :, SINKS:].float(), dim=-1) for part in (recording.keys, recording.values)
    )
    layers, _, total, head_dim = recording.queries.shape
    queries = recording.queries.float().reshape(layers, shape.kv_heads, shape.group * total, head_dim)
    squares = [part.double().square().mean(dim=2) for part in (queries, recording.keys[:, :, SINKS:])]
    energies = [torch.stack(square.chunk(2, dim=-1)).sum(dim=0) for square in squares]
    products = [torch.matmul(part.transpose(-1, -2), part).double().flatten(0, 1) for part in (keys, values, queries)]
    return Moments(products[0], products[1], products[2], (energies[0] * energies[1]).flatten(0, 1))


def _transform(side: str, vectors: torch.Tensor, metric: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return analysis and spectrum; see :func:`scissorhands.codec.klt.klt`."""
    squares, axes = torch.linalg.eigh(_lifted(metric, _FLOOR_OF_QUERIES))
    root = (axes * squares.sqrt().unsqueeze(-2)) @ axes.mT
    spectrum, directions = torch.linalg.eigh(root @ _lifted(vectors, _FLOOR_OF_VECTORS) @ root)
    spectrum, directions = spectrum.flip(-1), directions.flip(-1)
    return {
        # At a mean of 1, far within float16; the codec inverts what is stored, so its rounding loses next to nothing.
        f"{side}.analysis": (directions.transpose(-1, -2) @ root).half().contiguous(),
        f"{side}.spectrum": spectrum.clamp_min(torch.finfo(torch.float32).tiny).float().contiguous(),
    }


def _lifted(matrix: torch.Tensor, floor: float) -> torch.Tensor:
    """Return second moments at a mean of 1, with a floor under their eigenvalues."""
    size = matrix.shape[-1]
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return matrix / mean[:, None, None] + floor * torch.eye(size, dtype=matrix.dtype)
