"""A request's prefix: what its row begins with, and which boundaries of its prompt it leaves for others."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.prefix import Boundary
from scissorhands.prefix_state import PrefixPiece, SavedPrefix, put, save, state_bytes
from scissorhands.row import Row
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.prefix_metrics import PrefixMetrics
from scissorhands_server.worker.prefix_rates import Rates

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedPrefix:
    """A prefix that has come from the store, all its bytes checked.

    Args:
        pieces: What was stored at its boundaries.
        size: Bytes of memory that they take.
        seconds: How long they took to come.
    """

    pieces: tuple[PrefixPiece, ...]
    size: int
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of it."""
        return self.pieces[-1].manifest.step


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

    def restore(self, row: Row) -> None:
        """Let an empty row begin with what was loaded; what does not fit leaves it empty, and is counted."""
        loaded = self.loaded
        if loaded is None:
            return
        try:
            put(row, loaded.pieces)
        except CorruptRowError:
            LOGGER.exception("a prefix does not fit its row; the prompt is read")
            self.metrics.lookups.labels("corrupt").inc()
        else:
            self.tokens = row.step
            self.metrics.lookups.labels("hit").inc()
            self.metrics.tokens.inc(row.step)
            self.metrics.saved.inc(max(0.0, self.rates.reading(row.step) - loaded.seconds))
        finally:
            self.drop()

    def passed(self, row: Row, tokens: int, seconds: float) -> None:
        """Keep a boundary that the row has reached, if it is wanted and there is memory for it.

        Args:
            row: The row, behind a chunk of its prompt.
            tokens: Tokens of the chunk.
            seconds: How long reading it took.
        """
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
            self.memory.give_back(loaded.size)
