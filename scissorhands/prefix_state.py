"""What a row is at a boundary of its prompt as bytes (:mod:`scissorhands.prefix`), and the exact inverse.

Two strings of bytes: keys, values and positions of the tokens since another boundary, and the evidence of all slots.
Nothing is encoded or decoded on the way. A row that is put together from them is the one that had read the tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.incoming import Incoming, RowState
from scissorhands.places import Index, Place, extent, flat, gather, places_behind
from scissorhands.prefix import PrefixManifest
from scissorhands.row import Row
from scissorhands.sliding import SlidingLayer


class SavedPrefix(NamedTuple):
    """The bytes of a boundary."""

    grown: memoryview
    evidence: memoryview


class PrefixPiece(NamedTuple):
    """What has come from the store of one boundary, all checksums checked; without evidence unless it is the last."""

    manifest: PrefixManifest
    grown: memoryview
    evidence: memoryview


def state_bytes(row: Row, start: int) -> int:
    """Return the bytes of what :func:`save` copies."""
    lengths = row.lengths
    return extent(flat(_grown(row, lengths, start, row.step))) + extent(flat(_evidence(row, lengths)))


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
    device = row.pool.layers[0].keys.device
    grown, evidence = _grown(row, lengths, start, step), _evidence(row, lengths)
    return SavedPrefix(gather(flat(grown), device), gather(flat(evidence), device))


def put(row: Row, chain: Sequence[PrefixPiece]) -> None:
    """Make an empty row what was stored, all of it or nothing.

    Raises:
        CorruptRowError: As :func:`incoming`. The row is still empty.
    """
    incoming(row, chain).put_all()


def incoming(row: Row, chain: Sequence[PrefixPiece]) -> Incoming:
    """Make sure that what was stored fits an empty row, and return what puts it there.

    Args:
        row: A row that has seen nothing, under a grant of the same identity.
        chain: Boundaries that go on from one another, the first from nothing. Of their bytes some may still be missing.

    Raises:
        CorruptRowError: They do not fit the row.
    """
    buffers: list[memoryview] = []
    places: list[Callable[[], list[list[Place]]]] = []
    at = 0
    for manifest, grown, _ in chain:
        if row.step or manifest.start != at or len(manifest.lengths) != len(row.lengths):
            raise CorruptRowError(f"what begins at {manifest.start} does not go on from {at}")
        for layer, length, most in zip(row.pool.layers, manifest.lengths, row.grant.layer_slots, strict=True):
            least = 0 if layer.window else manifest.start
            if not least <= length <= min(most, manifest.step):
                raise CorruptRowError(f"{length} slots do not fit into {most}")
        buffers.append(grown)
        places.append(partial(_grown, row, manifest.lengths, manifest.start, manifest.step))
        at = manifest.step
    last = chain[-1]
    buffers.append(last.evidence)
    places.append(partial(_evidence, row, last.manifest.lengths))
    return Incoming(row, RowState(last.manifest.lengths, at, last.manifest.epoch, at), buffers, places)


def _grown(row: Row, lengths: Sequence[int], begin: int, step: int) -> list[list[Place]]:
    """Return where each layer's keys, values and positions since ``begin`` go; a ring holds the newest of them."""
    places: list[list[Place]] = []
    end = 0
    for layer, length in zip(row.pool.layers, lengths, strict=True):
        if isinstance(layer, SlidingLayer):
            count = min(step - begin, layer.slots)
            slots: Index = torch.arange(step - count, step, device=layer.keys.device) % layer.slots
        else:
            count, slots = length - begin, slice(begin, length)
        # A ring has no positions: of those tensors there are no bytes.
        own = [(tensor[row.index], slots, count) for tensor in (layer.keys, layer.values, layer.positions)]
        places.append(places_behind(end, own))
        end = extent(places[-1], end)
    return places


def _evidence(row: Row, lengths: Sequence[int]) -> list[list[Place]]:
    """Return where the signals' states of each layer's slots in use go."""
    places: list[list[Place]] = []
    end = 0
    for layer, length in zip(row.pool.layers, lengths, strict=True):
        places.append(places_behind(end, [(state[row.index], slice(length), length) for state in layer.states]))
        end = extent(places[-1], end)
    return places
