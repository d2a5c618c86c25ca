"""The segments of sessions: checked, stored, found again, read back and deleted."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from scissorhands.errors import (
    CapacityError,
    CorruptSegmentError,
    InvalidRequestError,
    NotFoundError,
    QuotaError,
    StoreFullError,
    StoreUnavailableError,
)
from scissorhands.ledger import Ledger, SegmentRecord, SessionRecord
from scissorhands.segment import SegmentHeader, check_segment
from scissorhands.tenant import qualified
from scissorhands.v1 import cache_manager_pb2
from scissorhands_server.chunks import MAX_CHUNK_BYTES, chunks
from scissorhands_server.manager.admission import Admission
from scissorhands_server.manager.checks import check_granted, check_session_id
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.sessions import Sessions
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.space import Space
from scissorhands_server.manager.stored import StoredSegments, part_of
from scissorhands_server.manager.stream import MessageStream
from scissorhands_server.manager.uploads import receive_segments

LOGGER = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 0.5
_MAX_STREAMS = 1024

# Why a segment is refused that is good.
_REASONS: dict[type[Exception], str] = {
    StoreUnavailableError: "store_unavailable",
    StoreFullError: "store_full",
    QuotaError: "quota",
}

Chunk = cache_manager_pb2.FetchSegmentsResponse


class Segments:
    """Takes segments in and gives them out.

    Args:
        stored: The segments in the store.
        space: Makes room for them.
        sessions: Where the sessions of calls are recalled.
        ledger: Where segments are recorded.
        settings: Limits.
        metrics: The manager's metrics.
        clock: The ledger's clock.
    """

    def __init__(
        self,
        stored: StoredSegments,
        space: Space,
        sessions: Sessions,
        ledger: Ledger,
        settings: ManagerSettings,
        metrics: ManagerMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._stored = stored
        self._space = space
        self._sessions = sessions
        self._ledger = ledger
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        memory = settings.segment_memory_bytes
        self._coming = Admission("segments coming in", _MAX_STREAMS, memory, RETRY_AFTER_SECONDS)
        self._going = Admission("segments going out", _MAX_STREAMS, memory, RETRY_AFTER_SECONDS)

    async def offload(
        self, messages: AsyncIterator[cache_manager_pb2.OffloadSegmentsRequest]
    ) -> cache_manager_pb2.OffloadSegmentsResponse:
        """Store the segments of a stream and tell what became of each.

        Raises:
            InvalidRequestError: The stream is malformed; the segments before the fault are stored.
            CapacityError: There is no room for more segments, or for their sessions.
        """
        response = cache_manager_pb2.OffloadSegmentsResponse()

        def on_header(header: cache_manager_pb2.SegmentHeader) -> None:
            check_granted(header.session, self._settings)

        async def on_segment(header: cache_manager_pb2.SegmentHeader, data: bytes | None) -> None:
            reason = "too_large" if data is None else await self._take(header, data)
            if reason:
                response.refused.add(session_id=header.session.session_id, epoch=header.epoch, reason=reason)
                self._metrics.segments_refused.labels(reason).inc()
            else:
                response.stored += 1
                response.stored_bytes += header.size_bytes
                self._metrics.segments_stored.inc()
                self._metrics.segment_bytes_stored.inc(header.size_bytes)

        requests = MessageStream(messages, self._settings.stream_timeout)
        largest = self._settings.max_segment_bytes
        async with requests.heard_out():
            await receive_segments(requests, self._coming, largest, on_header, on_segment)
        return response

    async def fetch(self, request: cache_manager_pb2.FetchSegmentsRequest) -> AsyncIterator[Chunk]:
        """Yield segments, or sections of them, in chunks, every byte checked before it leaves.

        Raises:
            InvalidRequestError: A field is malformed, or there is no such section.
            NotFoundError: There is no such session or segment.
            CorruptSegmentError: What is stored fails a check.
            StoreUnavailableError: The store does not answer.
            CapacityError: Too many segments are on their way out.
        """
        check_session_id(request.session_id)
        stored = await self._stored.sizes(request.session_id)
        if not stored and self._ledger.find(request.session_id) is None:
            raise NotFoundError("session_id", f"no session {request.session_id!r}, and no segments of one")
        await self._space.use([self._stored.object_name(request.session_id)], pinned=True)
        for epoch in request.epochs or stored:
            header = await self._stored.header(request.session_id, epoch)
            sent = self._sections(request, epoch, header) if request.sections else self._whole(request, epoch, header)
            # A client that does not read holds what was read for it.
            ticket = self._going.admit(self._stored.most_held(header))
            try:
                async for chunk in sent:
                    yield chunk
            finally:
                ticket.release()

    async def reconcile(self, record: SessionRecord) -> None:
        """Make the ledger agree with the store on a session's segments.

        After a restart the manager finds its segments again this way, and one that the store has lost is forgotten.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        known = dict(record.segments)
        sizes = await self._stored.sizes(record.session_id)
        self._ledger.deleted(record, [epoch for epoch in known if epoch not in sizes])
        for epoch, size in sizes.items():
            if epoch not in record.segments:
                try:
                    header = await self._stored.header(record.session_id, epoch)
                except (CorruptSegmentError, NotFoundError) as error:
                    LOGGER.warning("segment %d of session %s is left out: %s", epoch, record.session_id, error)
                else:
                    self._ledger.stored(record, self._entry(epoch, header.step, header.slots, size))
        self._metrics.show(self._ledger)

    async def exist(self, session_id: str) -> bool:
        """Tell whether the store has segments of a session."""
        return bool(await self._stored.sizes(session_id))

    async def discard(self, record: SessionRecord) -> None:
        """Delete all segments of a session, those included that the ledger does not know of.

        Raises:
            StoreUnavailableError: The store does not answer; what is left goes when its time is over.
        """
        stored = await self._stored.sizes(record.session_id)
        epochs = sorted({*stored, *record.segments})
        if epochs:
            await self._stored.delete(record.session_id, epochs)
            await self._space.forget([self._stored.object_name(record.session_id)])
        self._ledger.deleted(record, epochs)
        self._metrics.show(self._ledger)

    async def _take(self, header: cache_manager_pb2.SegmentHeader, data: bytes) -> str:
        """Store one segment; return the reason if it is refused, else an empty string."""
        session = header.session
        try:
            # Checksums of many megabytes would hold up every other call.
            parsed = await asyncio.to_thread(check_segment, data)
            _check_identity(parsed, header)
        except CorruptSegmentError as error:
            LOGGER.warning("segment %d of session %s is refused: %s", header.epoch, session.session_id, error)
            return "corrupt"
        record = self._sessions.recall(session)
        if record is None:
            raise CapacityError("the ledger is full of open sessions", RETRY_AFTER_SECONDS)
        if record.discarded:
            return "session_closed"
        try:
            name = self._stored.object_name(session.session_id)
            async with self._space.writing(name, len(data), self._stored.ttl, whole=False):
                await self._stored.write(session.session_id, header.epoch, data)
            self._ledger.stored(record, self._entry(header.epoch, parsed.step, parsed.slots, len(data)))
            if record.discarded:  # It was closed while the segment was on its way.
                await self.discard(record)
                return "session_closed"
        except (StoreUnavailableError, QuotaError) as error:
            LOGGER.info("segment %d of session %s is refused: %s", header.epoch, session.session_id, error)
            return _REASONS[type(error)]
        self._metrics.store_bytes.set(self._ledger.segment_bytes)
        return ""

    def _entry(self, epoch: int, step: int, slots: int, size: int) -> SegmentRecord:
        return SegmentRecord(epoch, step, slots, size, self._clock() + self._stored.ttl)

    async def _whole(
        self, request: cache_manager_pb2.FetchSegmentsRequest, epoch: int, header: SegmentHeader
    ) -> AsyncIterator[Chunk]:
        left = header.size
        start = await self._stored.raw_header(request.session_id, epoch, header)
        for piece in chunks(start, MAX_CHUNK_BYTES):
            left -= len(piece)
            yield Chunk(epoch=epoch, chunk=piece, last=left == 0)
        async for _, data in self._stored.runs(request.session_id, epoch, list(header.sections)):
            for piece in chunks(data, MAX_CHUNK_BYTES):
                left -= len(piece)
                yield Chunk(epoch=epoch, chunk=piece, last=left == 0)

    async def _sections(
        self, request: cache_manager_pb2.FetchSegmentsRequest, epoch: int, header: SegmentHeader
    ) -> AsyncIterator[Chunk]:
        for address in request.sections:
            if address.layer >= header.layers or address.kv_head >= header.kv_heads:
                raise InvalidRequestError(
                    "sections",
                    f"must be below {header.layers} layers and {header.kv_heads} KV heads, "
                    f"got layer {address.layer}, KV head {address.kv_head}",
                )
        wanted = [header.section(address.layer, address.kv_head) for address in request.sections]
        addresses = iter(request.sections)
        async for run, data in self._stored.runs(request.session_id, epoch, wanted):
            for section in run:
                address, left = next(addresses), section.size
                for piece in list(chunks(part_of(run, data, section), MAX_CHUNK_BYTES)) or [b""]:
                    left -= len(piece)
                    yield Chunk(epoch=epoch, section=address, chunk=piece, last=left == 0)


def _check_identity(parsed: SegmentHeader, header: cache_manager_pb2.SegmentHeader) -> None:
    """Refuse a segment that is not what its upload says it is.

    Raises:
        CorruptSegmentError: It is another session's, another model's or another epoch's.
    """
    model = header.session.model
    found = (
        qualified(parsed.identity.tenant, parsed.identity.session_id),
        parsed.identity.model,
        parsed.epoch,
        parsed.layers,
        parsed.kv_heads,
        parsed.head_dim,
    )
    said = (
        header.session.session_id,
        model.fingerprint,
        header.epoch,
        model.layers,
        model.kv_heads,
        model.head_dim,
    )
    if found != said:
        raise CorruptSegmentError(f"the segment is of {found}, its upload says {said}")
