"""Moving slots within a row: what an eviction keeps goes to the front, in the order that it has."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch


def gather(tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> list[torch.Tensor]:
    """Copy slots ``[H, d]`` of each of a row's tensors ``[H, B, ...]``: ``[H, d, ...]`` each."""
    heads, capacity = tensors[0].shape[:2]
    # Selecting along one dimension copies whole slots, where an index for each of two copies them number by number.
    flat = slots if heads == 1 else slots + capacity * torch.arange(heads, device=slots.device).unsqueeze(1)
    chosen = flat.flatten()
    return [held.flatten(0, 1).index_select(0, chosen).view(*slots.shape, *held.shape[2:]) for held in tensors]


def move_to_front(tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Move slots ``[H, k]``, ascending, to the front of each of a row's tensors ``[H, B, ...]``, in place.

    An eviction drops few slots of many. In the host's memory the stretches between them are moved as they are, which
    takes half the time of gathering slot by slot. On a device it is the number of operations that costs.
    """
    move = move_stretches if slots.is_cpu else move_gathered
    move(tensors, slots)


def move_gathered(tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Do so in two operations a tensor."""
    for held in tensors:
        held[:, : slots.shape[1]] = gather([held], slots)[0]


def move_stretches(tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Do so without a copy, stretch by stretch, for tensors on the host."""
    stretches = [list(_stretches(own)) for own in slots.numpy()]
    for held in tensors:
        # A view of memory moves bytes rightly where source and target overlap, and bytes are of any number type.
        rows = held.view(len(held), -1).view(torch.uint8).numpy()
        size = held.stride(1) * held.element_size()
        for own, moves in zip(rows, stretches, strict=True):
            data = memoryview(own)
            for source, target, length in moves:
                data[target * size : (target + length) * size] = data[source * size : (source + length) * size]


def _stretches(slots: npt.NDArray[np.integer]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of adjacent slots of a head that must move: the first slot, where it goes, and how many."""
    starts = [0, *(np.flatnonzero(slots[1:] - slots[:-1] > 1) + 1).tolist(), len(slots)]
    for target, end in pairwise(starts):
        source = int(slots[target]) if target < end else target
        if source != target:
            yield source, target, end - target
