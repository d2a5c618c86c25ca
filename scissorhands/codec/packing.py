"""Packing: levels of 1 to 8 bits become bytes, plane by plane.

A level's bits are split into parts of 8, 4, 2 and 1 bits, the highest first: 3 bits are a part of 2 and one of 1. The
parts of one width lie together. With ``n`` elements and parts of 4 bits, byte ``i`` holds element ``i`` in its low half
and element ``i + n / 2`` in its high half; parts of 2 and 1 bits go on alike, from the lowest bits up. Groups of
elements with other bits follow one another.

Both ways take few calls of torch, whatever the groups. A byte is a sum of parts of levels, so packing is a product with
a matrix. Rows are read as words of 16 bits, the first words of all rows first, so that what a plane holds of all rows
is one run in memory. Where all elements have 1, 2, 4 or 8 bits there are planes of one width only: these are added up,
and can be unpacked row by row.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

_BYTE = 8


class Group(NamedTuple):
    """Adjacent elements of a vector that have equally many bits."""

    size: int
    bits: int


class _Part(NamedTuple):
    """Bits of the levels of one group that lie together.

    Args:
        elements: Whose they are.
        width: How many of each.
        shift: How many lower bits a level has in other parts.
        start: The byte of a row where it begins, and
        end: the one after its last.
    """

    elements: range
    width: int
    shift: int
    start: int
    end: int


class Packing:
    """Packs the levels of vectors whose elements have different bits.

    Args:
        groups: The elements' bits, in order.
        start: Bytes of a row that come before the levels.
    """

    def __init__(self, groups: Sequence[Group], start: int = 0) -> None:
        parts = list(_parts(groups, start))
        self.elements = sum(size for size, _ in groups)
        self.row_bytes = parts[-1].end
        # Bytes of a word; one where rows or parts begin within a word of two.
        self._word = 1 if start % 2 or any(part.end % 2 for part in parts) else 2
        uppers = [(place, 2.0**-part.shift) for part in parts if part.shift for place in part.elements]
        self._upper_parts = [part for part in parts if part.shift]
        self._start = start
        # Bits of all elements, where one part holds them; else 0.
        self._width = parts[0].width if len(parts) == 1 else 0
        tops = [2**bits - 1 for size, bits in groups for _ in range(size)]
        self._tensors = (
            _sums(parts, self.elements, start),
            torch.tensor([place for place, _ in uppers], dtype=torch.long),
            torch.tensor([scale for _, scale in uppers]),
            -torch.tensor(tops, dtype=torch.int16).unsqueeze(-1),
            *self._reads([part for part in parts if not part.shift]),
            *(tensor for part in self._upper_parts for tensor in self._reads([part])),
        )
        self._at: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def pack(self, levels: torch.Tensor) -> torch.Tensor:
        """Pack ``[..., elements]`` levels, whole numbers in float32, into ``[..., row_bytes - start]`` uint8."""
        if self._width:
            first, *others = levels.chunk(_BYTE // self._width, dim=-1)
            for plane, own in enumerate(others, start=1):
                first = torch.add(first, own, alpha=2 ** (plane * self._width))
            return _bytes(first)
        sums, upper, scales, *_ = self._on(levels.device)
        if self._upper_parts:
            levels = torch.cat([levels, levels.index_select(-1, upper).mul_(scales).floor_()], dim=-1)
        # Whole numbers of few bits: exact.
        return _bytes(torch.matmul(levels, sums))

    def words(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[..., n, row_bytes]`` uint8 rows as the words that the others read: ``[..., words, n]`` int16."""
        if self._word == 1:
            return rows.mT.to(torch.int16, memory_format=torch.contiguous_format)
        # A slice may begin at an odd byte.
        if rows.storage_offset() % 2 or any(stride % 2 for stride in rows.stride()[:-1]):
            rows = rows.clone(memory_format=torch.contiguous_format)
        return rows.view(torch.int16).mT.contiguous()

    def unpack_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the levels of ``[..., n, row_bytes]`` uint8 rows of one part: ``[..., n, elements]`` float32."""
        rows = rows.contiguous()
        # A single row may begin anywhere, and so may what it would be followed by.
        if self._word > 1 and not any(place % 2 for place in (rows.storage_offset(), *rows.stride()[:-1])):
            rows = rows.view(torch.int16)
        mask = int.from_bytes(bytes([2**self._width - 1] * rows.itemsize))
        levels = torch.empty(*rows.shape[:-1], self.elements, device=rows.device)
        for plane, own in enumerate(levels.chunk(_BYTE // self._width, dim=-1)):
            found = rows if self._width == _BYTE else (rows >> plane * self._width).bitwise_and_(mask)
            own.copy_(found.view(torch.uint8)[..., self._start :])
        return levels

    def numbers(self, words: torch.Tensor, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers of 16 bits that lie before the levels: ``[..., count, n]`` float32."""
        if self._word == 1:
            low, high = (words[..., 2 * first + byte : 2 * (first + count) : 2, :] for byte in (0, 1))
            return (low | high << _BYTE).view(dtype).float()
        return words[..., first : first + count, :].view(dtype).float()

    def unpack(self, words: torch.Tensor) -> torch.Tensor:
        """Return twice the levels, centered: ``2 * level - (2 ** bits - 1)``, ``[..., elements, n]`` float32."""
        _, _, _, base, *reads = self._on(words.device)
        lowest = _bits(words, *reads[:3])
        found = torch.add(base, lowest, alpha=2, out=lowest)
        for index, part in enumerate(self._upper_parts, start=1):
            own = found[..., part.elements.start : part.elements.stop, :]
            own.add_(_bits(words, *reads[3 * index : 3 * index + 3]), alpha=2 << part.shift)
        return found.float()

    def _reads(self, parts: Sequence[_Part]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return, of each element in order, the word that holds its part, how far it is shifted, and what masks it."""
        words, shifts, masks = [], [], []
        for part in parts:
            for index in range(len(part.elements)):
                plane, byte = divmod(index, part.end - part.start)
                word, place = divmod(part.start + byte, self._word)
                words.append(word)
                shifts.append(_BYTE * place + plane * part.width)
                masks.append(2**part.width - 1)
        shift, mask = (torch.tensor(found, dtype=torch.int16).unsqueeze(-1) for found in (shifts, masks))
        return torch.tensor(words), shift, mask

    def _on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the tensors on a device."""
        if device not in self._at:
            self._at[device] = tuple(tensor.to(device) for tensor in self._tensors)
        return self._at[device]


@lru_cache
def packing_of(elements: int, bits: int, start: int = 0) -> Packing:
    """Return what packs vectors whose elements have equally many bits, behind ``start`` other bytes."""
    return Packing([Group(elements, bits)], start)


def packed_bytes(elements: int, bits: int) -> int:
    """Return the bytes of so many levels; ``elements * bits`` must be a multiple of 8 in every part."""
    return elements * bits // _BYTE


def _bytes(sums: torch.Tensor) -> torch.Tensor:
    """Return whole numbers below 256 as uint8. On a CPU it is twice as fast by way of another type."""
    return sums.int().to(torch.uint8)


def _bits(words: torch.Tensor, places: torch.Tensor, shifts: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    return words.index_select(-2, places).bitwise_right_shift_(shifts).bitwise_and_(masks)


def _parts(groups: Sequence[Group], start: int) -> Iterator[_Part]:
    first = 0
    for size, bits in groups:
        for width in (8, 4, 2, 1):
            if bits & width:
                end = start + packed_bytes(size, width)
                yield _Part(range(first, first + size), width, bits & (width - 1), start, end)
                start = end
        first += size


def _sums(parts: Sequence[_Part], elements: int, start: int) -> torch.Tensor:
    """Return what makes bytes of levels, followed by the upper parts of all that have some, by part."""
    matrix = torch.zeros(elements + sum(len(part.elements) for part in parts if part.shift), parts[-1].end - start)
    upper = elements
    higher: dict[int, int] = {}
    for part in parts:
        for index, place in enumerate(part.elements):
            plane, byte = divmod(index, part.end - part.start)
            column = part.start - start + byte
            own = place
            if part.shift:
                own, upper = upper, upper + 1
            matrix[own, column] = 2.0 ** (plane * part.width)
            # The bits above are in what comes down from the part before.
            if place in higher:
                matrix[higher[place], column] = -(2.0 ** ((plane + 1) * part.width))
            higher[place] = own
    return matrix
