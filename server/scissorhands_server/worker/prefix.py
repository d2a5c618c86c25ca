"""A request's prefix: what its row begins with, and which boundaries of its prompt it leaves for others."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.incoming import Incoming
from scissorhands.prefix import Boundary
from scissorhands.prefix_state import PrefixPiece, SavedPrefix, incoming, save, state_bytes
from scissorhands.row import Row
from scissorhands_server.worker.arrival import Arrival
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.prefix_metrics import PrefixMetrics
from scissorhands_server.worker.prefix_rates import Rates

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedPrefix:
    """A prefix that comes from the store.

    Args:
        pieces: What was stored at its boundaries.
        arrival: Where their bytes come, all checked.
    """

    pieces: tuple[PrefixPiece, ...]
    arrival: Arrival


@dataclass(frozen=True)
class PassedBoundary:
    """A boundary that a row has passed, on its way to the store.

    Args:
        boundary: The boundary.
        epoch: Evictions applied.
        lengths: n of each layer of the row's pool.
        saved: The bytes.
    """

    boundary: Boundary
    epoch: int
    lengths: tuple[int, ...]
    saved: SavedPrefix

    @property
    def size(self) -> int:
        """Bytes of memory that it takes."""
        return len(self.saved.grown) + len(self.saved.evidence)


class Sender(Protocol):
    """Sends boundaries to the store."""

    def sending(self, key: bytes) -> bool:
        """Whether a boundary is on its way already."""

    def send(self, passed: PassedBoundary) -> None:
        """Send a boundary, some time; gives its memory back."""


@dataclass
class Prefix:
    """The engine's thread restores and passes; before that the event loop owns all of it.

    Args:
        memory: What bounds the bytes of rows.
        metrics: Where what becomes of prefixes is counted.
        rates: Where the speed of reading is noted.
        sender: Sends boundaries.
        loaded: What to begin with; None reads the whole prompt.
        wanted: The boundaries to leave in the store, by their places.
        tokens: Tokens that the row began with.
    """

    memory: Memory
    metrics: PrefixMetrics
    rates: Rates
    sender: Sender
    loaded: LoadedPrefix | None = None
    wanted: dict[int, Boundary] = field(default_factory=dict)
    tokens: int = 0

    def want(self, boundaries: Iterable[Boundary]) -> None:
        """Leave these boundaries in the store."""
        self.wanted |= {boundary.step: boundary for boundary in boundaries}

    def incoming(self, row: Row, ids: Sequence[int]) -> tuple[Incoming, Arrival] | None:
        """Return what puts the prefix in an empty row; what does not fit is dropped and counted."""
        del ids  # A prefix is known by its key, which is of them.
        if self.loaded is None:
            return None
        try:
            return incoming(row, self.loaded.pieces), self.loaded.arrival
        except CorruptRowError:
            LOGGER.exception("a prefix does not fit its row; the prompt is read")
            self.lost(corrupt=True)
            return None

    def arrived(self) -> None:
        """Take note that a row has all of the prefix."""
        assert self.loaded is not None
        self.tokens = self.loaded.pieces[-1].manifest.step
        self.metrics.lookups.labels("hit").inc()
        self.metrics.tokens.inc(self.tokens)
        self.metrics.saved.inc(max(0.0, self.rates.reading(self.tokens) - self.loaded.arrival.seconds))
        self.drop()

    def lost(self, *, corrupt: bool) -> None:
        """Take note that the prefix is not used; why it has not come, has been counted."""
        if corrupt:
            self.metrics.lookups.labels("corrupt").inc()
        self.drop()

    def passed(self, row: Row, tokens: int, seconds: float | None) -> None:
        """Keep a boundary that the row has reached, if it is wanted and there is memory for it.

        Args:
            row: The row, behind a chunk of its prompt.
            tokens: Tokens of the chunk.
            seconds: How long reading it took; None if it had to wait meanwhile.
        """
        if seconds is not None:
            self.rates.read(tokens, seconds)
        boundary = self.wanted.pop(row.step, None)
        # What a row has evicted from is never stored as if it had not.
        if boundary is None or boundary.whole != (row.epoch > 0) or self.sender.sending(boundary.key):
            return
        size = state_bytes(row, boundary.start)
        if not self.memory.take(size):
            self.metrics.stores.labels("no_room").inc()
            return
        try:
            saved = save(row, boundary.start)
        except (RuntimeError, EngineError):  # Torch's out-of-memory errors. The answer is not lost by it.
            LOGGER.exception("a boundary of a prompt could not be saved")
            self.memory.give_back(size)
            self.metrics.stores.labels("failed").inc()
            return
        self.sender.send(PassedBoundary(boundary, row.epoch, tuple(row.lengths), saved))

    def drop(self) -> None:
        """Free the bytes of what was loaded; doing so twice is not an error."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            loaded.arrival.close()
