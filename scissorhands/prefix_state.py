"""What a row is at a boundary of its prompt as bytes (:mod:`scissorhands.prefix`), and the exact inverse.

Two strings of bytes: keys, values and positions of the tokens since another boundary, and the evidence of all slots.
Nothing is encoded or decoded on the way. A row that is put together from them is the one that had read the tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.prefix import PrefixManifest
from scissorhands.row import Row
from scissorhands.sliding import SlidingLayer

# Where every tensor begins: a multiple of the largest element, so that bytes can be viewed as its numbers.
_ALIGNMENT = 16

Index = slice | torch.Tensor


class SavedPrefix(NamedTuple):
    """The bytes of a boundary."""

    grown: memoryview
    evidence: memoryview


class PrefixPiece(NamedTuple):
    """What has come from the store of one boundary, all checksums checked; without evidence unless it is the last."""

    manifest: PrefixManifest
    grown: memoryview
    evidence: memoryview


class _Place(NamedTuple):
    """Where slots of one tensor ``[kv_heads, B, ...]`` of a row lie in the bytes."""

    tensor: torch.Tensor
    slots: Index
    shape: tuple[int, ...]
    start: int
    size: int


def state_bytes(row: Row, start: int) -> int:
    """Return the bytes of what :func:`save` copies."""
    lengths = row.lengths
    return sum(_extent(list(found)) for found in (_grown(row, lengths, start, row.step), _evidence(row, lengths)))


def save(row: Row, start: int) -> SavedPrefix:
    """Copy a row's state to the host.

    Args:
        row: The row, between two chunks of its prompt.
        start: Tokens of the boundary that it goes on from; 0 if it has evicted.

    Raises:
        EngineError: The row is in the middle of a pass, or has evicted what came since ``start``.
    """
    if row.observed_layers or (row.epoch and start) or not start < row.step:
        raise EngineError(f"a row of {row.step} tokens and {row.epoch} evictions has nothing to save from {start} on")
    lengths, step = row.lengths, row.step
    return SavedPrefix(_read(row, _grown(row, lengths, start, step)), _read(row, _evidence(row, lengths)))


def put(row: Row, chain: Sequence[PrefixPiece]) -> None:
    """Make an empty row what was stored, all of it or nothing.

    Args:
        row: A row that has seen nothing, under a grant of the same identity.
        chain: Boundaries that go on from one another, the first from nothing.

    Raises:
        CorruptRowError: They do not fit the row. The row is still empty.
    """
    writes: list[tuple[memoryview, list[_Place]]] = []
    at = 0
    for manifest, grown, _ in chain:
        if row.step or manifest.start != at or len(manifest.lengths) != len(row.lengths):
            raise CorruptRowError(f"what begins at {manifest.start} does not go on from {at}")
        for layer, length, most in zip(row.pool.layers, manifest.lengths, row.grant.layer_slots, strict=True):
            least = 0 if layer.window else manifest.start
            if not least <= length <= min(most, manifest.step):
                raise CorruptRowError(f"{length} slots do not fit into {most}")
        writes.append((grown, list(_grown(row, manifest.lengths, manifest.start, manifest.step))))
        at = manifest.step
    last = chain[-1]
    writes.append((last.evidence, list(_evidence(row, last.manifest.lengths))))
    for data, places in writes:
        wanted = _extent(places)
        if len(data) != wanted:
            raise CorruptRowError(f"there are {len(data)} bytes instead of {wanted}")
    for data, places in writes:
        _write(row, data, places)
    row.lengths = list(last.manifest.lengths)
    row.step, row.epoch, row.prompt = last.manifest.step, last.manifest.epoch, last.manifest.step


def _read(row: Row, found: Iterator[_Place]) -> memoryview:
    places = list(found)
    data = torch.zeros(_extent(places), dtype=torch.uint8, device=row.pool.layers[0].keys.device)
    for tensor, slots, shape, start, size in places:
        data[start : start + size].view(tensor.dtype).view(shape).copy_(tensor[:, slots])
    return memoryview(data.cpu().numpy())  # type: ignore[arg-type] # An array is a buffer; numpy's types cannot tell.


def _write(row: Row, data: memoryview, places: list[_Place]) -> None:
    if not places:
        return
    held = torch.frombuffer(data, dtype=torch.uint8).to(row.pool.layers[0].keys.device)
    for tensor, slots, shape, start, size in places:
        tensor[:, slots] = held[start : start + size].view(tensor.dtype).view(shape)


def _grown(row: Row, lengths: Sequence[int], begin: int, step: int) -> Iterator[_Place]:
    """Yield the places of keys, values and positions that came since ``begin``; a ring holds the newest of them."""
    end = 0
    for layer, length in zip(row.pool.layers, lengths, strict=True):
        if isinstance(layer, SlidingLayer):
            count = min(step - begin, layer.slots)
            slots: Index = torch.arange(step - count, step, device=layer.keys.device) % layer.slots
        else:
            count, slots = length - begin, slice(begin, length)
        # A ring has no positions: of those tensors there are no bytes.
        for tensor in (layer.keys, layer.values, layer.positions):
            place = _place(tensor[row.index], slots, count, end)
            if place:
                yield place
                end = place.start + place.size


def _evidence(row: Row, lengths: Sequence[int]) -> Iterator[_Place]:
    """Yield the places of the signals' states of all slots in use."""
    end = 0
    for layer, length in zip(row.pool.layers, lengths, strict=True):
        for state in layer.states:
            place = _place(state[row.index], slice(length), length, end)
            if place:
                yield place
                end = place.start + place.size


def _place(tensor: torch.Tensor, slots: Index, count: int, end: int) -> _Place | None:
    shape = (tensor.shape[0], count, *tensor.shape[2:])
    size = tensor.element_size() * torch.Size(shape).numel() if tensor.shape[1] else 0
    start = -(-end // _ALIGNMENT) * _ALIGNMENT
    return _Place(tensor, slots, shape, start, size) if size else None


def _extent(places: Sequence[_Place]) -> int:
    return places[-1].start + places[-1].size if places else 0
