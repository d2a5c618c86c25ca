"""A row's whole state as one string of bytes, and the exact inverse.

The bytes are the token ids that the row has seen, then for each layer of its pool the tensors that hold a share of each
slot (keys and values as they are stored, positions, the state of every signal), cut to the slots in use. Nothing is
encoded or decoded on the way, so a row that is restored goes on as if it had never been away.

A row is saved between turns. What comes next is a prompt, before which the cache forgets a snapshot in flight
(:meth:`~scissorhands.cache.ResidentCache.prepare_prefill`); so there is none to save.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.row import Row
from scissorhands.suspended import Manifest, token_bytes

# Where every tensor begins: a multiple of the largest element, so that bytes can be viewed as its numbers.
_ALIGNMENT = 16


class _Place(NamedTuple):
    """Where the slots in use of one tensor ``[kv_heads, n, ...]`` lie in the bytes."""

    slots: torch.Tensor
    start: int
    size: int


def state_bytes(row: Row) -> int:
    """Return the bytes of a row's state."""
    places = list(_places(row, row.lengths, row.step))
    return places[-1].start + places[-1].size if places else _ids_bytes(row.step)


def save(row: Row, ids: Sequence[int]) -> memoryview:
    """Copy a row's state to the host, in one transfer.

    Args:
        row: The row, between two forward passes.
        ids: The token ids that it has seen.

    Raises:
        EngineError: The row is in the middle of a pass, or has not seen these tokens.
    """
    if row.observed_layers or len(ids) != row.step:
        raise EngineError(f"a row that has seen {row.step} tokens cannot be saved with {len(ids)} ids, or in a pass")
    data = torch.zeros(state_bytes(row), dtype=torch.uint8, device=row.pool.layers[0].keys.device)
    head = token_bytes(ids)
    if head:
        data[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for slots, start, size in _places(row, row.lengths, row.step):
        own = data[start : start + size].view(slots.dtype).view(slots.shape)
        own.copy_(slots)
    return memoryview(data.cpu().numpy())  # type: ignore[arg-type] # An array is a buffer; numpy's types cannot tell.


def restore(row: Row, manifest: Manifest, data: bytearray | memoryview, ids: Sequence[int]) -> None:
    """Put a saved state into an empty row, all of it or nothing.

    Args:
        row: A row that has seen nothing, under a grant that takes the state (:func:`~scissorhands.suspended.takes`).
        manifest: What was saved.
        data: Its bytes, whose checksums have been checked.
        ids: The token ids that it must have seen.

    Raises:
        CorruptRowError: The state does not fit the row. The row is still empty.
    """
    if row.step or len(manifest.lengths) != len(row.lengths):
        raise CorruptRowError(f"{len(manifest.lengths)} layers do not fit a row of {len(row.lengths)}")
    for length, most in zip(manifest.lengths, row.grant.layer_slots, strict=True):
        if length > min(most, manifest.step):
            raise CorruptRowError(f"{length} slots do not fit into {most}")
    places = list(_places(row, manifest.lengths, manifest.step))
    wanted = places[-1].start + places[-1].size if places else _ids_bytes(manifest.step)
    if len(data) != wanted:
        raise CorruptRowError(f"the state is {len(data)} bytes instead of {wanted}")
    head = token_bytes(ids)
    if len(ids) != manifest.step or bytes(data[: len(head)]) != head:
        raise CorruptRowError("the state is of other tokens")
    bytes_ = torch.frombuffer(data, dtype=torch.uint8).to(row.pool.layers[0].keys.device)
    for slots, start, size in places:
        slots.copy_(bytes_[start : start + size].view(slots.dtype).view(slots.shape))
    row.lengths = list(manifest.lengths)
    row.step, row.epoch, row.prompt = manifest.step, manifest.epoch, manifest.prompt


def _places(row: Row, lengths: Sequence[int], step: int) -> Iterator[_Place]:
    """Yield where each tensor's slots in use go; tensors without bytes have no place."""
    end = _ids_bytes(step)
    for layer, length in zip(row.pool.layers, lengths, strict=True):
        for tensor in layer.tensors():
            slots = tensor[row.index, :, :length]
            size = slots.numel() * slots.element_size()
            if size:
                start = -(-end // _ALIGNMENT) * _ALIGNMENT
                yield _Place(slots, start, size)
                end = start + size


def _ids_bytes(step: int) -> int:
    return len(token_bytes((0,))) * step
