"""A plain decoder of every format, in numpy, byte by byte: written from what the formats' descriptions say.

Nothing of the program is imported here.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

# By bits: step, how much it widens further out, and the mean squared error for a normal variable of variance 1.
_EVEN = {4: (0.3352, 0.0, 0.01154)}
_CUBIC = {
    1: (1.595769, 0.0, 0.36338),
    2: (0.892894, 0.0567720, 0.11748),
    3: (0.471431, 0.0245764, 0.03462),
    4: (0.240517, 0.00872082, 0.00969),
    5: (0.121827, 0.00276424, 0.00265),
    6: (0.0617121, 0.000824067, 0.00072),
    7: (0.0312793, 0.000236787, 0.00019),
    8: (0.0158626, 0.0000663157, 0.00005),
}


def levels_of(data: Bytes, elements: int, bits: int) -> Array:
    """Return the levels of packed elements: parts of 8, 4, 2 and 1 bits, the highest first, each plane by plane."""
    levels, start, left = np.zeros(elements), 0, bits
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        left -= width
        size = elements * width // 8
        for element in range(elements):
            byte = int(data[start + element % size])
            plane = element // size
            levels[element] += ((byte >> plane * width) % 2**width) << left
        start += size
    assert start == len(data), "every byte belongs to some element"
    return levels


def plain(data: Bytes, dtype: str) -> Array:
    """Decode numbers as they are."""
    if dtype == "bfloat16":
        return bfloat16(data)
    return data.view({"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float64)


def bfloat16(data: Bytes) -> Array:
    """Return the numbers that are the upper halves of float32."""
    return (data.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


def grouped(data: Bytes, head_dim: int, bits: int) -> Array:
    """Decode one vector: minima of all groups, steps, levels. A group has the most elements up to 64 that fit."""
    size = math.gcd(head_dim, 64)
    groups = head_dim // size
    low, step = plain(data[: 2 * groups], "float16"), plain(data[2 * groups : 4 * groups], "float16")
    return np.repeat(low, size) + np.repeat(step, size) * levels_of(data[4 * groups :], head_dim, bits)


def by_channel(data: Bytes, count: int, head_dim: int, bits: int) -> Array:
    """Decode vectors in blocks of 32: minima of all channels, steps, then the levels of each vector."""
    decoded, start, row = np.zeros((count, head_dim)), 0, head_dim * bits // 8
    for first in range(0, count, 32):
        low = plain(data[start : start + 2 * head_dim], "float16")
        step = plain(data[start + 2 * head_dim : start + 4 * head_dim], "float16")
        start += 4 * head_dim
        for vector in range(first, min(first + 32, count)):
            decoded[vector] = low + step * levels_of(data[start : start + row], head_dim, bits)
            start += row
    assert start == len(data)
    return decoded


def rotation(size: int) -> Array:
    """Return the rotation: Walsh-Hadamard over the power of two in ``size``, cosines over the rest, hashed signs."""
    power = size & -size
    rest = size // power
    row, column = np.indices((size, size))
    walsh = 1 - 2.0 * (np.bitwise_count((row % power) & (column % power)) % 2)
    frequency, place = row // power, column // power
    cosine = np.cos(np.pi * frequency * (place + 0.5) / rest) * np.where(frequency, math.sqrt(2), 1)
    signs = hashlib.shake_128(f"scissorhands rotation {size}".encode()).digest(size)
    return walsh * cosine / math.sqrt(size) * [1 if sign % 2 else -1 for sign in signs]


@dataclass(frozen=True)
class Basis:
    """Where a vector has one scale and the levels of its elements.

    Args:
        analysis: ``[stored, head_dim]``, what brings a vector there, and
        synthesis: ``[head_dim, stored]``, back.
        groups: Size and bits of adjacent elements, in order.
        even: Whether steps are even.
        weights: ``[stored]``, what an element's squared error counts.
    """

    analysis: Array
    synthesis: Array
    groups: list[tuple[int, int]]
    even: bool
    weights: Array

    def elements(self, data: Bytes) -> tuple[Array, Array]:
        """Return one vector's elements in this basis, and the scale of each, with which levels are multiplied."""
        scale = bfloat16(data[:2])[0]
        found, scales, start = [], [], 2
        for size, bits in self.groups:
            end = start + size * bits // 8
            centered = levels_of(data[start:end], size, bits) - (2**bits - 1) / 2
            step, bend, _ = (_EVEN if self.even else _CUBIC)[bits]
            found.append(scale * step * centered * (1 + bend * centered**2))
            scales.append(np.full(size, scale * step))
            start = end
        assert start == len(data)
        return np.concatenate(found), np.concatenate(scales)

    def decode(self, data: Bytes) -> Array:
        """Decode one vector."""
        return self.synthesis @ self.elements(data)[0]

    def bound(self, vector: Array) -> float:
        """Return the largest weighted squared error that a vector's elements may have: that of the widest scale."""
        elements = self.analysis @ vector
        reach, half = [], []
        for size, bits in self.groups:
            step, bend, _ = (_EVEN if self.even else _CUBIC)[bits]
            top = (2**bits - 1) / 2
            numbers = [step * level * (1 + bend * level**2) for level in (top - 1, top)]
            reach.append(np.full(size, numbers[1]))
            half.append(np.full(size, (numbers[1] - numbers[0]) / 2))
        scale = (np.abs(elements) / np.concatenate(reach)).max()
        return float((self.weights * (scale * np.concatenate(half) * 1.01 + np.abs(elements) / 250) ** 2).sum())


def rotated(head_dim: int, bits: int, *, even: bool = False) -> Basis:
    """Return the basis of ``int4-hadamard`` and ``turboquant``."""
    turn = rotation(head_dim)
    return Basis(turn, turn.T, [(head_dim, bits)], even, np.ones(head_dim))


def transformed(tensors: Mapping[str, Array], side: str, head: int, bits: float) -> Basis:
    """Return the basis of ``klt`` for one KV head; all heads share the numbers of elements by bits."""
    analysis = tensors[f"{side}.analysis"][head].astype(np.float64)
    synthesis = np.linalg.inv(analysis)
    spectra = tensors[f"{side}.spectrum"]
    size = spectra.shape[1]
    unit = 8 if size <= 128 else 16
    groups = _cheapest(spectra, unit, int(size * bits) // (2 * unit))
    rows, columns, weights, start = [], [], [], 0
    for count, _ in groups:
        own = slice(start, start + count)
        half = spectra[head, own] ** 0.25
        variance = (half**2).mean()
        turn = rotation(count)
        rows.append(turn @ (analysis[own] / half[:, None]) / math.sqrt(variance))
        columns.append((synthesis[:, own] * half) @ turn.T * math.sqrt(variance))
        weights.append(np.full(count, variance**2))
        start += count
    return Basis(np.concatenate(rows), np.concatenate(columns, axis=1), groups, False, np.concatenate(weights))


def _cheapest(spectra: Array, unit: int, pairs: int) -> list[tuple[int, int]]:
    """Return how many elements get 8, 6, 4 and 2 bits, of all ways to spend ``pairs`` times 2 bits an element."""
    units = spectra.shape[1] // unit
    best, least = [(0, 0)], math.inf
    for counts in itertools.product(*(range(min(units, 2 * pairs // bits) + 1) for bits in (8, 6, 4))):
        twos = pairs - 4 * counts[0] - 3 * counts[1] - 2 * counts[2]
        if twos < 0 or sum(counts) + twos > units:
            continue
        groups = [(count * unit, bits) for count, bits in zip((*counts, twos), (8, 6, 4, 2), strict=True) if count]
        cost, start = 0.0, 0
        for size, bits in groups:
            cost += (np.sqrt(spectra[:, start : start + size]).sum(axis=1) ** 2).sum() / size * _CUBIC[bits][2]
            start += size
        cost += spectra[:, start:].sum()
        if cost < least:
            best, least = groups, cost
    return best


def by_energy(tensors: Mapping[str, Array], head: int, bits: int) -> Basis:
    """Return the basis of the keys of ``block-gtq`` for one KV head."""
    energy = tensors["rotary.energy"][head]
    synthesis = np.linalg.inv(tensors["keys.analysis"][head].astype(np.float64))
    second = (synthesis**2 * tensors["keys.spectrum"][head]).sum(axis=1)
    half = len(energy)
    order = np.argsort(-energy, kind="stable")
    units = energy[order].reshape(-1, 4).sum(axis=1)
    given = np.ones(len(units), int)
    while given.mean() < bits:
        given[np.argmax(np.where(given < 8, units / 4.0**given, -1))] += 1
    rows, columns, weights, groups = [], [], [], []
    for width in sorted(set(given.tolist()), reverse=True):
        pairs = order[np.repeat(given, 4) == width]
        elements = np.concatenate([pairs, pairs + half])
        variance = second[elements].mean()
        turn = np.zeros((len(elements), 2 * half))
        turn[:, elements] = rotation(len(elements))
        rows.append(turn / math.sqrt(variance))
        columns.append(turn.T * math.sqrt(variance))
        queries = energy[pairs] / (second[pairs] + second[pairs + half])
        weights.append(np.full(len(elements), variance * queries.mean()))
        groups.append((len(elements), width))
    return Basis(np.concatenate(rows), np.concatenate(columns, axis=1), groups, False, np.concatenate(weights))
