"""A row's state on its way into an empty row: each layer is put in place as soon as its bytes are there.

So a forward pass may begin before all bytes have come: it waits before each layer for what that layer needs, while what
the next ones need goes on coming. LMCache loads layer by layer, too.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from scissorhands.errors import CorruptRowError
from scissorhands.places import Place, extent, scatter
from scissorhands.row import Row


class RowState(NamedTuple):
    """What a row is once its state is in place; see :class:`~scissorhands.row.Row`."""

    lengths: tuple[int, ...]
    step: int
    epoch: int
    prompt: int


class Incoming:
    """A state on its way.

    Args:
        row: The row, which has seen nothing.
        state: What it will be.
        buffers: The bytes, of which some may still be missing.
        places: For each buffer, what tells where its bytes go now in each layer of the pool, in the order of the bytes.
        head: What the first buffer begins with.

    Raises:
        CorruptRowError: A buffer has not as many bytes as its places take.
    """

    def __init__(
        self,
        row: Row,
        state: RowState,
        buffers: Sequence[bytearray | memoryview],
        places: Sequence[Callable[[], Sequence[Sequence[Place]]]],
        head: bytes = b"",
    ) -> None:
        self._row = row
        self._state = state
        self._buffers = buffers
        self._where = places
        self._head = head
        self._put = 0
        self._seat: tuple[int, torch.Tensor] | None = None
        self._places: list[Sequence[Sequence[Place]]] = []
        self._look()
        # Of each buffer, the byte after the last of each layer.
        self._ends = [list(accumulate((extent(own) for own in each), max, initial=len(head))) for each in self._places]
        for data, ends in zip(buffers, self._ends, strict=True):
            if len(data) != ends[-1]:
                raise CorruptRowError(f"the state is {len(data)} bytes instead of {ends[-1]}")

    def begin(self) -> None:
        """Let the row be what it will be; its layers still have to be put in place."""
        state = self._state
        self._row.lengths = list(state.lengths)
        self._row.step, self._row.epoch, self._row.prompt = state.step, state.epoch, state.prompt

    def needed(self, layer: int) -> list[int]:
        """Return how many bytes of each buffer the layers of the pool up to this one take."""
        return [ends[layer + 1] for ends in self._ends]

    def put(self, layer: int) -> None:
        """Put the layers up to this one in place; those that are stay as they are.

        Raises:
            CorruptRowError: The bytes are of other tokens.
        """
        self._check_head()
        self._look()
        device = self._row.pool.layers[0].keys.device
        for index in range(self._put, layer + 1):
            for data, each in zip(self._buffers, self._places, strict=True):
                scatter(data, each[index], device)
        self._put = max(self._put, layer + 1)

    def put_all(self) -> None:
        """Put all of it in place, or nothing.

        Raises:
            CorruptRowError: The bytes are of other tokens. The row is still empty.
        """
        self._check_head()
        self.begin()
        self.put(len(self._row.lengths) - 1)

    def _look(self) -> None:
        """Find out where the row is now: as long as others come and go, it moves."""
        index, keys = self._row.index, self._row.pool.layers[0].keys
        if self._seat is None or self._seat[0] != index or self._seat[1] is not keys:
            self._seat = index, keys
            self._places = [where() for where in self._where]

    def _check_head(self) -> None:
        if bytes(self._buffers[0][: len(self._head)]) != self._head:
            raise CorruptRowError("the state is of other tokens")
