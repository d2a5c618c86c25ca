"""Compaction: what an eviction keeps of a row goes to the front, in the order that it has; the rest is taken out."""

from collections.abc import Sequence

import numpy as np
import torch

from scissorhands.layer_pool import LayerPool
from scissorhands.memory import Tensors, addresses_of, part, slot_bytes, slots_of
from scissorhands.slots import Slots
from scissorhands.snapshot import Keep

# Of a layer's tensors, those of which an eviction takes slots out: keys, values, positions, mass; and the first that
# holds evidence.
_TAKEN = 4
_EVIDENCE = 3


def evict(layers: Sequence[LayerPool], row: int, lengths: Sequence[int], keep: Sequence[Keep]) -> list[Slots]:
    """Take slots out of layers of a row; those that stay move to the front, and the rest of the row is free.

    Args:
        layers: Layers of one pool.
        row: The row.
        lengths: Of each layer its slots in use.
        keep: Of each layer ``[H, n]`` over its first n slots, equally many True in each head; newer ones stay. Of a
            sliding layer a plan knows no slots: what leaves its window is of no use to anybody.

    Returns:
        Of each layer a copy of what was evicted.
    """
    part_layers = part_on_host if layers[0].keys.is_cpu else part_on_device
    found: dict[int, Slots] = {}
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index, (layer, own) in enumerate(zip(layers, keep, strict=True)):
        if dropped := dropped_by(own):
            alike.setdefault((dropped, layer.keys.shape[3], layer.values.shape[3]), []).append(index)
        else:
            found[index] = layer.no_slots()
    for indices in alike.values():
        tensors, own_keep, own_lengths = zip(
            *((layers[index].of_row(row), keep[index], lengths[index]) for index in indices), strict=True
        )
        parted = part_layers(tensors, own_keep, own_lengths, _TAKEN, _EVIDENCE)
        for index, (keys, values, positions, mass) in zip(indices, parted, strict=True):
            found[index] = Slots(keys, values, positions, mass, packed=layers[index].codec is not None)
    return [found[index] for index in range(len(layers))]


def part_on_host(
    layers: Sequence[Tensors], keep: Sequence[Keep], lengths: Sequence[int], taken: int, cleared: int
) -> list[list[torch.Tensor]]:
    """Part the slots of several layers of a row, in place, all of them in one call.

    Args:
        layers: Of each layer tensors ``[H, B, ...]``, contiguous; layers are alike in all but B.
        keep: Of each layer ``[H, n]`` over its first n slots. Every head of every layer drops equally many; newer slots
            stay.
        lengths: Of each layer its slots in use, at least n.
        taken: Of how many of the tensors, the first ones, what is not kept is wanted.
        cleared: The first of the tensors of which what becomes free is set to zero.

    Returns:
        Of each layer ``[H, d, ...]`` of each of the tensors that are wanted.
    """
    first = layers[0]
    heads, dropped = len(first[0]), dropped_by(keep[0])
    found = [
        torch.empty(len(layers), heads, dropped, *held.shape[2:], dtype=held.dtype, device=held.device)
        for held in first[:taken]
    ]
    decided = np.array([own.shape[1] for own in keep])
    targets = np.array([own.data_ptr() for own in found])
    part(
        addresses_of(layers), slot_bytes(first), slots_of(layers), np.array(lengths),
        np.concatenate([own.ravel() for own in keep]), decided, targets, (heads, dropped, cleared),
    )  # fmt: skip
    return [list(own) for own in zip(*(each.unbind() for each in found), strict=True)]


def part_on_device(
    layers: Sequence[Tensors], keep: Sequence[Keep], lengths: Sequence[int], taken: int, cleared: int
) -> list[list[torch.Tensor]]:
    """Do so in two operations a tensor, of which the number counts on a device."""
    return [_part_layer(*each, taken, cleared) for each in zip(layers, keep, lengths, strict=True)]


def dropped_by(keep: Keep) -> int:
    """Return how many slots each head of a layer drops."""
    return int(keep.shape[1] - np.count_nonzero(keep[0]))


def _part_layer(tensors: Tensors, keep: Keep, length: int, taken: int, cleared: int) -> list[torch.Tensor]:
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
    for state in tensors[cleared:]:
        state[:, kept.shape[1] : length].zero_()
    return found


def _gather(tensors: Tensors, slots: torch.Tensor) -> list[torch.Tensor]:
    """Copy slots ``[H, d]`` of each of a row's tensors ``[H, B, ...]``: ``[H, d, ...]`` each."""
    heads, capacity = tensors[0].shape[:2]
    # Selecting along one dimension copies whole slots, where an index for each of two copies them number by number.
    chosen = (slots + capacity * torch.arange(heads, device=slots.device).unsqueeze(1)).flatten()
    return [held.flatten(0, 1).index_select(0, chosen).view(*slots.shape, *held.shape[2:]) for held in tensors]
