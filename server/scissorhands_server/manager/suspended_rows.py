"""Suspended rows as they lie in the store: parts first, the record last, and leases with fencing tokens.

A session has one record, which only changes by compare-and-set: the fencing token of its last turn, whether that turn
still runs, and the manifest of the row that was suspended last. Parts are named by the token of the turn that wrote
them, so no turn ever writes over another's. They are worth nothing until a record names them; until then they are kept
for a short while only. Whoever holds an old token finds the record changed, and nothing of it is listed.

A turn that runs has a page of its own, its lease, which ends by itself if nobody renews it.
"""

import asyncio
import struct
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from scissorhands.errors import BrokenRowError, CorruptRowError, MissingPartError, NotFoundError, SessionConflictError
from scissorhands.suspended import Manifest
from scissorhands.tenant import qualified
from scissorhands_server.manager.keeper import ROW, UNLISTED_SECONDS, Keeper, owner_of
from scissorhands_server.manager.parts import in_order
from scissorhands_server.store.base import PageStore

_RECORD = "suspended:record"
_PREFIX = "suspended:"
# Parts that are looked up at once.
_LOOKUPS = 8
_STATE = struct.Struct("<QQB")
_HELD, _PAUSED = 1, 2


@dataclass(frozen=True)
class Record:
    """What the store knows of a session's turns.

    Args:
        fence: Fencing token of the last turn.
        written: Fencing token of the turn whose parts the manifest names.
        held: Whether the last turn has not ended, unless its lease has.
        manifest: The manifest; empty if no row is suspended.
        paused: Whether no turn may begin.
    """

    fence: int = 0
    written: int = 0
    held: bool = False
    manifest: bytes = b""
    paused: bool = False

    def pack(self) -> bytes:
        """Write the record."""
        flags = self.held * _HELD | self.paused * _PAUSED
        return _STATE.pack(self.fence, self.written, flags) + self.manifest

    @classmethod
    def parse(cls, data: bytes | None) -> "Record":
        """Read a record. What is none, or too short to be one, is that of a session without turns."""
        if data is None or len(data) < _STATE.size:
            return cls()
        fence, written, flags = _STATE.unpack_from(data)
        return cls(fence, written, bool(flags & _HELD), data[_STATE.size :], bool(flags & _PAUSED))


class SuspendedRows(Keeper):
    """Reads and writes suspended rows.

    Args:
        store: Where they lie.
        ttl: How long a session stays after its last turn, in seconds.
        lease: How long a turn holds its session without renewing its lease, in seconds.
        now: Seconds since 1970.
    """

    kind = ROW

    def __init__(self, store: PageStore, ttl: float, lease: float, now: Callable[[], float] = time.time) -> None:
        super().__init__(store, ttl)
        self._lease = lease
        self._now = now

    async def claim(self, session_id: str) -> Record:
        """Take a session's lease for a new turn; return its record, with the new fencing token.

        Raises:
            SessionConflictError: Another turn holds it, or took it at the same moment.
            StoreUnavailableError: The store does not answer.
        """
        owner = owner_of(session_id)
        found = await self._store.get(owner, _RECORD)
        before = Record.parse(found)
        if before.paused:
            raise SessionConflictError(
                f"session {session_id!r} is suspended by hand; 'scissorhands sessions resume {session_id}' ends that"
            )
        if await self._is_held(owner, before):
            left = await self._store.time_left(owner, _lease(before.fence))
            raise SessionConflictError(
                f"another turn of session {session_id!r} runs; wait for its end, or, should its worker be gone, "
                f"for {left:.0f} s",
                left,
            )
        # Tokens ascend even if the store has lost the last one.
        after = replace(before, fence=max(before.fence + 1, int(self._now() * 1000)), held=True)
        await self._store.put(owner, _lease(after.fence), b"held", self._lease)
        if not await self._store.compare_and_set(owner, _RECORD, found, after.pack(), self.ttl):
            # The turn that was faster may have the same token, if it began in the same millisecond.
            if (await self.find(session_id)).fence != after.fence:
                await self._store.delete(owner, [_lease(after.fence)])
            raise SessionConflictError(f"another turn of session {session_id!r} began at the same moment")
        return after

    async def find(self, session_id: str) -> Record:
        """Return a session's record; without a fencing token if it has none."""
        return Record.parse(await self._store.get(owner_of(session_id), _RECORD))

    async def renew(self, session_id: str, fence: int) -> None:
        """Extend the lease of a turn. One that has ended, or lost its session, gains nothing by it."""
        await self._store.put(owner_of(session_id), _lease(fence), b"held", self._lease)

    async def release(self, session_id: str, fence: int) -> None:
        """Give a turn's lease up; what was suspended before it stays. Doing so twice is not an error."""
        owner = owner_of(session_id)
        found = await self._store.get(owner, _RECORD)
        record = Record.parse(found)
        if record.fence == fence and record.held:
            await self._store.compare_and_set(owner, _RECORD, found, replace(record, held=False).pack(), self.ttl)
        await self._store.delete(owner, [_lease(fence)])

    async def pause(self, session_id: str) -> None:
        """Let no turn begin, and let the row stay for as long as if it were new.

        Raises:
            NotFoundError: No row is suspended.
            SessionConflictError: A turn runs, or has begun at the same moment.
        """
        owner = owner_of(session_id)
        found = await self._store.get(owner, _RECORD)
        record = Record.parse(found)
        if await self._is_held(owner, record):
            raise SessionConflictError(f"a turn of session {session_id!r} runs; wait for its end")
        if not record.manifest:
            raise NotFoundError("session_id", f"nothing is stored of session {session_id!r}")
        after = replace(record, held=False, paused=True).pack()
        if not await self._store.compare_and_set(owner, _RECORD, found, after, self.ttl):
            raise SessionConflictError(f"a turn of session {session_id!r} began at the same moment")
        if names := _parts_of(record):
            await self._store.commit(owner, names, self.ttl)

    async def unpause(self, session_id: str) -> None:
        """Let turns begin again; doing so twice is not an error."""
        owner = owner_of(session_id)
        found = await self._store.get(owner, _RECORD)
        record = Record.parse(found)
        if record.paused:
            await self._store.compare_and_set(owner, _RECORD, found, replace(record, paused=False).pack(), self.ttl)

    async def put(self, session_id: str, fence: int, index: int, data: bytes) -> None:
        """Write one part."""
        await self._store.put(owner_of(session_id), _part(fence, index), data, UNLISTED_SECONDS)

    async def commit(self, session_id: str, fence: int, manifest: bytes, parts: int) -> None:
        """Make the parts that a turn has written its session's suspended row, and give its lease up.

        Raises:
            SessionConflictError: Another turn has begun, or the session was deleted; the parts are deleted.
        """
        owner, names = owner_of(session_id), [_part(fence, index) for index in range(parts)]
        if names:
            await self._store.commit(owner, names, self.ttl)
        found = await self._store.get(owner, _RECORD)
        before = Record.parse(found)
        after = replace(before, written=fence, held=False, manifest=manifest)
        if before.fence != fence or not await self._swap(owner, found, after):
            await self._store.delete(owner, names)
            raise SessionConflictError(f"session {session_id!r} has been taken by another turn, or deleted")
        stale = _parts_of(before) if before.written != fence else []
        await self._store.delete(owner, [_lease(fence), *stale])

    async def discard(self, session_id: str, fence: int, parts: int) -> None:
        """Delete parts that will not be committed."""
        await self._store.delete(owner_of(session_id), [_part(fence, index) for index in range(parts)])

    async def parts(self, session_id: str, record: Record, manifest: Manifest) -> AsyncGenerator[bytes]:
        """Yield a suspended row's parts, unchecked; the next is fetched while one is looked at.

        Raises:
            MissingPartError: One is missing.
            StoreUnavailableError: The store does not answer.
        """
        owner = owner_of(session_id)

        async def fetch(index: int) -> bytes:
            data = await self._store.get(owner, _part(record.written, index))
            if data is None:
                raise MissingPartError(f"part {index} of session {session_id!r} is missing")
            return data

        async with aclosing(in_order([partial(fetch, index) for index in range(len(manifest.parts))])) as parts:
            async for data in parts:
                yield data

    async def delete(self, session_id: str) -> int:
        """Delete all that the store has of a session, its segments included; return how many values that was."""
        owner = owner_of(session_id)
        record = await self.find(session_id)
        listed = [page.name for page in await self._store.list_pages(owner)]
        return await self._store.delete(owner, [_RECORD, _lease(record.fence), *sorted({*listed, *_parts_of(record)})])

    async def remove(self, name: str, *, held: bool = False) -> bool:
        """See :class:`Keeper`. A turn that holds the row keeps its session; what it leaves takes the row's place."""
        owner = owner_of(name)
        found = await self._store.get(owner, _RECORD)
        record = Record.parse(found)
        if not held and await self._is_held(owner, record):
            return False
        # Deleting needs no memory, so that a full store can be emptied.
        if (
            not held
            and found is not None
            and not await self._store.compare_and_set(owner, _RECORD, found, b"", self.ttl)
        ):
            return False
        listed = [page.name for page in await self._store.list_pages(owner) if page.name.startswith(_PREFIX)]
        await self._store.delete(owner, sorted({*listed, *_parts_of(record)}))
        if held and found is not None:
            await self._store.compare_and_set(owner, _RECORD, found, replace(record, manifest=b"").pack(), self.ttl)
        return True

    async def measure(self, name: str) -> int:
        """See :class:`Keeper`."""
        record = await self.find(name)
        if not record.manifest:
            return 0
        owner, names = owner_of(name), _parts_of(record)
        for start in range(0, len(names), _LOOKUPS):
            found = await asyncio.gather(*(self._store.stat(owner, part) for part in names[start : start + _LOOKUPS]))
            # Unless a turn has ended meanwhile, and its row has taken the place of this one.
            if None in found and await self.find(name) == record:
                raise MissingPartError(f"a part of session {name!r} is missing")
        return _size(record)

    async def verify(self, name: str) -> int:
        """See :class:`Keeper`."""
        record = await self.find(name)
        if not record.manifest:
            return 0
        manifest = Manifest.parse(record.manifest)
        if qualified(manifest.identity.tenant, manifest.identity.session_id) != name:
            raise CorruptRowError(f"what is stored of session {name!r} is another's")
        try:
            expected = iter(manifest.parts)
            async with aclosing(self.parts(name, record, manifest)) as parts:
                async for data in parts:
                    next(expected).check(data)
        except BrokenRowError:
            if await self.find(name) == record:
                raise
            return 0
        return _size(record)

    def named_by(self, owner: str, page: str) -> str | None:
        """See :class:`Keeper`."""
        return owner if page.startswith(_PREFIX) else None

    async def dead(self, name: str, pages: Sequence[str]) -> list[str]:
        """See :class:`Keeper`.

        Only the last turn can still come to name its parts: no record is written for the token of another. If its lease
        has ended and its parts have waited for their record as long as parts do, it will not either.
        """
        owner = owner_of(name)
        record = await self.find(name)
        held = await self._is_held(owner, record)
        dead = []
        for page in pages:
            fence, _, rest = page.removeprefix(_PREFIX).partition(":")
            if not rest.isdecimal() or (record.manifest and int(fence) == record.written):
                continue
            if int(fence) != record.fence or (not held and await self._overdue(owner, page)):
                dead.append(page)
        return dead

    async def _is_held(self, owner: str, record: Record) -> bool:
        return record.held and await self._store.stat(owner, _lease(record.fence)) is not None

    async def _swap(self, owner: str, found: bytes | None, after: Record) -> bool:
        """Write a record over the one that was found; True also if that had happened and its reply was lost."""
        if found is not None and await self._store.compare_and_set(owner, _RECORD, found, after.pack(), self.ttl):
            return True
        return await self._store.get(owner, _RECORD) == after.pack()


def _lease(fence: int) -> str:
    return f"suspended:{fence}:lease"


def _part(fence: int, index: int) -> str:
    return f"suspended:{fence}:{index}"


def _size(record: Record) -> int:
    """Return the bytes of a suspended row, its manifest's included."""
    return Manifest.parse(record.manifest).state_bytes + len(record.manifest)


def _parts_of(record: Record) -> list[str]:
    """Return the names of the parts that a record's manifest has; none if it cannot be read."""
    try:
        manifest = Manifest.parse(record.manifest)
    except CorruptRowError:
        return []
    return [_part(record.written, index) for index in range(len(manifest.parts))]
