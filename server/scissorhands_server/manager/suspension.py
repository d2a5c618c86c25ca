"""Suspending and resuming sessions: rows come in and go out part by part, every part checked."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, suppress
from functools import partial

from scissorhands.errors import (
    BrokenRowError,
    CorruptRowError,
    InvalidRequestError,
    MismatchError,
    NotFoundError,
    StoreUnavailableError,
)
from scissorhands.suspended import Manifest, asked_identity
from scissorhands.tenant import qualified
from scissorhands.v1 import cache_manager_pb2, suspension_pb2
from scissorhands_server.manager.admission import Admission
from scissorhands_server.manager.checks import check_session_id
from scissorhands_server.manager.keeper import ARCHIVE
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.parts import STREAM_BYTES, counted, receive_all
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.space import Space
from scissorhands_server.manager.stream import MessageStream
from scissorhands_server.manager.suspended_rows import Record, SuspendedRows
from scissorhands_server.row_messages import RowChunk, row_chunks
from scissorhands_server.store.registry import ObjectName

LOGGER = logging.getLogger(__name__)

_RENEWALS_AT_ONCE = 16

Request = suspension_pb2.SuspendSessionRequest
Response = suspension_pb2.ResumeSessionResponse


class Suspension:
    """Takes suspended rows in and gives them out. No stream holds more than two parts.

    Args:
        rows: The rows in the store.
        space: Makes room for them.
        settings: Limits.
        metrics: The manager's metrics.
        streams: A bound on the rows that are on their way.
    """

    def __init__(
        self, rows: SuspendedRows, space: Space, settings: ManagerSettings, metrics: ManagerMetrics, streams: Admission
    ) -> None:
        self._rows = rows
        self._space = space
        self._settings = settings
        self._metrics = metrics
        self._streams = streams

    async def resume(self, asked: suspension_pb2.ResumeSessionRequest) -> AsyncIterator[Response | RowChunk]:
        """Take a session's lease, and yield the row that was suspended.

        Raises:
            InvalidRequestError: The id is malformed.
            SessionConflictError: Another turn holds the lease.
            NotFoundError: Nothing is stored; the lease is held.
            MismatchError: What is stored is of something else; the lease is held.
            BrokenRowError: What is stored is not whole; the lease is held.
            StoreUnavailableError: The store does not answer.
        """
        check_session_id(asked.session_id)
        with counted(self._metrics.resumptions):
            record = await self._rows.claim(asked.session_id)
            await self._space.use(self._objects(asked.session_id), pinned=True)
            yield Response(header=suspension_pb2.ResumeHeader(fence=record.fence, manifest=record.manifest))
            if not record.manifest:
                raise NotFoundError("session_id", f"nothing is stored of session {asked.session_id!r}")
            try:
                async with aclosing(self._chunks(asked, record)) as sent:
                    async for chunk in sent:
                        yield chunk
            except BrokenRowError:
                # The rest of it is of no use to anybody.
                with suppress(StoreUnavailableError):
                    await self._space.discard(self._rows.object_name(asked.session_id), "broken", held=True)
                raise

    async def suspend(self, messages: AsyncIterator[Request | RowChunk]) -> suspension_pb2.SuspendSessionResponse:
        """Store a row, whole or not at all.

        Raises:
            InvalidRequestError: The stream is malformed, or the row too large.
            CorruptRowError: A part is not what the manifest says.
            MismatchError: The manifest is of another session.
            SessionConflictError: The session has been taken by another turn.
            CapacityError: Too many rows are on their way.
            QuotaError: The row finds no room.
            StoreUnavailableError: The store does not answer.
        """
        requests = MessageStream(messages, self._settings.stream_timeout)
        async with requests.heard_out():
            stored = await self._suspended(requests)
        self._metrics.suspended_bytes.inc(stored)
        return suspension_pb2.SuspendSessionResponse(stored_bytes=stored)

    async def _suspended(self, requests: MessageStream[Request | RowChunk]) -> int:
        """Store a row; return its bytes."""
        with counted(self._metrics.suspensions):
            header = await self._header(requests)
            manifest = self._manifest(header)
            session_id, fence = header.session_id, header.fence
            stored = manifest.state_bytes + len(header.manifest)
            async with self._space.writing(self._rows.object_name(session_id), stored, self._rows.ttl, whole=True):
                try:
                    await self._take(requests, header, manifest)
                except BaseException:
                    # What cannot be deleted now goes by itself.
                    with suppress(StoreUnavailableError):
                        await self._rows.discard(session_id, fence, len(manifest.parts))
                    raise
                await self._rows.commit(session_id, fence, header.manifest, len(manifest.parts))
        return stored

    async def renew(self, sessions: Iterable[cache_manager_pb2.SessionSpec]) -> None:
        """Extend the leases of turns; those of sessions that are never suspended need none."""
        gate = asyncio.Semaphore(_RENEWALS_AT_ONCE)

        async def renew(session: cache_manager_pb2.SessionSpec) -> None:
            async with gate:
                try:
                    await self._rows.renew(session.session_id, session.fence)
                    await self._space.use(self._objects(session.session_id), pinned=True)
                except StoreUnavailableError as error:
                    LOGGER.info("the lease of session %s is not renewed: %s", session.session_id, error)

        await asyncio.gather(*(renew(session) for session in sessions if session.fence))

    async def release(self, session_id: str, fence: int) -> None:
        """Give the lease of a turn up; if the store is away, it ends by itself."""
        if fence:
            try:
                await self._rows.release(session_id, fence)
                await self._space.use(self._objects(session_id), pinned=False)
            except StoreUnavailableError as error:
                LOGGER.info("the lease of session %s is left to run out: %s", session_id, error)

    async def find(self, session_id: str) -> suspension_pb2.SuspendedRow | None:
        """Describe the row that a session has in the store; None if it has none, or none that can be read.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        record = await self._rows.find(session_id)
        try:
            manifest = Manifest.parse(record.manifest)
        except CorruptRowError:
            return None
        return suspension_pb2.SuspendedRow(
            step=manifest.step, size_bytes=manifest.state_bytes + len(record.manifest), paused=record.paused
        )

    async def delete(self, session_id: str) -> int:
        """Delete all that the store has of a session; return how many values that was.

        Raises:
            InvalidRequestError: The id is malformed.
            StoreUnavailableError: The store does not answer.
        """
        check_session_id(session_id)
        deleted = await self._rows.delete(session_id)
        await self._space.forget(self._objects(session_id))
        return deleted

    def _objects(self, session_id: str) -> list[ObjectName]:
        """Return what a session may have in the store, that to be evicted last first."""
        row = self._rows.object_name(session_id)
        return [row, row._replace(kind=ARCHIVE)]

    async def _chunks(self, asked: suspension_pb2.ResumeSessionRequest, record: Record) -> AsyncGenerator[RowChunk]:
        """Yield a suspended row's bytes, every part checked."""
        manifest = Manifest.parse(record.manifest)
        manifest.identity.known_to_manager().check(asked_identity(asked))
        ticket = self._streams.admit(STREAM_BYTES)
        try:
            expected = iter(manifest.parts)
            async with aclosing(self._rows.parts(asked.session_id, record, manifest)) as parts:
                async for data in parts:
                    next(expected).check(data)
                    for chunk in row_chunks(data):
                        yield chunk
                    self._metrics.resumed_bytes.inc(len(data))
        finally:
            ticket.release()

    async def _header(self, requests: MessageStream[Request | RowChunk]) -> suspension_pb2.SuspendHeader:
        message = await requests.next()
        if not isinstance(message, Request) or message.WhichOneof("part") != "header":
            raise InvalidRequestError("part", "the stream must begin with a header")
        check_session_id(message.header.session_id, "header.session_id")
        if not message.header.fence:
            raise InvalidRequestError("header.fence", "must be the token that ResumeSession gave")
        return message.header

    def _manifest(self, header: suspension_pb2.SuspendHeader) -> Manifest:
        manifest = Manifest.parse(header.manifest)
        said = manifest.identity
        if qualified(said.tenant, said.session_id) != header.session_id:
            raise MismatchError(("session_id", "tenant"))
        if manifest.state_bytes > self._settings.max_suspended_bytes:
            raise InvalidRequestError(
                "header.manifest",
                f"the row has {manifest.state_bytes} bytes, above the limit of {self._settings.max_suspended_bytes}",
            )
        return manifest

    async def _take(
        self, requests: MessageStream[Request | RowChunk], header: suspension_pb2.SuspendHeader, manifest: Manifest
    ) -> None:
        """Receive all parts and write them."""
        ticket = self._streams.admit(STREAM_BYTES)
        try:
            await receive_all(requests, manifest.parts, partial(self._rows.put, header.session_id, header.fence))
        finally:
            ticket.release()
