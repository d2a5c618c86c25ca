"""The janitor: mends what a crash, a lost reply or a full store has left behind.

It looks at the pages of the store, a bounded number a round: those that nothing names, and that nobody can still come
to name, are deleted; objects without an entry in the registry are entered. Then it looks at entries, as many: those of
objects that are gone are taken off, wrong sizes are corrected, and objects of which a part is missing are deleted. One
manager at a time does so.
"""

import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from scissorhands.errors import BrokenRowError, CorruptSegmentError, StoreFullError, StoreUnavailableError
from scissorhands.tenant import qualified
from scissorhands_server.manager.keeper import Keeper
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.manager.space import Space
from scissorhands_server.store.base import PageStore
from scissorhands_server.store.registry import ObjectName, StoredObject

LOGGER = logging.getLogger(__name__)

_OWNER, _LEASE_PAGE = "janitor", "lease"
# A round takes far less; whoever is killed in one is followed by another after this.
_LEASE_SECONDS = 30.0
# Entries of one round.
_ENTRIES = 256


@dataclass(frozen=True)
class Mend:
    """Something that the janitor found, and mended unless it was only asked to look.

    Args:
        what: What it was, one of :data:`~scissorhands_server.manager.space_metrics.JANITOR_RESULTS`, or ``broken``.
        name: The object.
        page: The page, for those that nothing names; otherwise empty.
        size: Bytes that are freed, or that an entry was wrong by.
    """

    what: str
    name: ObjectName
    page: str = ""
    size: int = 0


class Janitor:
    """Looks after the pages and the entries of all tenants, a piece a round.

    Args:
        store: The store.
        space: The objects, and who keeps them.
        metrics: The manager's metrics.
    """

    def __init__(self, store: PageStore, space: Space, metrics: ManagerMetrics) -> None:
        self._store = store
        self._space = space
        self._metrics = metrics
        self._cursor = ""
        self._entries: dict[str, str] = {}

    async def tick(self) -> None:
        """Do one round, show what is stored, and evict what is beyond a bound.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        await self._ask_store()
        async with self._lease() as taken:
            if taken:
                await self._round()
                await self._space.trim()
        await self._space.measure()

    async def _ask_store(self) -> None:
        try:
            info = await self._store.info()
        except StoreUnavailableError as error:
            # Not every user may ask. If the store is away, what follows tells.
            LOGGER.debug("the store does not say how much memory it has: %s", error)
            return
        self._metrics.space.memory.set(info.used_bytes)
        self._metrics.space.most_memory.set(info.most_bytes)
        self._space.bound_by_store(info.most_bytes)

    async def sweep(self, *, dry_run: bool) -> AsyncIterator[Mend]:
        """Look at everything, and yield what is found and, unless ``dry_run``, mended.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        cursor, begun = "", False
        while cursor or not begun:
            begun = True
            cursor, found = await self._store.scan(cursor)
            async for mend in self._pages(found, dry_run=dry_run):
                yield mend
        for tenant in await self._space.registry.tenants():
            async for entry in self._space.registry.entries(tenant):
                async for mend in self._entry(entry, dry_run=dry_run):
                    yield mend

    @asynccontextmanager
    async def _lease(self) -> AsyncIterator[bool]:
        mine = secrets.token_bytes(8)
        try:
            taken = await self._store.compare_and_set(_OWNER, _LEASE_PAGE, None, mine, _LEASE_SECONDS)
        except StoreFullError:
            # Then there is most to do. Several at once do the same, and no harm.
            taken = True
        try:
            yield taken
        finally:
            if taken:
                await self._store.delete(_OWNER, [_LEASE_PAGE])

    async def _round(self) -> None:
        self._cursor, found = await self._store.scan(self._cursor)
        async for _ in self._pages(found, dry_run=False):
            pass
        for tenant in await self._space.registry.tenants():
            cursor = self._entries.get(tenant, "")
            self._entries[tenant], entries = await self._space.registry.walk(tenant, cursor, _ENTRIES)
            for entry in entries:
                async for _ in self._entry(entry, dry_run=False):
                    pass

    async def _pages(self, found: list[tuple[str, str]], *, dry_run: bool) -> AsyncIterator[Mend]:
        """Look at pages that a scan has found."""
        grouped: dict[tuple[Keeper, str], list[tuple[str, str]]] = defaultdict(list)
        for owner, page in found:
            tenant, _, within = owner.partition("/")
            for keeper in self._space.keepers:
                name = keeper.named_by(within, page) if within else None
                if name is not None:
                    grouped[keeper, qualified(tenant, name)].append((owner, page))
        tenants = set(await self._space.registry.tenants())
        for (keeper, name), pages in grouped.items():
            known = keeper.object_name(name)
            if known.tenant not in tenants and not dry_run:
                await self._space.enter(known.tenant)
                tenants.add(known.tenant)
            owner = pages[0][0]
            for page in await keeper.dead(name, [page for _, page in pages]):
                stat = await self._store.stat(owner, page)
                if not dry_run:
                    await self._store.delete(owner, [page])
                yield self._mended(Mend("dead_page", known, page, stat.size if stat else 0), dry_run=dry_run)
            if known not in await self._space.registry.look([known]):
                async for mend in self._unknown(keeper, known, dry_run=dry_run):
                    yield mend

    async def _unknown(self, keeper: Keeper, known: ObjectName, *, dry_run: bool) -> AsyncIterator[Mend]:
        """Enter an object that has no entry."""
        try:
            size = await keeper.measure(known.qualified)
        except (BrokenRowError, CorruptSegmentError):
            async for mend in self._broken(known, 0, dry_run=dry_run):
                yield mend
            return
        if size:
            if not dry_run:
                await self._space.registry.set(known, size, keeper.ttl, used=False)
            yield self._mended(Mend("found_object", known, size=size), dry_run=dry_run)

    async def _entry(self, entry: StoredObject, *, dry_run: bool) -> AsyncIterator[Mend]:
        """Compare an entry with its object."""
        known, keeper = entry.name, self._space.keeper(entry.name)
        # What is pinned may be about to be written; its entry is right in a moment.
        if keeper is None or entry.pinned:
            return
        try:
            size = await keeper.measure(known.qualified)
        except (BrokenRowError, CorruptSegmentError):
            async for mend in self._broken(known, entry.size, dry_run=dry_run):
                yield mend
            return
        if size != entry.size and (dry_run or await self._space.mend(known, size, keeper.ttl)):
            what = "mended_entry" if size else "gone_object"
            yield self._mended(Mend(what, known, size=abs(size - entry.size)), dry_run=dry_run)

    async def _broken(self, known: ObjectName, counted: int, *, dry_run: bool) -> AsyncIterator[Mend]:
        """Delete an object that is of no use, unless a turn holds it and will replace it."""
        if dry_run or await self._space.discard(known, "broken"):
            LOGGER.warning("a part of stored %s %s is missing", known.kind, known.name)
            yield Mend("broken", known, size=counted)

    def _mended(self, mend: Mend, *, dry_run: bool) -> Mend:
        if not dry_run:
            LOGGER.info("%s of %s %s %s", mend.what, mend.name.kind, mend.name.name, mend.page)
            self._metrics.space.janitor.labels(mend.what).inc()
        return mend
