"""Vectors in another basis, their elements in few levels of one scale a vector."""

import math
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from scissorhands.codec.base import Layout, RowCodec, Unpacked, tiles_of
from scissorhands.codec.packing import Group, Packing
from scissorhands.formats import SCALE_BYTES

# What the scale of a vector is tried at, over the smallest that clips nothing.
_TRIALS = (1.1, 1.04, 1.0, 0.95, 0.9, 0.84, 0.76, 0.67, 0.57, 0.47, 0.37, 0.27)
_SMALLEST = torch.finfo(torch.bfloat16).tiny
# Above it squares could leave float32.
_LARGEST = 1e12
# Numbers whose scales a CPU tries at once: a dozen numbers each, which are to stay in its second-level cache.
_TILE = 2**13
# Dimensions of a tensor that differs by head.
_BY_HEAD = 3


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


class _Tensors(NamedTuple):
    """What a codec computes with; if nothing else is said ``[stored]`` float32, by element of the basis.

    Args:
        analysis: ``[(heads), head_dim, stored]``, brings vectors into the basis, in units of steps, and
        synthesis: ``[(heads), head_dim, stored]``, doubled levels back.
        reach: One over the largest number.
        trials: ``[trials]``, what scales are tried.
        finesse: Cells of the tables in a step.
        middles: The cell of zero.
        first: int32, the lowest cell, and
        last: int32, the highest.
        numbers: ``[cells]``, the number that is nearest to each, and
        levels: ``[cells]``, its level.
        weights: ``[(heads), 1, stored]``, the roots of what squared errors count.
        bends: ``[stored, 1]``, how the numbers of doubled levels bend.
    """

    analysis: torch.Tensor
    synthesis: torch.Tensor
    reach: torch.Tensor
    trials: torch.Tensor
    finesse: torch.Tensor
    middles: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    numbers: torch.Tensor
    levels: torch.Tensor
    weights: torch.Tensor
    bends: torch.Tensor


class Scaled(RowCodec):
    """Stores a vector as one scale (bfloat16) and the packed levels of its elements in another basis.

    The scale is the one of twelve with the least squared error, one of them the smallest that clips nothing. So the
    squared error in the codec's basis is at most that of the last, where no element is off by more than half of the
    widest distance of two levels, or 1 % more where it lies between two; the scale's rounding adds 2^-8 of the element.
    Magnitudes above 1e12 saturate, and below 1e-18 an element may be lost.

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
        self._packing = Packing(groups, SCALE_BYTES)
        bits = [group.bits for group in groups for _ in range(group.size)]
        stored = len(bits)
        steps = torch.tensor([curves[own].step for own in bits], dtype=torch.float64)
        bends = torch.tensor([curves[own].bend for own in bits], dtype=torch.float64)
        tops = torch.tensor([(2**own - 1) / 2 for own in bits], dtype=torch.float64)
        own = torch.ones(stored) if weights is None else weights[..., None, :stored]
        # Products with them must stay within float32; what they are relative to makes no difference.
        own = own / own.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(own.dtype).tiny)
        self._even = not bends.any()
        plain = len(groups) == 1 and bits[0] in {1, 2, 4, 8} and stored == analysis.shape[-1]
        self._layout = Layout(bits[0], 0, curves[bits[0]].bend / 4) if plain else None
        tables = {width: _table(width, curves[width]) for width in sorted(set(bits))}
        ends = dict(zip(tables, accumulate(len(numbers) for numbers, _ in tables.values()), strict=True))
        sizes = torch.tensor([len(tables[width][0]) for width in bits])
        last = torch.tensor([ends[width] for width in bits]) - 1
        # In units of steps, so that unpacking has less to multiply.
        self._tensors = _Tensors(
            analysis=(analysis[..., :stored, :].double() / steps.unsqueeze(-1)).mT.float().contiguous(),
            synthesis=(synthesis[..., :stored].double() * steps / 2).float(),
            reach=(1 / _bent(tops, bends)).float(),
            trials=torch.tensor(_TRIALS),
            finesse=torch.tensor([float(_finesse(width)) for width in bits]),
            middles=(last + 1 - sizes // 2).float(),
            first=(last + 1 - sizes).int(),
            last=last.int(),
            numbers=torch.cat([numbers for numbers, _ in tables.values()]),
            levels=torch.cat([levels for _, levels in tables.values()]),
            weights=(own.double().sqrt() * steps).float(),
            bends=bends.float().unsqueeze(-1) / 4,
        )
        self._at: dict[torch.device, _Tensors] = {}

    def of_head(self, head: int) -> "Scaled":
        """Return what encodes one KV head."""
        found = copy(self)
        own = (tensor[head] if tensor.dim() == _BY_HEAD else tensor for tensor in self._tensors)
        found._tensors = _Tensors(*own)  # noqa: SLF001 - its own
        found._at = {}  # noqa: SLF001 - the same
        return found

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return the levels' bytes and those of the scale."""
        del head_dim, dtype
        return self._packing.row_bytes

    def encode_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Bring ``[..., kv_heads, n, head_dim]`` into the basis and quantize with the best scale."""
        own = self._on(vectors.device)
        elements = torch.matmul(vectors.float().clamp(-_LARGEST, _LARGEST), own.analysis)
        widest = (elements * own.reach).abs_().amax(dim=-1, keepdim=True)
        scales = (widest * own.trials).clamp_min_(_SMALLEST).bfloat16()
        tiles = [
            self._quantize(own, elements[..., place, :], scales[..., place, :])
            for place in tiles_of(elements, elements.shape[-1], _TILE)
        ]
        scale, levels = (torch.cat(parts, dim=-2) for parts in zip(*tiles, strict=True))
        return torch.cat([scale, self._packing.pack(levels)], dim=-1)

    def _quantize(
        self, own: _Tensors, elements: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best of the scales ``[..., n, trials]`` as ``[..., n, 2]`` uint8, and its levels, float32."""
        trials = scales.float().unsqueeze(-1)
        cells = ((elements * own.finesse).unsqueeze(-2) / trials).add_(own.middles).int().clamp_(own.first, own.last)
        numbers = own.numbers.index_select(0, cells.view(-1)).view(cells.shape)
        errors = torch.addcmul(elements.unsqueeze(-2), numbers, trials, value=-1, out=numbers)
        norms = torch.linalg.vector_norm(errors.mul_(own.weights.unsqueeze(-2)), dim=-1)
        best = norms.argmin(dim=-1, keepdim=True)
        chosen = cells.gather(-2, best.unsqueeze(-1).expand(*best.shape, cells.shape[-1])).squeeze(-2)
        return scales.gather(-1, best).view(torch.uint8), own.levels.take(chosen.long())

    def layout(self, head_dim: int) -> Layout | None:
        """Return it where all elements of the basis have the same bits."""
        del head_dim
        return self._layout

    def unpack(self, data: torch.Tensor, head_dim: int, dtype: torch.dtype) -> Unpacked:
        """Return the levels' numbers, without those elements that are not stored."""
        del head_dim, dtype
        words = self._packing.words(data)
        scale = self._packing.numbers(words, 0, 1, torch.bfloat16).squeeze(-2)
        # Levels come doubled, so numbers do.
        twice = self._packing.unpack(words)
        if not self._even:
            twice.addcmul_(twice.pow(3), self._on(data.device).bends)
        return Unpacked(twice.mT, scale)

    def project(self, queries: torch.Tensor) -> torch.Tensor:
        """Multiply by the transposed synthesis."""
        return torch.matmul(queries.float(), self._on(queries.device).synthesis)

    def restore(self, vectors: torch.Tensor) -> torch.Tensor:
        """Multiply by the synthesis."""
        return torch.matmul(vectors, self._on(vectors.device).synthesis.mT)

    def _on(self, device: torch.device) -> _Tensors:
        """Return the tensors on a device."""
        if device not in self._at:
            self._at[device] = _Tensors(*(tensor.to(device) for tensor in self._tensors))
        return self._at[device]


def _bent(centered: torch.Tensor, bends: torch.Tensor | float) -> torch.Tensor:
    """Return what centered levels stand for, in units of steps."""
    return centered * (1 + bends * centered.square())


def _finesse(bits: int) -> int:
    """Return the cells of a step of a table: where one lies between two levels, 1 % of their distance is at stake."""
    return max(32, 1 << 11 - bits)


@lru_cache
def _table(bits: int, curve: Curve) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for cells up to the largest numbers on both sides, the nearest number in units of steps and its level."""
    numbers = _bent(torch.arange(2**bits, dtype=torch.float64) - (2**bits - 1) / 2, curve.bend)
    finesse = _finesse(bits)
    half = math.ceil(float(numbers[-1]) * finesse)
    centers = (torch.arange(-half, half, dtype=torch.float64) + 0.5) / finesse
    levels = torch.bucketize(centers, (numbers[1:] + numbers[:-1]) / 2)
    return numbers[levels].float(), levels.float()
