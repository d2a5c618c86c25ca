"""Vectors in another basis, their elements in few levels of one scale a vector."""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch

from scissorhands.codec.base import RowCodec, Unpacked
from scissorhands.codec.packing import pack, packed_bytes, unpack
from scissorhands.formats import SCALE_BYTES

# What the scale of a vector is tried at, over the root of its mean square: elements of a short vector are not normal.
_TRIALS = (0.8, 0.9, 1.0, 1.1, 1.22, 1.36, 1.55)
_SMALLEST = torch.finfo(torch.bfloat16).tiny
# Above it squares could leave float32.
_LARGEST = 1e12
# Dimensions of a tensor that differs by head.
_BY_HEAD = 3


class Group(NamedTuple):
    """Adjacent elements of the codec's basis that have equally many bits."""

    size: int
    bits: int


class Curve(NamedTuple):
    """What levels stand for: level l of b bits for ``step * u * (1 + bend * u ** 2)``, u being ``l - (2^b - 1) / 2``.

    Args:
        step: The distance of the levels in the middle.
        bend: How much wider it is further out; 0 for even steps.
        error: Mean squared error for a normal variable of variance 1.
    """

    step: float
    bend: float
    error: float


# The even steps with the least error for a normal variable (Max 1960, table II), by bits.
EVEN = {4: Curve(0.3352, 0.0, 0.01154)}
# The same among cubics. Above the error of the Lloyd-Max codebook by 0.0 % (2 bits), 0.2 % (3), 2 % (4), 9 % (6); but a
# cubic is worked out for all elements at once, where a codebook costs a lookup for each.
CUBIC = {
    1: Curve(1.595769, 0.0, 0.36338),
    2: Curve(0.892894, 0.0567720, 0.11748),
    3: Curve(0.471431, 0.0245764, 0.03462),
    4: Curve(0.240517, 0.00872082, 0.00969),
    5: Curve(0.121827, 0.00276424, 0.00265),
    6: Curve(0.0617121, 0.000824067, 0.00072),
    7: Curve(0.0312793, 0.000236787, 0.00019),
    8: Curve(0.0158626, 0.0000663157, 0.00005),
}


class Scaled(RowCodec):
    """Stores a vector as one scale (bfloat16) and the packed levels of its elements in another basis.

    The scale is the one of eight with the least squared error, one of them the smallest that clips nothing. So the
    squared error in the codec's basis is at most that of the last, where no element is off by more than half of the
    widest distance of two levels; the scale's rounding adds 2^-8 of the element. Magnitudes above 1e12 saturate, and
    below 1e-18 an element may be lost.

    Args:
        groups: The groups of elements, in order. Elements of the basis beyond them are not stored.
        analysis: ``[head_dim, head_dim]``, or ``[kv_heads, head_dim, head_dim]``: what brings a vector into the basis,
            where its elements are expected to be about equally large.
        synthesis: Its inverse.
        curves: What levels stand for, by bits.
        weights: ``[kv_heads, head_dim]``, how much the squared error of each element counts; None for all alike.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        analysis: torch.Tensor,
        synthesis: torch.Tensor,
        curves: dict[int, Curve],
        weights: torch.Tensor | None = None,
    ) -> None:
        self.groups = tuple(groups)
        bits = [group.bits for group in groups for _ in range(group.size)]
        stored = len(bits)
        steps = torch.tensor([curves[own].step for own in bits], dtype=torch.float64)
        centers = torch.tensor([(2**own - 1) / 2 for own in bits])
        bends = torch.tensor([curves[own].bend for own in bits])
        own = torch.ones(stored) if weights is None else weights[..., None, :stored]
        # Products with them must stay within float32; what they are relative to makes no difference.
        own = own / own.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(own.dtype).tiny)
        self._even = not bends.any()
        # In units of steps, so that unpacking has less to multiply.
        self._tensors: tuple[torch.Tensor, ...] = (
            (analysis[..., :stored, :].double() / steps.unsqueeze(-1)).float(),
            (synthesis[..., :stored].double() * steps).float(),
            centers,
            bends,
            steps.float(),
            (own.double() * steps.square()).float(),
        )
        self._bounds = [_bounds(group.bits, curves[group.bits]) for group in groups]
        self._at: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def of_head(self, head: int) -> "Scaled":
        """Return what encodes one KV head."""
        found = copy(self)
        found._tensors = tuple(tensor[head] if tensor.dim() == _BY_HEAD else tensor for tensor in self._tensors)  # noqa: SLF001 - its own
        found._at = {}  # noqa: SLF001 - the same
        return found

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return the levels' bytes and those of the scale."""
        del head_dim, dtype
        return SCALE_BYTES + sum(packed_bytes(size, bits) for size, bits in self.groups)

    def encode_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Bring ``[..., kv_heads, n, head_dim]`` into the basis and quantize with the best scale."""
        analysis, _, centers, bends, steps, weights = self._on(vectors.device)
        elements = torch.matmul(vectors.float().clamp(-_LARGEST, _LARGEST), analysis.transpose(-1, -2)).unsqueeze(-2)
        mean = (elements * steps).square().mean(dim=-1).sqrt()
        widest = (elements.abs() / _bent(centers, bends)).amax(dim=-1)
        trials = torch.cat([mean * trial for trial in _TRIALS] + [widest], dim=-1).clamp_min(_SMALLEST)
        trials = trials.bfloat16().float().unsqueeze(-1)
        levels = self._levels(elements / trials)
        errors = (_bent(levels - centers, bends) * trials - elements).square_()
        best = torch.matmul(errors, weights.unsqueeze(-1)).argmin(dim=-2, keepdim=True)
        chosen = levels.gather(-2, best.expand(*best.shape[:-1], levels.shape[-1])).squeeze(-2).to(torch.uint8)
        scale = trials.gather(-2, best).squeeze(-2).bfloat16().view(torch.uint8)
        packed = [pack(part, group.bits) for part, group in zip(self._split(chosen), self.groups, strict=True)]
        return torch.cat([scale, *packed], dim=-1)

    def unpack(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> Unpacked:
        """Return the levels' numbers, without those elements that are not stored."""
        del head_dim, dtype
        # contiguous() would not copy a single row, whose start may be odd.
        scale = data[..., :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        parts, start = [], SCALE_BYTES
        for size, bits in self.groups:
            end = start + packed_bytes(size, bits)
            parts.append(unpack(data[..., start:end], bits))
            start = end
        levels = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        _, _, centers, bends, *_ = self._on(data.device)
        centered = levels.float().sub_(centers)
        return Unpacked(centered if self._even else _bent(centered, bends), scale.squeeze(-1).float())

    def project(self, queries: torch.Tensor) -> torch.Tensor:
        """Multiply by the transposed synthesis."""
        return torch.matmul(queries.float(), self._on(queries.device)[1])

    def restore(self, vectors: torch.Tensor) -> torch.Tensor:
        """Multiply by the synthesis."""
        return torch.matmul(vectors, self._on(vectors.device)[1].transpose(-1, -2))

    def _levels(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the nearest levels of elements in units of steps, as floats."""
        found = [
            torch.bucketize(part.contiguous(), bounds.to(part.device))
            for part, bounds in zip(self._split(elements), self._bounds, strict=True)
        ]
        return torch.cat(found, dim=-1).float()

    def _split(self, elements: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(elements, [group.size for group in self.groups], dim=-1))

    def _on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return analysis, synthesis, centers, bends, steps and weights on a device."""
        if device not in self._at:
            self._at[device] = tuple(tensor.to(device) for tensor in self._tensors)
        return self._at[device]


def _bent(centered: torch.Tensor, bends: torch.Tensor) -> torch.Tensor:
    """Return what centered levels stand for, in units of steps."""
    factors = centered.square().mul_(bends).add_(1.0)
    return factors.mul_(centered)


def _bounds(bits: int, curve: Curve) -> torch.Tensor:
    """Return what lies halfway between adjacent levels, in units of steps."""
    numbers = _bent(torch.arange(2**bits) - (2**bits - 1) / 2, torch.tensor(curve.bend))
    return (numbers[1:] + numbers[:-1]) / 2
