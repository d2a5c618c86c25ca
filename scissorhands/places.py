"""Where the slots of a row's tensors lie in one string of bytes, and how they get there and back.

Nothing is encoded or decoded on the way. Every tensor begins at a multiple of the largest element, so that bytes can be
viewed as its numbers.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch

_ALIGNMENT = 16

Index = slice | torch.Tensor


class Place(NamedTuple):
    """Where slots of one tensor ``[kv_heads, B, ...]`` of a row lie in the bytes.

    Args:
        tensor: The tensor.
        slots: Which of its slots.
        shape: Shape of these, ``[kv_heads, n, ...]``.
        start: Their first byte.
        size: Their bytes.
    """

    tensor: torch.Tensor
    slots: Index
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def end(self) -> int:
        """The byte after their last."""
        return self.start + self.size


def places_behind(end: int, slots: Iterable[tuple[torch.Tensor, Index, int]]) -> list[Place]:
    """Return where slots of tensors go, one behind the other.

    Args:
        end: The byte after the last that is taken.
        slots: Tensors ``[kv_heads, B, ...]`` of one row, which slots of each, and how many these are. Those without
            bytes have no place.
    """
    places: list[Place] = []
    for tensor, chosen, count in slots:
        shape = (tensor.shape[0], count, *tensor.shape[2:])
        size = tensor.element_size() * torch.Size(shape).numel() if tensor.shape[1] else 0
        if size:
            start = -(-extent(places, end) // _ALIGNMENT) * _ALIGNMENT
            places.append(Place(tensor, chosen, shape, start, size))
    return places


def flat(places: Iterable[Iterable[Place]]) -> list[Place]:
    """Return the places of all layers, in order."""
    return list(chain.from_iterable(places))


def extent(places: Sequence[Place], head: int = 0) -> int:
    """Return the bytes of places behind ``head`` bytes of something else."""
    return places[-1].end if places else head


def gather(places: Sequence[Place], device: torch.device, head: bytes = b"") -> memoryview:
    """Copy places to the host, in one transfer, behind the bytes ``head``."""
    data = torch.zeros(extent(places, len(head)), dtype=torch.uint8, device=device)
    if head:
        data[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for place in places:
        own = data[place.start : place.end].view(place.tensor.dtype).view(place.shape)
        own.copy_(place.tensor[:, place.slots])
    return memoryview(data.cpu().numpy())  # type: ignore[arg-type] # An array is a buffer; numpy's types cannot tell.


def scatter(data: bytearray | memoryview, places: Sequence[Place], device: torch.device) -> None:
    """Put the bytes of places that follow one another where they belong."""
    if not places:
        return
    first = places[0].start
    held = torch.frombuffer(data, dtype=torch.uint8, offset=first, count=places[-1].end - first).to(device)
    for place in places:
        own = held[place.start - first : place.end - first]
        place.tensor[:, place.slots] = own.view(place.tensor.dtype).view(place.shape)
