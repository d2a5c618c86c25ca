"""Lists of sessions: those that the ledger knows, then those of which only the store has something."""

from collections.abc import Iterable

from scissorhands.errors import InvalidRequestError, StoreUnavailableError
from scissorhands.ledger import SessionRecord
from scissorhands.v1 import cache_manager_pb2
from scissorhands_server.manager.care import object_message
from scissorhands_server.manager.encoding import read_state, session_message
from scissorhands_server.manager.keeper import ARCHIVE, ROW
from scissorhands_server.manager.sessions import DEFAULT_PAGE, Sessions
from scissorhands_server.manager.space import Space
from scissorhands_server.store.registry import ObjectName

# A page's token within the store begins so; within the ledger it is a number.
_STORE = "s"
_STORED = cache_manager_pb2.SESSION_STATE_STORED

Request = cache_manager_pb2.ListSessionsRequest
Response = cache_manager_pb2.ListSessionsResponse


class Listing:
    """Writes pages of sessions.

    Args:
        sessions: What the ledger knows.
        space: What the store has.
        tenant: Whose sessions.
        wall_offset: What to add to the ledger's clock to get seconds since 1970.
    """

    def __init__(self, sessions: Sessions, space: Space, tenant: str, wall_offset: float) -> None:
        self._sessions = sessions
        self._space = space
        self._tenant = tenant
        self._wall_offset = wall_offset

    async def page(self, request: Request) -> Response:
        """Return a page of sessions.

        Raises:
            InvalidRequestError: A field is malformed.
        """
        token = request.page_token
        try:
            if token.startswith(_STORE) or request.state == _STORED:
                return await self._stored_page(token.removeprefix(_STORE), request.page_size or DEFAULT_PAGE)
            return await self._known_page(request)
        except StoreUnavailableError:
            if token.startswith(_STORE) or request.state == _STORED:
                raise
            # What the ledger knows is told all the same.
            records, following = self._sessions.page(request, read_state(request.state))
            return Response(sessions=[self._message(record) for record in records], next_page_token=following)

    async def add_stored(self, messages: Iterable[cache_manager_pb2.Session]) -> None:
        """Write into sessions what the store has of them.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        by_id = {message.spec.session_id: message for message in messages}
        names = [name for session_id in by_id for name in self._names(session_id)]
        for found in (await self._space.registry.look(names)).values():
            by_id[found.name.name].stored.append(object_message(found))

    async def _known_page(self, request: Request) -> Response:
        records, token = self._sessions.page(request, read_state(request.state))
        sessions = [self._message(record) for record in records]
        await self.add_stored(sessions)
        if not token and not request.state:
            token = _STORE
        return Response(sessions=sessions, next_page_token=token)

    async def _stored_page(self, cursor: str, size: int) -> Response:
        if cursor and not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= len(str(2**64))):
            raise InvalidRequestError("page_token", "must be empty or the token of an earlier page")
        following, entries = await self._space.registry.walk(self._tenant, cursor, size)
        rows = {entry.name.name for entry in entries if entry.name.kind == ROW}
        archives = {entry.name.name for entry in entries if entry.name.kind == ARCHIVE} - rows
        # A session with both is listed where its row is.
        elsewhere = await self._space.registry.look([ObjectName(self._tenant, ROW, name) for name in archives])
        archives -= {name.name for name in elsewhere}
        unknown = sorted(name for name in rows | archives if self._sessions.find(name) is None)
        sessions = [
            cache_manager_pb2.Session(spec=cache_manager_pb2.SessionSpec(session_id=name), state=_STORED)
            for name in unknown
        ]
        await self.add_stored(sessions)
        return Response(sessions=sessions, next_page_token=f"{_STORE}{following}" if following else "")

    def _message(self, record: SessionRecord) -> cache_manager_pb2.Session:
        return session_message(record, self._wall_offset, segments=False)

    def _names(self, session_id: str) -> list[ObjectName]:
        return [ObjectName(self._tenant, kind, session_id) for kind in (ROW, ARCHIVE)]
