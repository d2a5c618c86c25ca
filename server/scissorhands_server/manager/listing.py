"""Lists of sessions: those that the ledger knows, then those of which only the store has something."""

import re
from collections import defaultdict
from collections.abc import Iterable

from scissorhands.errors import InvalidRequestError, StoreUnavailableError
from scissorhands.ledger import SessionRecord
from scissorhands.tenant import TENANT, qualified, split
from scissorhands.v1 import cache_manager_pb2
from scissorhands_server.manager.care import object_message
from scissorhands_server.manager.encoding import read_state, session_message
from scissorhands_server.manager.keeper import ARCHIVE, ROW
from scissorhands_server.manager.sessions import DEFAULT_PAGE, Sessions
from scissorhands_server.manager.space import Space
from scissorhands_server.store.registry import ObjectName
from scissorhands_server.tenants import scope, seen_name

# A page's token within the store is this, whose objects come next, and where among them; in the ledger it is a number.
_STORE = "s"
_TOKEN = re.compile(rf"{_STORE}(?:({TENANT.pattern})/(\d{{0,20}}))?", re.ASCII)
_STORED = cache_manager_pb2.SESSION_STATE_STORED

Request = cache_manager_pb2.ListSessionsRequest
Response = cache_manager_pb2.ListSessionsResponse


class Listing:
    """Writes pages of sessions: of all tenants for operators and workers, of their own for clients.

    Args:
        sessions: What the ledger knows.
        space: What the store has.
        wall_offset: What to add to the ledger's clock to get seconds since 1970.
    """

    def __init__(self, sessions: Sessions, space: Space, wall_offset: float) -> None:
        self._sessions = sessions
        self._space = space
        self._wall_offset = wall_offset

    async def page(self, request: Request) -> Response:
        """Return a page of sessions.

        Raises:
            InvalidRequestError: A field is malformed.
        """
        token = request.page_token
        try:
            if token.startswith(_STORE) or request.state == _STORED:
                return await self._stored_page(token or _STORE, request.page_size or DEFAULT_PAGE)
            return await self._known_page(request)
        except StoreUnavailableError:
            if token.startswith(_STORE) or request.state == _STORED:
                raise
            # What the ledger knows is told all the same.
            records, following = self._sessions.page(request, read_state(request.state), scope())
            return _page([self._message(record) for record in records], following)

    async def add_stored(self, messages: Iterable[cache_manager_pb2.Session]) -> None:
        """Write into sessions what the store has of them.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        names: dict[str, list[ObjectName]] = defaultdict(list)
        by_id = {message.spec.session_id: message for message in messages}
        for session_id in by_id:
            tenant, name = split(session_id)
            names[tenant] += [ObjectName(tenant, kind, name) for kind in (ROW, ARCHIVE)]
        for of_tenant in names.values():
            for found in (await self._space.registry.look(of_tenant)).values():
                by_id[found.name.qualified].stored.append(object_message(found))

    async def _known_page(self, request: Request) -> Response:
        records, token = self._sessions.page(request, read_state(request.state), scope())
        sessions = [self._message(record) for record in records]
        await self.add_stored(sessions)
        if not token and not request.state:
            token = _STORE
        return _page(sessions, token)

    async def _stored_page(self, token: str, size: int) -> Response:
        match = _TOKEN.fullmatch(token)
        if not match:
            raise InvalidRequestError("page_token", "must be empty or the token of an earlier page")
        own = scope()
        tenants = [own] if own else await self._space.registry.tenants()
        left = [tenant for tenant in tenants if tenant >= (match[1] or "")]
        if not left:
            return Response()
        tenant = left[0]
        cursor = match[2] or "" if tenant == match[1] else ""
        following, entries = await self._space.registry.walk(tenant, cursor, size)
        rows = {entry.name.name for entry in entries if entry.name.kind == ROW}
        archives = {entry.name.name for entry in entries if entry.name.kind == ARCHIVE} - rows
        # A session with both is listed where its row is.
        elsewhere = await self._space.registry.look([ObjectName(tenant, ROW, name) for name in archives])
        archives -= {name.name for name in elsewhere}
        found = sorted(qualified(tenant, name) for name in rows | archives)
        sessions = [
            cache_manager_pb2.Session(spec=cache_manager_pb2.SessionSpec(session_id=name), state=_STORED)
            for name in found
            if self._sessions.find(name) is None
        ]
        await self.add_stored(sessions)
        if following:
            return _page(sessions, f"{_STORE}{tenant}/{following}")
        return _page(sessions, f"{_STORE}{left[1]}/" if left[1:] else "")

    def _message(self, record: SessionRecord) -> cache_manager_pb2.Session:
        return session_message(record, self._wall_offset, segments=False)


def _page(sessions: Iterable[cache_manager_pb2.Session], token: str) -> Response:
    """Write a page, each session by the name that the caller has for it."""
    response = Response(sessions=sessions, next_page_token=token)
    for session in response.sessions:
        session.spec.session_id = seen_name(session.spec.session_id)
    return response
