"""Bits by the energy of rotary pairs (Block-GTQ, Liang, Zhang and Jia 2026, arXiv 2606.24033, section 3).

Rotary positions turn the elements ``b`` and ``b + head_dim / 2`` of queries and keys together, so a score is a sum over
such pairs, and an error in a pair of a key costs what the queries have there. A pair of energy ``E``, the queries' mean
square times the keys', is expected to cost ``E * 4 ** -bits``; the bits go one by one to where they save the most.

What differs from the paper: four pairs of neighboring energy get their bits together, so that the levels of every
width fill whole bytes; and a vector has one scale instead of one for each width, as the measured mean squares of keys
tell how the widths compare.
"""

import torch

from scissorhands.codec.packing import Group
from scissorhands.codec.rotation import rotation
from scissorhands.codec.scaled import CUBIC, Scaled

# Pairs that get bits together.
UNIT = 4
LEAST, MOST = 1, 8


def block_gtq(energy: torch.Tensor, second: torch.Tensor, bits: float) -> Scaled:
    """Return the codec of a KV head's keys.

    Pairs of equal bits are rotated together, so that none of their elements is much larger than the rest.

    Args:
        energy: ``[head_dim / 2]``, mean square of the queries times that of the keys, by pair.
        second: ``[head_dim]``, mean square of the keys' elements.
        bits: Bits of an element on average.
    """
    head_dim = len(second)
    tiny = torch.finfo(torch.float32).tiny
    energy = energy.double().clamp_min(tiny)
    order = energy.argsort(descending=True, stable=True)
    layout = allocate(energy[order], bits)
    second = second.double().clamp_min(tiny)
    demand = energy / (second[: head_dim // 2] + second[head_dim // 2 :])
    to_basis = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    back = torch.zeros_like(to_basis)
    weights = torch.zeros(head_dim, dtype=torch.float64)
    start = 0
    for size, _ in layout:
        end = start + size
        pairs = order[start // 2 : end // 2]
        elements = torch.cat([pairs, pairs + head_dim // 2])
        variance = second[elements].mean()
        to_basis[start:end, elements] = rotation(size) / variance.sqrt()
        back[elements, start:end] = rotation(size).T * variance.sqrt()
        weights[start:end] = variance * demand[pairs].mean()
        start = end
    return Scaled(layout, to_basis, back, CUBIC, weights)


def allocate(energy: torch.Tensor, bits: float) -> list[Group]:
    """Return the groups of pairs, in order of energy, that get equally many bits.

    Args:
        energy: ``[head_dim / 2]`` energies, descending.
        bits: Bits of an element on average.
    """
    costs = energy.view(-1, UNIT).sum(dim=1).tolist()
    given = [LEAST] * len(costs)
    for _ in range(round((bits - LEAST) * len(costs))):
        open_units = [unit for unit, own in enumerate(given) if own < MOST]
        best = max(open_units, key=lambda unit: (costs[unit] * 4.0 ** -given[unit], -given[unit], -unit))
        given[best] += 1
    return [Group(2 * UNIT * given.count(own), own) for own in sorted(set(given), reverse=True)]
