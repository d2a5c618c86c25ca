"""The ledger: what each session holds, its grant, its importance statistics, its segments and its lease.

It informs people and grants; it never feeds a plan. It is soft state: a session that it does not know is recreated from
what a call carries, and all it holds is bounded. It does no waiting and knows no clock but the one it is given.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from scissorhands.demand import Demands
from scissorhands.errors import CapacityError, InvalidRequestError, NotFoundError
from scissorhands.importance import Attention, Tally
from scissorhands.tenant import split
from scissorhands.v1 import cache_manager_pb2, quality_pb2


class SessionState(Enum):
    """Where a session is in its life."""

    OPEN = "open"
    CLOSED = "closed"
    EXPIRED = "expired"


@dataclass(frozen=True)
class SegmentRecord:
    """A segment in the store.

    Args:
        epoch: Its id within its session.
        step: Tokens seen at the eviction.
        slots: Slots in it, over all layers and heads.
        size: Encoded bytes.
        expires_at: When the store forgets it, by the ledger's clock.
    """

    epoch: int
    step: int
    slots: int
    size: int
    expires_at: float


@dataclass
class SessionRecord:
    """What the ledger knows of one session. Only the ledger changes it. Times are by the ledger's clock, in seconds.

    Args:
        serial: Ascends with the time of opening.
        spec: What was opened, with its grant.
        opened_at: When it was opened, or recreated.
        lease_end: When its lease ends.
        state: Where it is in its life.
        ended_at: When it was closed or expired.
        discarded: Its segments are to be deleted, and no more are taken.
        tally: What it has evicted, None before the first plan.
        persistence: Mean of each global layer over all pairs of snapshots seen; empty before the second snapshot.
        pairs: Number of those pairs.
        segments: In the store, by epoch.
        quality: What eviction cost, as its worker reported it at the end; None if it has not.
    """

    serial: int
    spec: cache_manager_pb2.SessionSpec
    opened_at: float
    lease_end: float
    state: SessionState = SessionState.OPEN
    ended_at: float | None = None
    discarded: bool = False
    tally: Tally | None = None
    persistence: tuple[float, ...] = ()
    pairs: int = 0
    segments: dict[int, SegmentRecord] = field(default_factory=dict)
    quality: quality_pb2.Quality | None = None

    @property
    def session_id(self) -> str:
        """Id of the session."""
        return self.spec.session_id

    @property
    def segment_bytes(self) -> int:
        """Bytes of its segments in the store."""
        return sum(segment.size for segment in self.segments.values())


@dataclass(frozen=True)
class LedgerLimits:
    """What bounds a ledger.

    Args:
        sessions: Most sessions, those in retention included.
        lease: How long a session lives without a call that names it, in seconds.
        retention: How long a closed or expired session is remembered, in seconds.
        attention_bytes: Most bytes of remembered snapshots, over all sessions.
        renewal: Pairs of snapshots of a model after which its measured budgets are renewed.
    """

    sessions: int
    lease: float
    retention: float
    attention_bytes: int
    renewal: int = 256


class Ledger:
    """The record of all sessions.

    Args:
        limits: What bounds it.
        clock: Monotonic time in seconds.
    """

    def __init__(self, limits: LedgerLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._records: dict[str, SessionRecord] = {}
        self._serial = 0
        # The last snapshot of each session, the one that was used least lately first.
        self._attention: OrderedDict[str, Attention] = OrderedDict()
        self._attention_bytes = 0
        # Whose lease has run out since :meth:`take_expired` was called.
        self._expired: set[str] = set()
        # What the heads of models need, over all sessions.
        self.demands = Demands(limits.renewal)
        # Bytes in the store, over all sessions.
        self.segment_bytes = 0

    def find(self, session_id: str) -> SessionRecord | None:
        """Return a session, None if it is unknown."""
        record = self._records.get(session_id)
        if record is not None:
            self._age(record)
        return self._records.get(session_id)

    def get(self, session_id: str) -> SessionRecord:
        """Return a session.

        Raises:
            NotFoundError: It is unknown.
        """
        record = self.find(session_id)
        if record is None:
            raise NotFoundError("session_id", f"no session {session_id!r}; it was never opened or is forgotten")
        return record

    def opened(self, asked: cache_manager_pb2.SessionSpec) -> SessionRecord | None:
        """Return the session that an earlier call opened with the same arguments, with a fresh lease.

        Returns:
            The session, or None if there is none of this id, or this is a later turn of it.

        Raises:
            InvalidRequestError: The id belongs to a session with other arguments, or to a closed one.
        """
        record = self.find(asked.session_id)
        if record is None or asked.fence > record.spec.fence:
            return None
        field_name = "session.session_id"
        if record.state is SessionState.CLOSED:
            raise InvalidRequestError(field_name, f"session {asked.session_id!r} has been closed; choose a new id")
        if _arguments(record.spec) != _arguments(asked):
            raise InvalidRequestError(
                field_name, f"session {asked.session_id!r} is open with other arguments; choose a new id"
            )
        self._lease(record)
        return record

    def open(self, spec: cache_manager_pb2.SessionSpec) -> SessionRecord:
        """Record a session that has just got its grant. A later turn of one keeps the segments of those before.

        Raises:
            CapacityError: The ledger is full of open sessions.
        """
        before = self._records.get(spec.session_id)
        if before is None:
            self._make_room()
        now = self._clock()
        self._serial += 1
        record = SessionRecord(self._serial, spec, opened_at=now, lease_end=now + self.limits.lease)
        if before is not None:
            record.segments = before.segments
            self._forget_attention(spec.session_id)
        self._records[spec.session_id] = record
        return record

    def adopt(self, session_id: str) -> SessionRecord:
        """Record a session of which only its segments are left; nobody holds its lease.

        Raises:
            CapacityError: The ledger is full of open sessions.
        """
        record = self.open(cache_manager_pb2.SessionSpec(session_id=session_id))
        record.state = SessionState.EXPIRED
        record.lease_end = record.ended_at = self._clock()
        return record

    def renew(self, spec: cache_manager_pb2.SessionSpec) -> SessionRecord:
        """Extend the lease of a session, recreating it from ``spec`` if it is unknown. A closed one stays closed.

        What is said of an earlier turn changes nothing; a later one, opened at another manager, is a new one here.

        Raises:
            CapacityError: It is unknown and the ledger is full of open sessions.
        """
        record = self.find(spec.session_id)
        if record is None or spec.fence > record.spec.fence:
            return self.open(spec)
        if spec.fence < record.spec.fence:
            return record
        # A turn that goes on with the grant of the one before says so.
        if spec.fence or not record.spec.HasField("grant"):
            record.spec = spec
        if record.state is not SessionState.CLOSED:
            self._lease(record)
        return record

    def close(self, record: SessionRecord, *, discard: bool, quality: quality_pb2.Quality | None = None) -> None:
        """End a session's lease; ``discard`` says that its segments will be deleted. Closing twice is not an error."""
        record.quality = quality or record.quality
        if record.state is not SessionState.CLOSED:
            record.state = SessionState.CLOSED
            record.lease_end = min(record.lease_end, self._clock())
            record.ended_at = self._clock()
        record.discarded = record.discarded or discard
        self._forget_attention(record.session_id)

    def evicted(self, record: SessionRecord, tally: Tally) -> bool:
        """Record a plan; tell whether it is news. A repeated or late plan is not."""
        if record.tally is not None and tally.epoch <= record.tally.epoch:
            return False
        record.tally = tally
        return True

    def remember(self, record: SessionRecord, attention: Attention) -> Attention | None:
        """Keep a snapshot to compare the next one with, and return the one kept before, None if there is none.

        Sessions whose snapshots were used least lately lose them when memory runs out.
        """
        before = self._forget_attention(record.session_id)
        if record.state is SessionState.OPEN and attention.size_bytes <= self.limits.attention_bytes:
            self._attention[record.session_id] = attention
            self._attention_bytes += attention.size_bytes
            while self._attention_bytes > self.limits.attention_bytes:
                self._forget_attention(next(iter(self._attention)))
        return before

    def persisted(self, record: SessionRecord, overlaps: tuple[float, ...]) -> None:
        """Take a pair of snapshots into the mean of a session's persistence, of each layer."""
        if not overlaps:
            return
        before = record.persistence or (0.0,) * len(overlaps)
        pairs = record.pairs
        record.persistence = tuple((a * pairs + b) / (pairs + 1) for a, b in zip(before, overlaps, strict=True))
        record.pairs = pairs + 1

    def stored(self, record: SessionRecord, segment: SegmentRecord) -> None:
        """Record a segment that is now in the store, unless its session has been forgotten meanwhile."""
        if self._records.get(record.session_id) is not record:
            return
        self._drop_segments(record, [segment.epoch])
        record.segments[segment.epoch] = segment
        self.segment_bytes += segment.size

    def deleted(self, record: SessionRecord, epochs: Sequence[int]) -> None:
        """Record that segments are no more in the store."""
        self._drop_segments(record, epochs)

    def sweep(self) -> None:
        """End leases, and forget what the store has forgotten and who has been gone for long enough."""
        for record in list(self._records.values()):
            self._age(record)

    def page(
        self, state: SessionState | None, before: int | None, size: int, tenant: str | None = None
    ) -> tuple[list[SessionRecord], bool]:
        """Return a page of sessions, newest first, and whether more follow.

        Args:
            state: Only sessions in this state; None means all.
            before: Only sessions with a smaller serial; None means all.
            size: Most sessions to return.
            tenant: Only its sessions; None means all.
        """
        self.sweep()
        found: list[SessionRecord] = []
        for record in self._newest_first():
            if tenant not in (None, split(record.session_id)[0]):
                continue
            if (before is None or record.serial < before) and state in (None, record.state):
                if len(found) == size:
                    return found, True
                found.append(record)
        return found, False

    def to_discard(self) -> list[SessionRecord]:
        """Return the sessions whose segments are still to be deleted."""
        return [record for record in self._records.values() if record.discarded and record.segments]

    def take_expired(self) -> list[SessionRecord]:
        """Return the sessions whose leases have run out since the last call, if they have segments."""
        records = [self._records[session_id] for session_id in self._expired]
        self._expired.clear()
        return [record for record in records if record.state is SessionState.EXPIRED and record.segments]

    def counts(self) -> dict[SessionState, int]:
        """Return how many sessions hold something (a lease or segments), by state."""
        counts = dict.fromkeys(SessionState, 0)
        for record in self._records.values():
            if record.state is SessionState.OPEN or record.segments:
                counts[record.state] += 1
        return counts

    def _newest_first(self) -> Iterator[SessionRecord]:
        return iter(sorted(self._records.values(), key=lambda record: record.serial, reverse=True))

    def _lease(self, record: SessionRecord) -> None:
        record.state = SessionState.OPEN
        record.ended_at = None
        record.lease_end = self._clock() + self.limits.lease

    def _make_room(self) -> None:
        if len(self._records) < self.limits.sessions:
            return
        self.sweep()
        if len(self._records) < self.limits.sessions:
            return
        ended = [record for record in self._records.values() if record.state is not SessionState.OPEN]
        if not ended:
            raise CapacityError(
                f"the manager holds {self.limits.sessions} open sessions, its most", retry_after=self.limits.lease
            )
        oldest = min(ended, key=lambda record: record.ended_at or 0.0)
        self._forget(oldest)

    def _age(self, record: SessionRecord) -> None:
        now = self._clock()
        if record.state is SessionState.OPEN and record.lease_end <= now:
            record.state = SessionState.EXPIRED
            self._expired.add(record.session_id)
            record.ended_at = record.lease_end
            self._forget_attention(record.session_id)
        self._drop_segments(record, [epoch for epoch, held in record.segments.items() if held.expires_at <= now])
        gone = record.ended_at is not None and record.ended_at + self.limits.retention <= now
        if gone and not record.segments:
            self._forget(record)

    def _forget(self, record: SessionRecord) -> None:
        self._drop_segments(record, list(record.segments))
        self._expired.discard(record.session_id)
        del self._records[record.session_id]

    def _drop_segments(self, record: SessionRecord, epochs: Sequence[int]) -> None:
        for epoch in epochs:
            dropped = record.segments.pop(epoch, None)
            self.segment_bytes -= dropped.size if dropped else 0

    def _forget_attention(self, session_id: str) -> Attention | None:
        attention = self._attention.pop(session_id, None)
        if attention is not None:
            self._attention_bytes -= attention.size_bytes
        return attention


def _arguments(spec: cache_manager_pb2.SessionSpec) -> cache_manager_pb2.SessionSpec:
    """Return what was asked for: everything but the grant."""
    asked = cache_manager_pb2.SessionSpec()
    asked.CopyFrom(spec)
    asked.ClearField("grant")
    return asked
