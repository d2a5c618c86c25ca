"""A row's whole state as one string of bytes, and the exact inverse.

The bytes are the token ids that the row has seen, then for each layer of its pool the tensors that hold a share of each
slot (keys and values as they are stored, positions, the state of every signal), cut to the slots in use. Nothing is
encoded or decoded on the way, so a row that is restored goes on as if it had never been away.

A snapshot in flight is not part of it. Between turns there is none to save: what comes next is a prompt, before which
the cache forgets it (:meth:`~scissorhands.cache.ResidentCache.prepare_prefill`). Whoever saves a row in the middle of
an answer keeps :attr:`~scissorhands.row.Row.pending` beside it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.incoming import Incoming, RowState
from scissorhands.places import Place, extent, flat, gather, places_behind
from scissorhands.row import Row
from scissorhands.suspended import token_bytes


class SavedRow(Protocol):
    """The numbers of a row that was saved; see :class:`~scissorhands.suspended.Manifest`."""

    @property
    def step(self) -> int:
        """Tokens seen."""

    @property
    def epoch(self) -> int:
        """Evictions applied."""

    @property
    def prompt(self) -> int:
        """Position after the last token that was read as a prompt."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of each layer of its pool, n."""


def state_bytes(row: Row) -> int:
    """Return the bytes of a row's state."""
    return extent(flat(_places(row, row.lengths, row.step)), _ids_bytes(row.step))


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
    places = flat(_places(row, row.lengths, row.step))
    return gather(places, row.pool.layers[0].keys.device, token_bytes(ids))


def restore(row: Row, saved: SavedRow, data: bytearray | memoryview, ids: Sequence[int]) -> None:
    """Put a saved state into an empty row, all of it or nothing.

    Raises:
        CorruptRowError: As :func:`incoming`, or the state is of other tokens. The row is still empty.
    """
    incoming(row, saved, data, ids).put_all()


def incoming(row: Row, saved: SavedRow, data: bytearray | memoryview, ids: Sequence[int]) -> Incoming:
    """Make sure that a saved state fits an empty row, and return what puts it there.

    Args:
        row: A row that has seen nothing, under a grant that takes the state (:func:`~scissorhands.suspended.takes`).
        saved: What was saved.
        data: Its bytes, whose checksums have been checked, or will be before they are put anywhere.
        ids: The token ids that it must have seen.

    Raises:
        CorruptRowError: The state does not fit the row.
    """
    if row.step or len(saved.lengths) != len(row.lengths):
        raise CorruptRowError(f"{len(saved.lengths)} layers do not fit a row of {len(row.lengths)}")
    for length, most in zip(saved.lengths, row.grant.layer_slots, strict=True):
        if length > min(most, saved.step):
            raise CorruptRowError(f"{length} slots do not fit into {most}")
    if len(ids) != saved.step:
        raise CorruptRowError("the state is of other tokens")
    state = RowState(saved.lengths, saved.step, saved.epoch, saved.prompt)
    places = partial(_places, row, saved.lengths, saved.step)
    return Incoming(row, state, [data], [places], token_bytes(ids))


def _places(row: Row, lengths: Sequence[int], step: int) -> list[list[Place]]:
    """Return where each layer's slots in use go; tensors without bytes have no place."""
    places: list[list[Place]] = []
    end = _ids_bytes(step)
    for layer, length in zip(row.pool.layers, lengths, strict=True):
        own = [(tensor[row.index], slice(length), min(length, tensor.shape[2])) for tensor in layer.tensors()]
        places.append(places_behind(end, own))
        end = extent(places[-1], end)
    return places


def _ids_bytes(step: int) -> int:
    return len(token_bytes((0,))) * step
