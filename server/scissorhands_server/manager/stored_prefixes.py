"""Prefixes as they lie in the store: parts first, the record last.

Each boundary is an owner of its own, named by its key, so it is one object that is listed and deleted as a whole. Its
record, written once, has the manifest and the name of who wrote the parts: of two who store the same boundary at once
one wins, and no part is ever of another's manifest. Parts are worth nothing until a record names them; until then they
are kept for a short while only.
"""

import asyncio
import re
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from scissorhands.errors import BrokenRowError, CorruptRowError, MissingPartError
from scissorhands.prefix import KEY_BYTES, PrefixManifest
from scissorhands.tenant import qualified, split
from scissorhands_server.manager.keeper import PREFIX, UNLISTED_SECONDS, Keeper
from scissorhands_server.manager.parts import in_order

_PAGES = "prefix:"
_RECORD = f"{_PAGES}record"
_OWNER = re.compile(f"prefix:([0-9a-f]{{{2 * KEY_BYTES}}})")
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

    @property
    def name(self) -> str:
        """What it is stored under."""
        return name_of(self.manifest.identity.tenant, self.manifest.key)


def size_of(manifest: PrefixManifest) -> int:
    """Return the bytes of a boundary, its manifest's included."""
    return manifest.state_bytes + len(manifest.pack())


def name_of(tenant: str, key: bytes) -> str:
    """Return what a tenant's boundary is stored under."""
    return qualified(tenant, key.hex())


class StoredPrefixes(Keeper):
    """Reads and writes prefixes. Each is named by its tenant and key (:func:`name_of`).

    Args:
        store: Where they lie.
        ttl: How long a boundary stays after its last use, in seconds.
    """

    kind = PREFIX

    async def find(self, name: str) -> StoredPrefix | None:
        """Return what is stored under a name; None if nothing is.

        Raises:
            CorruptRowError: The record is malformed, or another's.
            StoreUnavailableError: The store does not answer.
        """
        data = await self._store.get(_owner(name), _RECORD)
        if data is None:
            return None
        found = StoredPrefix(data[:_WRITER_BYTES], PrefixManifest.parse(data[_WRITER_BYTES:]))
        if found.name != name:
            raise CorruptRowError("what is stored under a prefix's key is another's")
        return found

    @staticmethod
    def new_writer() -> bytes:
        """Return a name for whoever writes parts now."""
        return secrets.token_bytes(_WRITER_BYTES)

    async def put(self, name: str, writer: bytes, index: int, data: bytes) -> None:
        """Write one part."""
        await self._store.put(_owner(name), _part(writer, index), data, UNLISTED_SECONDS)

    async def commit(self, name: str, writer: bytes, manifest: bytes, parts: int) -> bool:
        """Make the parts that were written the boundary's; False, and they are deleted, if it was stored meanwhile."""
        owner, names = _owner(name), _parts(writer, parts)
        await self._store.commit(owner, names, self.ttl)
        record = writer + manifest
        if await self._store.compare_and_set(owner, _RECORD, None, record, self.ttl):
            return True
        # It may have been written, and the reply lost.
        if await self._store.get(owner, _RECORD) == record:
            return True
        await self._store.delete(owner, names)
        return False

    async def discard(self, name: str, writer: bytes, parts: int) -> None:
        """Delete parts that will not be committed."""
        await self._store.delete(_owner(name), _parts(writer, parts))

    async def touch(self, found: StoredPrefix) -> None:
        """Let a boundary stay for as long as if it were new."""
        names = [_RECORD, *_parts(found.writer, len(found.manifest.parts))]
        await self._store.commit(_owner(found.name), names, self.ttl)

    async def delete(self, name: str) -> None:
        """Delete a boundary: its record first, so that nobody finds it without its parts."""
        owner = _owner(name)
        await self._store.delete(owner, [_RECORD])
        await self._store.delete(owner, [page.name for page in await self._store.list_pages(owner)])

    async def remove(self, name: str, *, held: bool = False) -> bool:
        """See :class:`Keeper`. Nobody holds a boundary; whoever is reading it misses the rest."""
        del held
        await self.delete(name)
        return True

    async def measure(self, name: str) -> int:
        """See :class:`Keeper`."""
        found = await self.find(name)
        if found is None:
            return 0
        owner, names = _owner(found.name), _parts(found.writer, len(found.manifest.parts))
        if None in await asyncio.gather(*(self._store.stat(owner, part) for part in names)):
            if await self.find(found.name) is None:
                return 0
            raise MissingPartError("a part of a prefix is missing")
        return size_of(found.manifest)

    async def verify(self, name: str) -> int:
        """See :class:`Keeper`."""
        found = await self.find(name)
        if found is None:
            return 0
        try:
            expected = iter(found.manifest.parts)
            fetches = [partial(self.fetch, found, index) for index in range(len(found.manifest.parts))]
            async with aclosing(in_order(fetches)) as parts:
                async for data in parts:
                    next(expected).check(data)
        except BrokenRowError:
            if await self.find(found.name) == found:
                raise
            return 0  # It was deleted meanwhile.
        return size_of(found.manifest)

    def named_by(self, owner: str, page: str) -> str | None:
        """See :class:`Keeper`."""
        return match[1] if (match := _OWNER.fullmatch(owner)) and page.startswith(_PAGES) else None

    async def dead(self, name: str, pages: Sequence[str]) -> list[str]:
        """See :class:`Keeper`. Whoever writes parts may still come to name them, unless that is overdue."""
        try:
            found = await self.find(name)
        except CorruptRowError:
            return []  # It is measured next, and goes as a whole.
        named = {_RECORD, *(_parts(found.writer, len(found.manifest.parts)) if found else ())}
        return [page for page in pages if page not in named and await self._overdue(_owner(name), page)]

    async def fetch(self, found: StoredPrefix, index: int) -> bytes:
        """Return a part of a boundary, unchecked.

        Raises:
            MissingPartError: It is missing.
            StoreUnavailableError: The store does not answer.
        """
        data = await self._store.get(_owner(found.name), _part(found.writer, index))
        if data is None:
            raise MissingPartError(f"part {index} of a prefix is missing")
        return data


def _owner(name: str) -> str:
    tenant, key = split(name)
    return f"{tenant}/{_PAGES}{key}"


def _part(writer: bytes, index: int) -> str:
    return f"{_PAGES}{writer.hex()}:{index}"


def _parts(writer: bytes, count: int) -> list[str]:
    return [_part(writer, index) for index in range(count)]
