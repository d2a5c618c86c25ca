"""A row's whole state as one string of bytes, and the exact inverse.

The bytes are the token ids that the row has seen, then for each layer of its pool the tensors that hold a share of each
slot (keys and values as they are stored, positions, the state of every signal), cut to the slots in use. Nothing is
encoded or decoded on the way, so a row that is restored goes on as if it had never been away.

A snapshot in flight is not part of it. Between turns there is none to save: what comes next is a prompt, before which
the cache forgets it (:meth:`~scissorhands.cache.ResidentCache.prepare_prefill`). Whoever saves a row in the middle of
an answer keeps :attr:`~scissorhands.row.Row.pending` beside it.
"""

from collections.abc import Sequence
from typing import Protocol

from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.places import Place, extent, gather, place_behind, scatter
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
    return extent(_places(row, row.lengths, row.step), _ids_bytes(row.step))


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
    return gather(_places(row, row.lengths, row.step), row.pool.layers[0].keys.device, token_bytes(ids))


def restore(row: Row, saved: SavedRow, data: bytearray | memoryview, ids: Sequence[int]) -> None:
    """Put a saved state into an empty row, all of it or nothing.

    Args:
        row: A row that has seen nothing, under a grant that takes the state (:func:`~scissorhands.suspended.takes`).
        saved: What was saved.
        data: Its bytes, whose checksums have been checked.
        ids: The token ids that it must have seen.

    Raises:
        CorruptRowError: The state does not fit the row. The row is still empty.
    """
    if row.step or len(saved.lengths) != len(row.lengths):
        raise CorruptRowError(f"{len(saved.lengths)} layers do not fit a row of {len(row.lengths)}")
    for length, most in zip(saved.lengths, row.grant.layer_slots, strict=True):
        if length > min(most, saved.step):
            raise CorruptRowError(f"{length} slots do not fit into {most}")
    places = _places(row, saved.lengths, saved.step)
    wanted = extent(places, _ids_bytes(saved.step))
    if len(data) != wanted:
        raise CorruptRowError(f"the state is {len(data)} bytes instead of {wanted}")
    head = token_bytes(ids)
    if len(ids) != saved.step or bytes(data[: len(head)]) != head:
        raise CorruptRowError("the state is of other tokens")
    scatter(data, places, row.pool.layers[0].keys.device)
    row.lengths = list(saved.lengths)
    row.step, row.epoch, row.prompt = saved.step, saved.epoch, saved.prompt


def _places(row: Row, lengths: Sequence[int], step: int) -> list[Place]:
    """Return where each tensor's slots in use go; tensors without bytes have no place."""
    places: list[Place] = []
    for layer, length in zip(row.pool.layers, lengths, strict=True):
        for tensor in layer.tensors():
            end = extent(places, _ids_bytes(step))
            place = place_behind(end, tensor[row.index], slice(length), min(length, tensor.shape[2]))
            if place:
                places.append(place)
    return places


def _ids_bytes(step: int) -> int:
    return len(token_bytes((0,))) * step
