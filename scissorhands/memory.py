"""Moves within the host's memory: what an eviction does to a row's layers, or a snapshot copies of them, in one call.

A row of a small model has a hundred layers and heads of a few hundred slots each: with calls of numpy or torch for each
of them, most of the time goes to the calls.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scissorhands.compiled import compiled

Tensors = Sequence[torch.Tensor]


def _move_code(typing: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy ``size`` bytes from address to address; they may overlap."""
    del typing, target, source, size

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        target, source, size = arguments
        to, of = (builder.inttoptr(address, cgutils.voidptr_t) for address in (target, source))
        cgutils.raw_memmove(builder, to, of, size, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _clear_code(typing: Any, target: Any, size: Any) -> Any:
    """Set ``size`` bytes from an address on to zero."""
    del typing, target, size

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        cgutils.memset(builder, builder.inttoptr(arguments[0], cgutils.voidptr_t), arguments[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


_move: Any = intrinsic(_move_code)
_clear: Any = intrinsic(_clear_code)


@compiled
def part(held: Any, sizes: Any, slots: Any, lengths: Any, keep: Any, decided: Any, taken: Any, shape: Any) -> None:
    """Move what is kept to the front, in the order that it has, and copy out what is not; what is freed becomes zero.

    Args:
        held: ``[layers, tensors]`` int64, addresses of a row's ``[heads, slots, ...]``.
        sizes: ``[tensors]`` int64, bytes of a slot.
        slots: ``[layers]`` int64, capacity of a head.
        lengths: ``[layers]`` int64, slots in use.
        keep: Bool, layer after layer, ``[heads, decided]`` of each: the first slots; newer ones stay.
        decided: ``[layers]`` int64.
        taken: Addresses of ``[layers, heads, dropped, ...]``, where the first tensors' dropped slots go, int64.
        shape: Heads; slots that each head drops; the first tensor whose freed slots are zeroed, the rest are left.

    Raises:
        ValueError: A head does not drop as many; it and those after it are as they were.
    """
    layers, tensors = held.shape
    heads, dropped, cleared = shape
    gone = np.empty(dropped + 1, np.int64)
    at = 0
    for layer in range(layers):
        for head in range(heads):
            found = 0
            for slot in range(decided[layer]):
                if not keep[at + slot]:
                    gone[min(found, dropped)] = slot
                    found += 1
            if found != dropped:
                raise ValueError("heads drop different numbers of slots")
            at += decided[layer]
            gone[dropped] = lengths[layer]
            for tensor in range(tensors):
                size = sizes[tensor]
                start = held[layer, tensor] + head * slots[layer] * size
                for own in range(dropped):
                    hole = start + gone[own] * size
                    if tensor < len(taken):
                        _move(taken[tensor] + ((layer * heads + head) * dropped + own) * size, hole, size)
                    _move(hole - own * size, hole + size, (gone[own + 1] - gone[own] - 1) * size)
                if tensor >= cleared:
                    _clear(start + (lengths[layer] - dropped) * size, dropped * size)


@compiled
def gather(held: Any, sizes: Any, slots: Any, lengths: Any, copies: Any, heads: int) -> None:
    """Copy the slots in use of each head, one after the other, without what is free between them.

    Args:
        held: ``[layers, tensors]`` int64, addresses of a row's ``[heads, slots, ...]``.
        sizes: ``[tensors]`` int64, bytes of a slot.
        slots: ``[layers]`` int64, capacity of a head.
        lengths: ``[layers]`` int64, slots in use.
        copies: ``[tensors]`` int64, addresses of where they go.
        heads: Heads of a layer.
    """
    layers, tensors = held.shape
    for tensor in range(tensors):
        size, target = sizes[tensor], copies[tensor]
        for layer in range(layers):
            count = lengths[layer] * size
            for head in range(heads):
                _move(target, held[layer, tensor] + head * slots[layer] * size, count)
                target += count


def addresses_of(layers: Sequence[Tensors]) -> npt.NDArray[np.int64]:
    """Return ``[layers, tensors]``, where the tensors of each layer begin in the host's memory."""
    return np.array([[tensor.data_ptr() for tensor in own] for own in layers], dtype=np.int64)


def slot_bytes(tensors: Tensors) -> npt.NDArray[np.int64]:
    """Return the bytes of a slot in each of some tensors ``[H, B, ...]``."""
    return np.array([tensor.shape[2:].numel() * tensor.element_size() for tensor in tensors], dtype=np.int64)


def slots_of(layers: Sequence[Tensors]) -> npt.NDArray[np.int64]:
    """Return B of each layer."""
    return np.array([own[0].shape[1] for own in layers], dtype=np.int64)
