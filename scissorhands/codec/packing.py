"""Packing: levels of 1 to 8 bits become bytes, plane by plane.

A level's bits are split into parts of 4, 2 and 1 bits, the highest first: 3 bits are a part of 2 and one of 1. The
parts of one width lie together. With ``n`` elements and parts of 4 bits, byte ``i`` holds element ``i`` in its low half
and element ``i + n / 2`` in its high half; parts of 2 and 1 bits go on alike, from the lowest bits up. So every plane
of a byte is a run of adjacent elements, and is read with one mask or shift for all vectors at once.
"""

from collections.abc import Iterator

import torch

_BYTE = 8


def packed_bytes(elements: int, bits: int) -> int:
    """Return the bytes of so many levels; ``elements * bits`` must be a multiple of 8 in every part."""
    return elements * bits // _BYTE


def pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack ``[..., n]`` uint8 levels below ``2 ** bits`` into ``[..., n * bits / 8]`` uint8."""
    if bits == _BYTE:
        return levels
    packed = []
    for width, shift in _parts(bits):
        part = (levels >> shift) & (2**width - 1)
        planes = part.chunk(_BYTE // width, dim=-1)
        data = planes[0]
        for index, plane in enumerate(planes[1:], start=1):
            data = data | (plane << (index * width))
        packed.append(data)
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo :func:`pack`: ``[..., n * bits / 8]`` uint8 into ``[..., n]`` uint8."""
    if bits == _BYTE:
        return data
    levels = None
    elements = data.shape[-1] * _BYTE // bits
    start = 0
    for width, shift in _parts(bits):
        end = start + packed_bytes(elements, width)
        part = torch.cat(list(planes(data[..., start:end], width)), dim=-1)
        start = end
        part = part << shift if shift else part
        levels = part if levels is None else levels.bitwise_or_(part)
    assert levels is not None
    return levels


def planes(data: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    """Yield the planes of parts of ``width`` bits (1, 2 or 4), each ``[..., bytes]`` uint8."""
    count, mask = _BYTE // width, 2**width - 1
    yield data & mask
    for index in range(1, count - 1):
        yield (data >> (index * width)) & mask
    yield data >> (_BYTE - width)


def _parts(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the width of each part of a level and how far it is shifted, the highest first."""
    for width in (4, 2, 1):
        if bits & width:
            yield width, bits & (width - 1)
