"""What people do with the store: look at it, mend it, check it, and keep a session's turns from beginning."""

import asyncio
from collections.abc import AsyncIterator

from google.protobuf.timestamp_pb2 import Timestamp

from scissorhands.errors import BrokenRowError, CorruptSegmentError, InvalidRequestError, StoreUnavailableError
from scissorhands.v1 import store_pb2
from scissorhands_server.manager.checks import check_session_id
from scissorhands_server.manager.janitor import Janitor
from scissorhands_server.manager.space import Space
from scissorhands_server.manager.suspended_rows import SuspendedRows
from scissorhands_server.store.base import PageStore, StoreInfo
from scissorhands_server.store.registry import ObjectName, StoredObject

_OBJECT_SECONDS = 60.0
_MOST_OBJECT_SECONDS = 3600.0


class Care:
    """Does what the commands ``store`` and ``sessions`` ask for.

    Args:
        store: The store.
        space: The objects in it.
        rows: The suspended rows among them.
        janitor: Mends them.
    """

    def __init__(self, store: PageStore, space: Space, rows: SuspendedRows, janitor: Janitor) -> None:
        self._store = store
        self._space = space
        self._rows = rows
        self._janitor = janitor

    async def pause(self, session_id: str) -> store_pb2.PauseSessionResponse:
        """Let no turn of a session begin, and keep its row.

        Raises:
            InvalidRequestError: The id is malformed.
            NotFoundError: Nothing is stored of it.
            SessionConflictError: A turn runs.
            StoreUnavailableError: The store does not answer.
        """
        check_session_id(session_id)
        await self._rows.pause(session_id)
        name = self._rows.object_name(session_id)
        await self._space.pin(name, self._rows.ttl)
        return store_pb2.PauseSessionResponse(row=await self._row(name))

    async def unpause(self, session_id: str) -> store_pb2.UnpauseSessionResponse:
        """Check a session's row, and let turns begin again.

        Raises:
            InvalidRequestError: The id is malformed.
            StoreUnavailableError: The store does not answer.
        """
        check_session_id(session_id)
        name = self._rows.object_name(session_id)
        broken = ""
        try:
            await self._rows.verify(session_id)
        except BrokenRowError as error:
            broken = str(error)
            await self._space.discard(name, "broken")
        await self._rows.unpause(session_id)
        await self._space.pin(name, 0.0)
        return store_pb2.UnpauseSessionResponse(row=await self._row(name), broken=broken)

    async def stat(self) -> store_pb2.GetStoreResponse:
        """Tell what lies in the store, and what bounds it.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        sums = await self._space.measure()
        try:
            info = await self._store.info()
        except StoreUnavailableError as error:
            if error.reason != "refused":
                raise
            info = StoreInfo(0, 0, "", 0, 0, 0)  # Not every user may ask.
        response = store_pb2.GetStoreResponse(
            quota_bytes=self._space.limits.quota,
            high_bytes=self._space.high,
            low_share=self._space.limits.low,
            used_memory_bytes=info.used_bytes,
            most_memory_bytes=info.most_bytes,
            memory_policy=info.policy,
            key_hits=info.hits,
            key_misses=info.misses,
            keys_evicted=info.evicted_keys,
        )
        for tenant, kinds in sums.items():
            for kind, total in kinds.items():
                response.totals.add(tenant=tenant, kind=kind, objects=total.objects, size_bytes=total.size)
        return response

    async def collect(self, *, dry_run: bool) -> AsyncIterator[store_pb2.CollectGarbageResponse]:
        """Mend everything, then evict what is beyond a bound; tell each thing that is done, or would be.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        async for mend in self._janitor.sweep(dry_run=dry_run):
            yield _done(mend.what, mend.name, mend.size, mend.page)
        for reason, each in await (self._space.beyond() if dry_run else self._space.trim()):
            yield _done(reason, each.name, each.size)

    async def verify(self, asked: store_pb2.VerifyStoreRequest) -> AsyncIterator[store_pb2.VerifyStoreResponse]:
        """Read every object that is entered, and tell of each whether it is whole. One part of one is held at a time.

        Raises:
            InvalidRequestError: The timeout is out of range.
            StoreUnavailableError: The store does not answer.
        """
        seconds = _OBJECT_SECONDS
        if asked.HasField("object_timeout"):
            seconds = asked.object_timeout.ToNanoseconds() / 1e9
        if not 0 < seconds <= _MOST_OBJECT_SECONDS:
            raise InvalidRequestError("object_timeout", f"must be above 0 and at most {_MOST_OBJECT_SECONDS:g} s")
        sums = await self._space.measure()
        objects = sum(total.objects for kinds in sums.values() for total in kinds.values())
        for tenant in sums:
            async for entry in self._space.registry.entries(tenant):
                found = await self._verify(entry.name, seconds, delete=asked.delete_broken)
                found.objects = objects
                yield found

    async def _verify(self, name: ObjectName, seconds: float, *, delete: bool) -> store_pb2.VerifyStoreResponse:
        found = store_pb2.VerifyStoreResponse(tenant=name.tenant, kind=name.kind, name=name.name)
        keeper = self._space.keeper(name)
        if keeper is None:
            found.error = "this manager does not know the kind"
            return found
        try:
            async with asyncio.timeout(seconds):
                found.size_bytes = await keeper.verify(name.qualified)
        except TimeoutError:
            found.error = f"it was not read within {seconds:g} s"
        except (BrokenRowError, CorruptSegmentError) as error:
            found.error = str(error)
            found.deleted = delete and await self._space.discard(name, "broken")
        return found

    async def _row(self, name: ObjectName) -> store_pb2.StoredObject | None:
        found = (await self._space.registry.look([name])).get(name)
        return object_message(found) if found else None


def object_message(found: StoredObject) -> store_pb2.StoredObject:
    """Write an entry of the registry."""
    return store_pb2.StoredObject(
        kind=found.name.kind,
        name=found.name.name,
        size_bytes=found.size,
        last_use_time=_timestamp(found.used_at),
        expire_time=_timestamp(found.expires_at),
        pinned=found.pinned,
        pin_end_time=_timestamp(found.pinned_until) if found.pinned else None,
    )


def _done(what: str, name: ObjectName, size: int, page: str = "") -> store_pb2.CollectGarbageResponse:
    return store_pb2.CollectGarbageResponse(
        what=what, tenant=name.tenant, kind=name.kind, name=name.name, page=page, size_bytes=size
    )


def _timestamp(seconds: float) -> Timestamp:
    message = Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message
