"""Prefixes as they lie in the store: parts first, the record last.

Each boundary is an owner of its own, named by its key, so it is one object that is listed and deleted as a whole. Its
record, written once, has the manifest and the name of who wrote the parts: of two who store the same boundary at once
one wins, and no part is ever of another's manifest. Parts are worth nothing until a record names them; until then they
are kept for a short while only.
"""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from scissorhands.errors import CorruptRowError
from scissorhands.prefix import PrefixManifest
from scissorhands_server.manager.suspended_rows import UNLISTED_SECONDS
from scissorhands_server.store.base import PageStore

_RECORD = "prefix:record"
_WRITER_BYTES = 8


@dataclass(frozen=True)
class StoredPrefix:
    """What is stored at a boundary.

    Args:
        writer: Who wrote the parts.
        manifest: The manifest.
    """

    writer: bytes
    manifest: PrefixManifest


class StoredPrefixes:
    """Reads and writes the prefixes of one tenant.

    Args:
        store: Where they lie.
        tenant: Whose they are, as the server has established it.
        ttl: How long a boundary stays after its last use, in seconds.
    """

    def __init__(self, store: PageStore, tenant: str, ttl: float) -> None:
        self._store = store
        self.tenant = tenant
        self._ttl = ttl

    async def find(self, key: bytes) -> StoredPrefix | None:
        """Return what is stored under a key; None if nothing is.

        Raises:
            CorruptRowError: The record is malformed, or another's.
            StoreUnavailableError: The store does not answer.
        """
        data = await self._store.get(self._owner(key), _RECORD)
        if data is None:
            return None
        manifest = PrefixManifest.parse(data[_WRITER_BYTES:])
        if (manifest.key, manifest.identity.tenant) != (key, self.tenant):
            raise CorruptRowError("what is stored under a prefix's key is another's")
        return StoredPrefix(data[:_WRITER_BYTES], manifest)

    @staticmethod
    def new_writer() -> bytes:
        """Return a name for whoever writes parts now."""
        return secrets.token_bytes(_WRITER_BYTES)

    async def put(self, key: bytes, writer: bytes, index: int, data: bytes) -> None:
        """Write one part."""
        await self._store.put(self._owner(key), _part(writer, index), data, UNLISTED_SECONDS)

    async def commit(self, key: bytes, writer: bytes, manifest: bytes, parts: int) -> bool:
        """Make the parts that were written the boundary's; False, and they are deleted, if it was stored meanwhile."""
        owner, names = self._owner(key), _parts(writer, parts)
        await self._store.commit(owner, names, self._ttl)
        record = writer + manifest
        if await self._store.compare_and_set(owner, _RECORD, None, record, self._ttl):
            return True
        # It may have been written, and the reply lost.
        if await self._store.get(owner, _RECORD) == record:
            return True
        await self._store.delete(owner, names)
        return False

    async def discard(self, key: bytes, writer: bytes, parts: int) -> None:
        """Delete parts that will not be committed."""
        await self._store.delete(self._owner(key), _parts(writer, parts))

    async def touch(self, found: StoredPrefix) -> None:
        """Let a boundary stay for as long as if it were new."""
        names = [_RECORD, *_parts(found.writer, len(found.manifest.parts))]
        await self._store.commit(self._owner(found.manifest.key), names, self._ttl)

    async def delete(self, key: bytes) -> None:
        """Delete a boundary: its record first, so that nobody finds it without its parts."""
        owner = self._owner(key)
        await self._store.delete(owner, [_RECORD])
        await self._store.delete(owner, [page.name for page in await self._store.list_pages(owner)])

    def fetches(self, found: StoredPrefix, *, evidence: bool) -> list[Callable[[], Awaitable[bytes]]]:
        """Return what fetches each part of a boundary, unchecked, those of its evidence only if asked for.

        Each raises :class:`~scissorhands.errors.CorruptRowError` if its part is missing.
        """
        manifest = found.manifest
        count = len(manifest.parts if evidence else manifest.grown)
        return [partial(self._fetch, manifest.key, found.writer, index) for index in range(count)]

    async def _fetch(self, key: bytes, writer: bytes, index: int) -> bytes:
        data = await self._store.get(self._owner(key), _part(writer, index))
        if data is None:
            raise CorruptRowError(f"part {index} of a prefix is missing")
        return data

    def _owner(self, key: bytes) -> str:
        return f"{self.tenant}/prefix:{key.hex()}"


def _part(writer: bytes, index: int) -> str:
    return f"prefix:{writer.hex()}:{index}"


def _parts(writer: bytes, count: int) -> list[str]:
    return [_part(writer, index) for index in range(count)]
