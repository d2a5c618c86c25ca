"""The service at the wire: every method decodes, calls and encodes."""

import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from scissorhands.errors import NotFoundError, StoreUnavailableError
from scissorhands.ledger import SessionRecord
from scissorhands.v1 import (
    cache_manager_pb2,
    cache_manager_pb2_grpc,
    prefix_pb2,
    recall_pb2,
    store_pb2,
    suspension_pb2,
)
from scissorhands_server.manager.care import Care
from scissorhands_server.manager.checks import check_quality, check_session_id
from scissorhands_server.manager.encoding import measured_message, session_message
from scissorhands_server.manager.listing import Listing
from scissorhands_server.manager.planning import Planning
from scissorhands_server.manager.prefixes import Prefixes
from scissorhands_server.manager.recalls import Recalls
from scissorhands_server.manager.segments import Segments
from scissorhands_server.manager.sessions import Sessions
from scissorhands_server.manager.suspension import Suspension
from scissorhands_server.row_messages import RowChunk
from scissorhands_server.tenants import own_name, seen_name

LOGGER = logging.getLogger(__name__)


class CacheManagerServicer(cache_manager_pb2_grpc.CacheManagerServiceServicer):
    """Serves ``scissorhands.v1.CacheManagerService``.

    Args:
        sessions: Opens, renews and closes sessions.
        planning: Plans evictions.
        segments: Stores and reads segments.
        suspension: Suspends and resumes sessions.
        prefixes: Gives prefixes out and takes them in.
        recalls: Searches segments.
        care: Looks after the store.
        listing: Lists sessions.
        wall_offset: What to add to the ledger's clock to get seconds since 1970.
    """

    def __init__(
        self,
        sessions: Sessions,
        planning: Planning,
        segments: Segments,
        suspension: Suspension,
        prefixes: Prefixes,
        recalls: Recalls,
        care: Care,
        listing: Listing,
        wall_offset: float,
    ) -> None:
        self._sessions = sessions
        self._planning = planning
        self._segments = segments
        self._suspension = suspension
        self._prefixes = prefixes
        self._recalls = recalls
        self._care = care
        self._listing = listing
        self._wall_offset = wall_offset

    async def OpenSession(  # noqa: N802 - Named by the protocol.
        self, request: cache_manager_pb2.OpenSessionRequest, context: Any
    ) -> cache_manager_pb2.OpenSessionResponse:
        """Grant a budget and start a lease."""
        del context
        record = self._sessions.open(request.session, request.profile if request.HasField("profile") else None)
        return cache_manager_pb2.OpenSessionResponse(grant=record.spec.grant)

    async def CloseSession(  # noqa: N802 - Named by the protocol.
        self, request: cache_manager_pb2.CloseSessionRequest, context: Any
    ) -> cache_manager_pb2.CloseSessionResponse:
        """End a lease, and delete the session's segments if asked to."""
        del context
        check_quality(request.quality)
        check_session_id(request.session_id)
        await self._suspension.release(request.session_id, request.fence)
        record = await self._found(request.session_id)
        if self._sessions.close(record, request) and request.discard_segments:
            try:
                await self._segments.discard(record)
            except StoreUnavailableError as error:
                # They stay marked, and are deleted when the store is back or their time is over.
                LOGGER.info("segments of session %s are not deleted yet: %s", record.session_id, error)
        return cache_manager_pb2.CloseSessionResponse(session=self._message(record, segments=False))

    async def RenewSessions(  # noqa: N802 - Named by the protocol.
        self, request: cache_manager_pb2.RenewSessionsRequest, context: Any
    ) -> cache_manager_pb2.RenewSessionsResponse:
        """Extend leases."""
        del context
        renewed = self._sessions.renew(request.sessions)
        await self._suspension.renew(request.sessions)
        return cache_manager_pb2.RenewSessionsResponse(session_ids=renewed)

    async def PlanEvictions(  # noqa: N802 - Named by the protocol.
        self, request_iterator: AsyncIterator[cache_manager_pb2.PlanEvictionsRequest], context: Any
    ) -> cache_manager_pb2.PlanEvictionsResponse:
        """Plan evictions."""
        del context
        return await self._planning.plan(request_iterator)

    async def OffloadSegments(  # noqa: N802 - Named by the protocol.
        self, request_iterator: AsyncIterator[cache_manager_pb2.OffloadSegmentsRequest], context: Any
    ) -> cache_manager_pb2.OffloadSegmentsResponse:
        """Store segments."""
        del context
        return await self._segments.offload(request_iterator)

    async def FetchSegments(  # noqa: N802 - Named by the protocol.
        self, request: cache_manager_pb2.FetchSegmentsRequest, context: Any
    ) -> AsyncIterator[cache_manager_pb2.FetchSegmentsResponse]:
        """Read segments back."""
        del context
        request.session_id = own_name(request.session_id)
        async for chunk in self._segments.fetch(request):
            yield chunk

    async def RecallSections(  # noqa: N802 - Named by the protocol.
        self, request_iterator: AsyncIterator[recall_pb2.RecallSectionsRequest], context: Any
    ) -> AsyncIterator[recall_pb2.RecallSectionsResponse]:
        """Give out the sections that a row asks for."""
        del context
        async for response in self._recalls.recall(request_iterator):
            yield response

    async def SuspendSession(  # noqa: N802 - Named by the protocol.
        self, request_iterator: AsyncIterator[suspension_pb2.SuspendSessionRequest | RowChunk], context: Any
    ) -> suspension_pb2.SuspendSessionResponse:
        """Store the row of a session that pauses."""
        del context
        return await self._suspension.suspend(request_iterator)

    async def ResumeSession(  # noqa: N802 - Named by the protocol.
        self, request: suspension_pb2.ResumeSessionRequest, context: Any
    ) -> AsyncIterator[Any]:
        """Give out the row of a session that goes on."""
        del context
        async for response in self._suspension.resume(request):
            yield response

    async def LoadPrefix(  # noqa: N802 - Named by the protocol.
        self, request: prefix_pb2.LoadPrefixRequest, context: Any
    ) -> AsyncIterator[Any]:
        """Give out the longest stored prefix of a prompt."""
        del context
        async for response in self._prefixes.load(request):
            yield response

    async def StorePrefix(  # noqa: N802 - Named by the protocol.
        self, request_iterator: AsyncIterator[prefix_pb2.StorePrefixRequest | RowChunk], context: Any
    ) -> prefix_pb2.StorePrefixResponse:
        """Store what a row is at a boundary of its prompt."""
        del context
        return await self._prefixes.store(request_iterator)

    async def DeleteSession(  # noqa: N802 - Named by the protocol.
        self, request: suspension_pb2.DeleteSessionRequest, context: Any
    ) -> suspension_pb2.DeleteSessionResponse:
        """Delete all that the store has of a session."""
        del context
        session_id = own_name(request.session_id)
        deleted = await self._suspension.delete(session_id)
        self._sessions.forget_segments(session_id)
        return suspension_pb2.DeleteSessionResponse(deleted=deleted)

    async def PauseSession(  # noqa: N802 - Named by the protocol.
        self, request: store_pb2.PauseSessionRequest, context: Any
    ) -> store_pb2.PauseSessionResponse:
        """Let no turn of a session begin."""
        del context
        return await self._care.pause(request.session_id)

    async def UnpauseSession(  # noqa: N802 - Named by the protocol.
        self, request: store_pb2.UnpauseSessionRequest, context: Any
    ) -> store_pb2.UnpauseSessionResponse:
        """Let turns of a session begin again."""
        del context
        return await self._care.unpause(request.session_id)

    async def GetStore(  # noqa: N802 - Named by the protocol.
        self, request: store_pb2.GetStoreRequest, context: Any
    ) -> store_pb2.GetStoreResponse:
        """Tell what lies in the store."""
        del request, context
        return await self._care.stat()

    async def CollectGarbage(  # noqa: N802 - Named by the protocol.
        self, request: store_pb2.CollectGarbageRequest, context: Any
    ) -> AsyncIterator[store_pb2.CollectGarbageResponse]:
        """Mend and trim the store."""
        del context
        async for done in self._care.collect(dry_run=request.dry_run):
            yield done

    async def VerifyStore(  # noqa: N802 - Named by the protocol.
        self, request: store_pb2.VerifyStoreRequest, context: Any
    ) -> AsyncIterator[store_pb2.VerifyStoreResponse]:
        """Check every object."""
        del context
        async for found in self._care.verify(request):
            yield found

    async def GetSession(  # noqa: N802 - Named by the protocol.
        self, request: cache_manager_pb2.GetSessionRequest, context: Any
    ) -> cache_manager_pb2.GetSessionResponse:
        """Tell what one session holds."""
        del context
        record = await self._found(own_name(request.session_id))
        suspended = None
        try:
            await self._segments.reconcile(record)
            suspended = await self._suspension.find(record.session_id)
        except StoreUnavailableError as error:
            LOGGER.info("segments of session %s are told from memory: %s", record.session_id, error)
        session = self._message(record, segments=True)
        if suspended is not None:
            session.suspended.CopyFrom(suspended)
        with suppress(StoreUnavailableError):
            await self._listing.add_stored([session])
        session.spec.session_id = seen_name(session.spec.session_id)
        return cache_manager_pb2.GetSessionResponse(session=session)

    async def ListSessions(  # noqa: N802 - Named by the protocol.
        self, request: cache_manager_pb2.ListSessionsRequest, context: Any
    ) -> cache_manager_pb2.ListSessionsResponse:
        """List sessions."""
        del context
        return await self._listing.page(request)

    async def GetMeasuredProfile(  # noqa: N802 - Named by the protocol.
        self, request: cache_manager_pb2.GetMeasuredProfileRequest, context: Any
    ) -> cache_manager_pb2.GetMeasuredProfileResponse:
        """Tell what the KV heads of a model need."""
        del context
        return measured_message(self._sessions.measured(request.model))

    async def _found(self, session_id: str) -> SessionRecord:
        """Return a session that the ledger knows, or of which the store still has segments or a row."""
        record = self._sessions.find(session_id)
        if record is not None:
            return record
        missing = NotFoundError("session_id", f"no session {session_id!r}; it was never opened or is forgotten")
        try:
            if not (await self._segments.exist(session_id) or await self._suspension.find(session_id)):
                raise missing
        except StoreUnavailableError as error:
            raise missing from error
        return self._sessions.adopt(session_id)

    def _message(self, record: SessionRecord, *, segments: bool) -> cache_manager_pb2.Session:
        return session_message(record, self._wall_offset, segments=segments)
