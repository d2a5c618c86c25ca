"""The summary of a segment's keys: little enough to be read whole, telling enough to choose by.

A section is seen as **blocks** of 16 successive slots, its last one shorter. Of a block's keys the summary keeps four
centroids with their counts: what a query would give the block is estimated as if every key were its centroid. Louver
(arXiv 2605.06763) summarizes keys by centroids too; Quest (arXiv 2406.10774), by their smallest and largest elements.

The parts follow one another, each for all sections in the order of the segment's table, little-endian::

    positions u32 * slots
    keys in each centroid u8 * blocks * 4
    scales f16 * blocks * 4
    elements, 4 bits * blocks * 4 * head_dim      multiples of the scale plus 8, two a byte, the lower bits first

Its size follows from the table, and its checksum is in the segment's header.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scissorhands.errors import CorruptSegmentError

BLOCK_SLOTS = 16
CENTROIDS = 4

# The largest number of 4 bits, and what is added to make all numbers positive.
_LARGEST, _ZERO = 7, 8
_POSITION, _SCALE = np.dtype("<u4"), np.dtype("<f2")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SectionSummary:
    """What is known of the slots of one layer and KV head without reading them.

    Args:
        positions: ``[slots]`` uint32, ascending.
        centroids: ``[blocks, 4, head_dim]`` float32.
        counts: ``[blocks, 4]`` uint8, keys that each centroid stands for; 0 where there are fewer kinds of keys.
    """

    positions: npt.NDArray[np.uint32]
    centroids: Floats
    counts: npt.NDArray[np.uint8]


def blocks_of(slots: int) -> int:
    """Return the blocks of a section of ``slots``."""
    return -(-slots // BLOCK_SLOTS)


def pack_summary(
    positions: Sequence[npt.NDArray[np.integer]], centroids: Floats, counts: npt.NDArray[np.integer]
) -> bytes:
    """Write a summary.

    Args:
        positions: Of each section, ``[slots]``, in the order of the segment's table.
        centroids: ``[blocks, 4, head_dim]`` of all sections' blocks, finite.
        counts: ``[blocks, 4]``.

    Raises:
        ValueError: There are not as many blocks as the positions need.
    """
    wanted = sum(blocks_of(len(own)) for own in positions)
    if not wanted == len(centroids) == len(counts):
        raise ValueError(f"{len(centroids)} blocks of centroids, {len(counts)} of counts, instead of {wanted}")
    scales = (np.abs(centroids).max(axis=2, initial=0.0) / _LARGEST).astype(_SCALE)
    # A scale that was rounded down, or to zero, still holds every number within its four bits.
    divisors = np.where(scales > 0, scales, 1).astype(np.float32)[..., None]
    codes = np.clip(np.rint(centroids / divisors), -_LARGEST, _LARGEST).astype(np.int8) + _ZERO
    flat = codes.astype(np.uint8).reshape(-1, 2)
    parts: list[npt.NDArray[np.generic]] = [
        np.concatenate([np.empty(0, _POSITION), *positions]).astype(_POSITION),
        counts.astype(np.uint8),
        scales,
    ]
    parts.append((flat[:, 0] | flat[:, 1] << 4).astype(np.uint8))
    return b"".join([part.tobytes() for part in parts])


def summary_bytes(slots: Sequence[int], head_dim: int) -> int:
    """Return the bytes of a summary of sections of so many slots."""
    block = CENTROIDS * (1 + _SCALE.itemsize) + CENTROIDS * head_dim // 2
    return sum(slots) * _POSITION.itemsize + sum(map(blocks_of, slots)) * block


def read_summary(data: bytes, slots: Sequence[int], head_dim: int) -> list[SectionSummary]:
    """Read a summary whose checksum has been checked.

    Args:
        data: Its bytes.
        slots: Slots of each section, from the segment's table.
        head_dim: Elements of a key.

    Raises:
        CorruptSegmentError: It is of another size.
    """
    if len(data) != summary_bytes(slots, head_dim):
        raise CorruptSegmentError(f"summary is {len(data)} bytes instead of {summary_bytes(slots, head_dim)}")
    blocks = [blocks_of(count) for count in slots]
    total, vectors = sum(slots), sum(blocks) * CENTROIDS
    positions = np.frombuffer(data, _POSITION, total)
    at = positions.nbytes
    counts = np.frombuffer(data, np.uint8, vectors, at).reshape(-1, CENTROIDS)
    scales = np.frombuffer(data, _SCALE, vectors, at + vectors).astype(np.float32)
    packed = np.frombuffer(data, np.uint8, offset=at + vectors + vectors * _SCALE.itemsize)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(vectors, head_dim).astype(np.float32) - _ZERO
    centroids = (codes * scales[:, None]).reshape(sum(blocks), CENTROIDS, head_dim)
    slot_ends, block_ends = np.cumsum(slots), np.cumsum(blocks)
    return [
        SectionSummary(positions[end - count : end], centroids[last - own : last], counts[last - own : last])
        for count, end, own, last in zip(slots, slot_ends, blocks, block_ends, strict=True)
    ]
