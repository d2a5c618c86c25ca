"""Loading and storing prefixes: the longest one that is stored, part by part, every part checked."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from functools import partial

from scissorhands.errors import (
    BrokenRowError,
    CorruptRowError,
    InvalidRequestError,
    StoreUnavailableError,
)
from scissorhands.prefix import KEY_BYTES, MAX_BOUNDARIES, PartPlace, PrefixManifest, in_transfer
from scissorhands.tenant import DEFAULT_TENANT
from scissorhands.v1 import prefix_pb2
from scissorhands_server.manager.admission import Admission
from scissorhands_server.manager.checks import check_tenant
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.parts import STREAM_BYTES, counted, in_order, receive_all
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.manager.space import Space
from scissorhands_server.manager.stored_prefixes import StoredPrefix, StoredPrefixes, name_of, size_of
from scissorhands_server.manager.stream import MessageStream
from scissorhands_server.row_messages import RowChunk, row_chunks

LOGGER = logging.getLogger(__name__)

# Boundaries that are looked up at once.
_LOOKUPS = 8
# Boundaries that are remembered as asked for: some megabytes.
_MAX_ASKED = 1 << 16

Request = prefix_pb2.StorePrefixRequest
Response = prefix_pb2.LoadPrefixResponse
Received = Request | RowChunk


class Prefixes:
    """Gives prefixes out and takes them in. No stream holds more than two parts.

    Args:
        stored: The prefixes in the store.
        space: Makes room for them.
        settings: Limits.
        metrics: The manager's metrics.
        streams: A bound on the rows that are on their way.
    """

    def __init__(
        self,
        stored: StoredPrefixes,
        space: Space,
        settings: ManagerSettings,
        metrics: ManagerMetrics,
        streams: Admission,
    ) -> None:
        self._stored = stored
        self._space = space
        self._settings = settings
        self._metrics = metrics
        self._streams = streams
        self._asked: OrderedDict[bytes, None] = OrderedDict()

    async def load(self, asked: prefix_pb2.LoadPrefixRequest) -> AsyncIterator[Response | RowChunk]:
        """Yield the longest stored prefix of a prompt; the header alone if there is none.

        Raises:
            InvalidRequestError: The boundaries are malformed.
            BrokenRowError: What is stored is not whole; what is broken of it is deleted.
            CapacityError: Too many rows are on their way.
            StoreUnavailableError: The store does not answer.
        """
        check_tenant(asked.tenant or DEFAULT_TENANT)
        _check_boundaries(asked.boundaries)
        with counted(self._metrics.prefix_loads):
            before = self._remember([boundary.key for boundary in asked.boundaries])
            chain = await self._longest(asked)
            manifests = [found.manifest.pack() for found in chain]
            yield Response(header=prefix_pb2.LoadPrefixHeader(manifests=manifests, asked_before=before))
            if not chain:
                return
            ticket = self._streams.admit(STREAM_BYTES)
            try:
                # First of all, so that their time is not over half way.
                await asyncio.gather(*(self._stored.touch(found) for found in chain), self._use(chain, pinned=True))
                async with aclosing(self._send(chain)) as sent:
                    async for chunk in sent:
                        yield chunk
            finally:
                ticket.release()
                await self._use(chain, pinned=False)

    async def store(self, messages: AsyncIterator[Received]) -> prefix_pb2.StorePrefixResponse:
        """Store a boundary, whole or not at all; one that is stored stays as it is.

        Raises:
            InvalidRequestError: The stream is malformed, or the state too large.
            CorruptRowError: A part is not what the manifest says.
            CapacityError: Too many rows are on their way.
            QuotaError: The boundary finds no room.
            StoreUnavailableError: The store does not answer.
        """
        requests = MessageStream(messages, self._settings.stream_timeout)
        async with requests.heard_out():
            stored = await self._store(requests)
        self._metrics.prefix_stored_bytes.inc(stored)
        return prefix_pb2.StorePrefixResponse(stored_bytes=stored)

    async def _store(self, requests: MessageStream[Received]) -> int:
        """Store a boundary; return its bytes, 0 if it was stored already."""
        with counted(self._metrics.prefix_stores):
            message = await requests.next()
            if not isinstance(message, Request) or message.WhichOneof("part") != "header":
                raise InvalidRequestError("part", "the stream must begin with a header")
            manifest = self._manifest(message.header.manifest)
            name = name_of(manifest.identity.tenant, manifest.key)
            found = await self._find(name)
            if found is not None:
                await asyncio.gather(self._stored.touch(found), self._use([found], pinned=False))
                return 0
            stored = size_of(manifest)
            async with self._space.writing(self._stored.object_name(name), stored, self._stored.ttl, whole=True):
                return stored if await self._take(requests, name, manifest, message.header.manifest) else 0

    def _remember(self, keys: Sequence[bytes]) -> int:
        """Note that boundaries are asked for; return how many there are up to the last that was asked for before."""
        before = 0
        for index, key in enumerate(keys):
            if key in self._asked:
                before = index + 1
                self._asked.move_to_end(key)
            self._asked[key] = None
        while len(self._asked) > _MAX_ASKED:
            self._asked.popitem(last=False)
        return before

    async def _longest(self, asked: prefix_pb2.LoadPrefixRequest) -> list[StoredPrefix]:
        """Return what is stored of the longest prefix: one whole state, or boundaries that go on from one another."""
        tenant = asked.tenant or DEFAULT_TENANT
        whole = [name_of(tenant, boundary.key) for boundary in asked.boundaries if boundary.whole]
        grown = [name_of(tenant, boundary.key) for boundary in asked.boundaries if not boundary.whole]
        for end in range(len(whole), 0, -_LOOKUPS):
            for found in reversed(await self._found(whole[max(0, end - _LOOKUPS) : end])):
                if found is not None:
                    return [found]
        chain: list[StoredPrefix] = []
        # Most prompts share nothing, which the first boundary tells.
        sizes = [1, *([_LOOKUPS] * len(grown))]
        while len(chain) < len(grown):
            batch = await self._found(grown[len(chain) : len(chain) + sizes.pop(0)])
            for found in batch:
                if found is None:
                    return chain
                chain.append(found)
        return chain

    async def _found(self, names: Sequence[str]) -> list[StoredPrefix | None]:
        return list(await asyncio.gather(*(self._find(name) for name in names)))

    async def _find(self, name: str) -> StoredPrefix | None:
        """Return what is stored under a name; what cannot be read is deleted."""
        try:
            return await self._stored.find(name)
        except CorruptRowError as error:
            await self._broken(name, error)
            return None

    async def _send(self, chain: Sequence[StoredPrefix]) -> AsyncGenerator[RowChunk]:
        """Yield the parts of boundaries in chunks."""
        order = in_transfer([found.manifest for found in chain])
        fetches = [partial(self._fetch, chain[place.boundary], place) for place in order]
        async with aclosing(in_order(fetches)) as parts:
            async for data in parts:
                for chunk in row_chunks(data):
                    yield chunk
                self._metrics.prefix_loaded_bytes.inc(len(data))

    async def _fetch(self, found: StoredPrefix, place: PartPlace) -> bytes:
        """Return a part of a boundary; one that is broken takes the boundary with it."""
        try:
            data = await self._stored.fetch(found, place.rank)
            place.part.check(data)
        except BrokenRowError as error:
            await self._broken(found.name, error)
            raise
        return data

    async def _use(self, chain: Sequence[StoredPrefix], *, pinned: bool) -> None:
        """Take note that boundaries are used. Without the first the others are nothing, so it goes last."""
        names = [self._stored.object_name(found.name) for found in chain]
        await self._space.use(names, pinned=pinned, ttl=self._stored.ttl)

    async def _broken(self, name: str, error: BrokenRowError) -> None:
        LOGGER.warning("a stored prefix is deleted: %s", error)
        self._metrics.prefixes_broken.inc()
        with suppress(StoreUnavailableError):
            await self._space.discard(self._stored.object_name(name), "broken")

    def _manifest(self, data: bytes) -> PrefixManifest:
        manifest = PrefixManifest.parse(data)
        check_tenant(manifest.identity.tenant, "header.manifest")
        if manifest.state_bytes > self._settings.max_suspended_bytes:
            raise InvalidRequestError(
                "header.manifest",
                f"the state has {manifest.state_bytes} bytes, above the limit of {self._settings.max_suspended_bytes}",
            )
        return manifest

    async def _take(
        self, requests: MessageStream[Received], name: str, manifest: PrefixManifest, written: bytes
    ) -> bool:
        """Receive and write all parts, then the record; False if it was stored meanwhile."""
        writer, count = self._stored.new_writer(), len(manifest.parts)
        ticket = self._streams.admit(STREAM_BYTES)
        try:
            await receive_all(requests, manifest.parts, partial(self._stored.put, name, writer))
            return await self._stored.commit(name, writer, written, count)
        except BaseException:
            # What cannot be deleted now goes by itself.
            with suppress(StoreUnavailableError):
                await self._stored.discard(name, writer, count)
            raise
        finally:
            ticket.release()


def _check_boundaries(asked: Sequence[prefix_pb2.PrefixBoundary]) -> None:
    if not 0 < len(asked) <= MAX_BOUNDARIES:
        raise InvalidRequestError("boundaries", f"must be 1 to {MAX_BOUNDARIES}, got {len(asked)}")
    if any(len(boundary.key) != KEY_BYTES for boundary in asked):
        raise InvalidRequestError("boundaries.key", f"must be {KEY_BYTES} bytes")
