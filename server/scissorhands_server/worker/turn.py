"""A turn of a session that is kept: what it goes on from, and what it leaves for the next."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from scissorhands.budget import Grant, ModelShape
from scissorhands.errors import CorruptRowError, EngineError
from scissorhands.incoming import Incoming
from scissorhands.row import Row
from scissorhands.row_state import incoming, state_bytes
from scissorhands.suspended import Manifest, takes
from scissorhands.v1 import budget_pb2, suspension_pb2
from scissorhands.wire import read_grant
from scissorhands_server.worker.arrival import Arrival
from scissorhands_server.worker.kept_row import KeptRow
from scissorhands_server.worker.memory import Memory
from scissorhands_server.worker.suspension_metrics import SuspensionMetrics

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumedRow:
    """A row that comes from the store.

    Args:
        manifest: What it is.
        grant: The grant that it had.
        message: The same as the protocol writes it.
        arrival: Where its bytes come, all checked.
    """

    manifest: Manifest
    grant: Grant
    message: budget_pb2.Grant
    arrival: Arrival


@dataclass
class Turn:
    """One turn's hold on its session.

    The engine's thread restores and saves; before that and after it the event loop owns all of it.

    Args:
        asked: The session, and what its row must be of.
        fence: Fencing token of its lease.
        memory: What bounds the bytes of rows.
        metrics: Where what becomes of rows is counted.
        resumed: The row to go on from; None reads the whole prompt.
        grant: The grant in force.
        kept: The row to be sent to the store; None if there is none.
        stored_bytes: Bytes that the store took.
        settled: Set once it is known whether the row is in the store.
    """

    asked: suspension_pb2.ResumeSessionRequest
    fence: int
    memory: Memory
    metrics: SuspensionMetrics
    resumed: ResumedRow | None = None
    grant: budget_pb2.Grant = field(default_factory=budget_pb2.Grant)
    kept: KeptRow | None = None
    stored_bytes: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def session_id(self) -> str:
        """The session."""
        return self.asked.session_id

    @property
    def resumed_tokens(self) -> int:
        """Tokens that the row to go on from has seen; 0 if it has not come."""
        return self.resumed.manifest.step if self.resumed else 0

    def grant_for(self, granted: budget_pb2.Grant, shape: ModelShape, total: int) -> budget_pb2.Grant:
        """Return the grant to go on under: the new one if the resumed row can take it, else the one that it had.

        If it can take neither, the row is dropped and counted, and the prompt is read anew.

        Args:
            granted: What was granted for this turn.
            shape: The model's sizes.
            total: Tokens of prompt and answer.
        """
        chosen = granted
        if self.resumed is not None:
            manifest, held = self.resumed.manifest, self.resumed.grant
            if not takes(read_grant(granted), held, manifest, shape, total):
                if takes(held, held, manifest, shape, total):
                    chosen = budget_pb2.Grant()
                    chosen.CopyFrom(self.resumed.message)
                    chosen.lease.CopyFrom(granted.lease)
                    chosen.codec = granted.codec
                else:
                    self.metrics.resumes.labels("budget").inc()
                    self.drop_resumed()
        self.grant = chosen
        return chosen

    def incoming(self, row: Row, ids: Sequence[int]) -> tuple[Incoming, Arrival] | None:
        """Return what puts what is resumed in an empty row; what does not fit is dropped and counted."""
        resumed = self.resumed
        if resumed is None:
            return None
        manifest, arrival = resumed.manifest, resumed.arrival
        try:
            return incoming(row, manifest, arrival.buffers[0], ids[: manifest.step]), arrival
        except CorruptRowError:
            LOGGER.exception("the row of session %s does not fit; its prompt is read anew", self.session_id)
            self.lost(corrupt=True)
            return None

    def arrived(self) -> None:
        """Take note that a row has all that is resumed."""
        self.metrics.resumes.labels("resumed").inc()
        self.metrics.resumed_tokens.inc(self.resumed_tokens)
        self.drop_resumed()

    def lost(self, *, corrupt: bool) -> None:
        """Take note that what was to be resumed is not; why it has not come, has been counted."""
        if corrupt:
            self.metrics.resumes.labels("corrupt").inc()
        self.drop_resumed()

    def save(self, row: Row, ids: Sequence[int]) -> None:
        """Keep a row that is about to be freed; one for which there is no memory is not kept, and is counted."""
        size = state_bytes(row)
        if not self.memory.take(size):
            self.metrics.suspends.labels("no_room").inc()
            return
        try:
            self.kept = KeptRow.of(row, ids)
        except (RuntimeError, EngineError):  # Torch's out-of-memory errors. The answer is not lost by it.
            LOGGER.exception("the row of session %s could not be saved", self.session_id)
            self.memory.give_back(size)
            self.metrics.suspends.labels("failed").inc()

    def drop_resumed(self) -> None:
        """Free the bytes of the row to go on from."""
        if self.resumed is not None:
            self.resumed.arrival.close()
            self.resumed = None

    def drop_kept(self) -> None:
        """Free the bytes of the row that was kept."""
        if self.kept is not None:
            self.memory.give_back(len(self.kept.data))
            self.kept = None
