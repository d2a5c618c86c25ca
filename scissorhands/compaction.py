"""Parting the slots of a row: what an eviction keeps goes to the front, in the order that it has; the rest is taken."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scissorhands.compiled import compiled
from scissorhands.snapshot import Keep

Words = tuple[npt.NDArray[np.integer], ...]


def part(tensors: Sequence[torch.Tensor], keep: Keep, length: int, taken: int, words: Words = ()) -> list[torch.Tensor]:
    """Move what is kept to the front of each of a row's tensors, in place, and copy out what is not.

    An eviction drops few slots of many, so on the host slot after slot is moved where it goes, if that is elsewhere. On
    a device it is the number of operations that costs.

    Args:
        tensors: ``[H, B, ...]`` each.
        keep: ``[H, n]`` over the first n slots, equally many True in each head; newer slots stay.
        length: Slots in use, at least n.
        taken: Of how many of the tensors, the first ones, what is not kept is wanted.
        words: The tensors' :func:`words_of`, if they are at hand.

    Returns:
        ``[H, d, ...]`` of each of these.
    """
    if tensors[0].is_cpu:
        return part_on_host(tensors, keep, length, taken, words)
    return part_on_device(tensors, keep, length, taken)


def part_on_host(
    tensors: Sequence[torch.Tensor], keep: Keep, length: int, taken: int, words: Words = ()
) -> list[torch.Tensor]:
    """Do so slot by slot, all tensors in one call."""
    words = words or words_of(tensors)
    dropped = keep.shape[1] - np.count_nonzero(keep[0])
    word = torch.int32 if words[0].dtype == np.int32 else torch.uint8
    found = [torch.empty(len(keep), dropped, held.shape[2], dtype=word) for held in words[:taken]]
    _part(words, tuple(own.numpy() for own in found), keep, length)
    return [
        own.view(tensor.dtype).view(len(keep), dropped, *tensor.shape[2:])
        for own, tensor in zip(found, tensors, strict=False)
    ]


def part_on_device(tensors: Sequence[torch.Tensor], keep: Keep, length: int, taken: int) -> list[torch.Tensor]:
    """Do so in two operations a tensor."""
    heads, decided = keep.shape
    staying = np.ones((heads, length), dtype=bool)
    staying[:, :decided] = keep
    gone, kept = (
        torch.from_numpy(np.nonzero(chosen)[1].reshape(heads, -1)).to(tensors[0].device)
        for chosen in (~staying, staying)
    )
    found = _gather(tensors[:taken], gone)
    for held, moved in zip(tensors, _gather(tensors, kept), strict=True):
        held[:, : kept.shape[1]] = moved
    return found


def _gather(tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> list[torch.Tensor]:
    """Copy slots ``[H, d]`` of each of a row's tensors ``[H, B, ...]``: ``[H, d, ...]`` each."""
    heads, capacity = tensors[0].shape[:2]
    # Selecting along one dimension copies whole slots, where an index for each of two copies them number by number.
    chosen = (slots + capacity * torch.arange(heads, device=slots.device).unsqueeze(1)).flatten()
    return [held.flatten(0, 1).index_select(0, chosen).view(*slots.shape, *held.shape[2:]) for held in tensors]


def words_of(tensors: Sequence[torch.Tensor]) -> Words:
    """Return tensors of the host as ``[H, B, words of a slot]`` each, in the same memory, whatever their number types.

    Words are int32, which move faster than bytes, or uint8 where a slot's bytes are no multiple of four.
    """
    sizes = [tensor.shape[2:].numel() * tensor.element_size() for tensor in tensors]
    word = torch.uint8 if any(size % 4 for size in sizes) else torch.int32
    # By way of bytes: those of several elements may make one word.
    return tuple(
        tensor.view(*tensor.shape[:2], tensor.shape[2:].numel()).view(torch.uint8).view(word).numpy()
        for tensor in tensors
    )


@compiled
def _part(held: Any, taken: Any, keep: Any, length: int) -> None:
    heads, decided = keep.shape
    for index in range(len(held)):
        for head in range(heads):
            slots = held[index][head]
            target, gone = 0, 0
            for slot in range(length):
                if slot >= decided or keep[head, slot]:
                    if target < slot:
                        slots[target] = slots[slot]
                    target += 1
                elif index < len(taken):
                    taken[index][head, gone] = slots[slot]
                    gone += 1
