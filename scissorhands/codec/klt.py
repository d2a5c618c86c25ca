"""Transform coding: the bits go to the directions of keys and values that the model's outputs hang on.

An error ``d`` in a key changes a query's score by ``q . d``. With the second moments ``C`` of the keys and ``M`` of the
queries of a KV head, the directions that count are the eigenvectors of ``M^(1/2) C M^(1/2)``, the Karhunen-Loeve
transform in the metric of the queries; its eigenvalues tell what an element left out would cost. Elements of little
eigenvalue get 2 bits or none, those of the largest 8 (reverse water-filling, Cover and Thomas, section 10.3). Within a
group of equal bits the elements are weighted so that each is half way between its own and the queries' scale, which is
the best that one step for all of them can do, and rotated, so that none is much larger than the rest. For values ``M``
is the identity: their errors count alike in all directions.

A head's moments are measured once for a model (``scissorhands calibrate``). Static statistics alone do not make a
codec: a vector's own scale stays, as tokens differ by more than statistics tell.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch

from scissorhands.codec.packing import Group
from scissorhands.codec.rotation import rotation
from scissorhands.codec.scaled import CUBIC, Scaled
from scissorhands.formats import transform_unit

WIDTHS = (8, 6, 4, 2)
# The least eigenvalue, over a head's largest.
_FLOOR = 1e-14


def klt(analysis: torch.Tensor, spectrum: torch.Tensor, bits: float) -> Scaled:
    """Return the codec of keys or values of some KV heads.

    Args:
        analysis: ``[heads, head_dim, head_dim]``, ``V^T M^(1/2)``.
        spectrum: ``[heads, head_dim]``, eigenvalues, descending.
        bits: Bits of an element on average, without the scale.
    """
    heads, head_dim = spectrum.shape
    # Directions that were never measured must not be divided by nothing.
    floor = spectrum.double().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) * _FLOOR
    spectrum = spectrum.double().maximum(floor)
    layout = best_layout(spectrum, bits)
    analysis = analysis.double()
    # M^(-1/2) V, and the very inverse of what was stored.
    synthesis = torch.linalg.inv(analysis)
    to_basis = torch.zeros(heads, head_dim, head_dim, dtype=torch.float64)
    back = torch.zeros_like(to_basis)
    weights = torch.zeros(heads, head_dim, dtype=torch.float64)
    start = 0
    for size, _ in layout:
        own = slice(start, start + size)
        half = spectrum[:, own].pow(0.25).unsqueeze(-1)
        variance = half.square().mean(dim=1, keepdim=True)
        turn = rotation(size)
        to_basis[:, own] = turn @ (analysis[:, own] / half) / variance.sqrt()
        back[:, :, own] = (synthesis[:, :, own] * half.transpose(1, 2)) @ turn.T * variance.sqrt()
        weights[:, own] = variance.square().squeeze(-1)
        start += size
    return Scaled(layout, to_basis, back, CUBIC, weights)


def best_layout(spectrum: torch.Tensor, bits: float) -> list[Group]:
    """Return the groups of a number of bits in all that are expected to cost all heads together the least.

    Args:
        spectrum: ``[heads, head_dim]`` eigenvalues, descending.
        bits: Bits of an element on average.
    """
    head_dim = spectrum.shape[1]
    unit = transform_unit(head_dim)
    roots = spectrum.clamp_min(0).sqrt()
    best, least = None, float("inf")
    for counts in layouts(head_dim // unit, int(head_dim * bits) // (2 * unit)):
        cost, start = 0.0, 0
        for count, width in zip(counts, WIDTHS, strict=True):
            if count:
                own = roots[:, start : start + count * unit]
                cost += float((own.sum(dim=1).square() / own.shape[1]).sum()) * CUBIC[width].error
                start += count * unit
        cost += float(roots[:, start:].square().sum())
        if cost < least:
            best, least = counts, cost
    assert best is not None
    return [Group(count * unit, width) for count, width in zip(best, WIDTHS, strict=True) if count]


@lru_cache
def layouts(units: int, pairs: int) -> tuple[tuple[int, ...], ...]:
    """Return all ways of giving ``units`` units 8, 6, 4, 2 or no bits an element: ``pairs`` times 2 bits in all."""
    return tuple(_layouts(units, pairs))


def _layouts(units: int, pairs: int) -> Iterator[tuple[int, ...]]:
    for eights in range(units + 1):
        for sixes in range(units - eights + 1):
            for fours in range(units - eights - sixes + 1):
                twos = pairs - 4 * eights - 3 * sixes - 2 * fours
                if 0 <= twos <= units - eights - sixes - fours:
                    yield eights, sixes, fours, twos
