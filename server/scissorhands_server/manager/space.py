"""Space: what each tenant may store, and which objects go when there is no more.

Whoever writes an object does so within :meth:`Space.writing`: it counts the bytes before they are written, makes room
for them, and takes them off again if writing fails. Whoever reads one, or holds its session, says so with
:meth:`Space.use`. Whole objects are evicted, those that were used least lately first; pinned ones are spared.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from scissorhands.errors import QuotaError, StoreUnavailableError
from scissorhands.tenant import DEFAULT_TENANT
from scissorhands_server.manager.keeper import KINDS, Keeper
from scissorhands_server.manager.metrics import ManagerMetrics
from scissorhands_server.store.registry import ObjectName, Registry, StoredObject, Totals

LOGGER = logging.getLogger(__name__)

# Objects that are looked at at once when some must go.
_BATCH = 16
# Objects that are told of when only asked what would go.
_MOST_SHOWN = 512
# How often room is made for one object; others may take it meanwhile.
_TRIES = 4
# Of the store's own bound, when no high-water mark is set: what Redis needs beside our bytes.
_HIGH_SHARE = 0.8

# How long an object to which something is added is spared for that.
_ADDING_SECONDS = 2.0

# How often a tenant is entered again.
_ENTER_SECONDS = 600.0

QUOTA_SETTING, HIGH_SETTING = "tenant_quota_bytes", "store_high_bytes"


@dataclass(frozen=True)
class SpaceLimits:
    """What bounds the store.

    Args:
        quota: Most bytes of one tenant; 0 if there is no bound.
        high: Bytes of all tenants at which eviction begins; 0 takes a share of what the store itself may hold.
        low: Share of a mark that eviction goes down to.
        pin: How long an object in use is spared unless that is renewed, in seconds.
    """

    quota: int
    high: int
    low: float
    pin: float


class Space:
    """Decides what stays in the store.

    Args:
        registry: The objects that are there.
        limits: What they may come to.
        metrics: The manager's metrics.
    """

    def __init__(self, registry: Registry, limits: SpaceLimits, metrics: ManagerMetrics) -> None:
        self.registry = registry
        self.limits = limits
        self.high = limits.high
        self._metrics = metrics
        self._keepers: dict[str, Keeper] = {}
        # When, by the event loop's clock, each tenant is to be entered again.
        self._entered: dict[str, float] = {}
        # What the objects of each tenant came to when that was known last.
        self._sizes: dict[str, int] = {}

    def add_keeper(self, keeper: Keeper) -> None:
        """Let objects of a kind be evicted, mended and checked."""
        self._keepers[keeper.kind] = keeper

    @property
    def keepers(self) -> list[Keeper]:
        """Those that were added."""
        return list(self._keepers.values())

    def keeper(self, name: ObjectName) -> Keeper | None:
        """Return who looks after an object."""
        return self._keepers.get(name.kind)

    async def enter(self, tenant: str) -> None:
        """Let a tenant be among those whose objects are looked after, for longer than they stay.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        longest = max(keeper.ttl for keeper in self.keepers)
        await self.registry.enter(tenant, longest + 2 * _ENTER_SECONDS)
        self._entered[tenant] = asyncio.get_running_loop().time() + _ENTER_SECONDS

    @asynccontextmanager
    async def writing(self, name: ObjectName, size: int, ttl: float, *, whole: bool) -> AsyncIterator[None]:
        """Make room for bytes that the block writes, and count them unless it raises.

        Args:
            name: The object that they are part of. It is pinned meanwhile.
            size: How many they are.
            ttl: How long the object stays, in seconds.
            whole: Whether they take the place of what the object had; else they are added to it. Until the block is
                through, the object counts with both.

        Raises:
            QuotaError: There is no room, and none can be made.
            StoreUnavailableError: The store does not answer.
        """
        await self._keep_entered(name.tenant)
        await self._reserve(name, size, ttl, self.limits.pin if whole else min(self.limits.pin, _ADDING_SECONDS))
        try:
            yield
        except BaseException:
            with suppress(StoreUnavailableError):
                await self.registry.add(name, -size, 0, ttl, 0)
            raise
        if whole:
            with suppress(StoreUnavailableError):
                await self.registry.set(name, size, ttl, used=True)

    async def use(self, names: Sequence[ObjectName], *, pinned: bool, ttl: float = 0.0) -> None:
        """Take note that objects of one tenant are used, those to be evicted last first. It never fails.

        Args:
            names: The objects; those that are not stored are left out.
            pinned: Whether they may not be evicted for a while, unless that is renewed; else they may from now on.
            ttl: How long they stay from now on at least, in seconds; 0 if that has not changed.
        """
        with suppress(StoreUnavailableError):
            await self._keep_entered(names[0].tenant)
            await self.registry.use(names, self.limits.pin if pinned else 0.0, ttl)

    async def pin(self, name: ObjectName, seconds: float) -> None:
        """Let an object stay, and not be evicted, for a time; with 0 it may be evicted from now on.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        await self.registry.use([name], seconds, seconds)

    async def forget(self, names: Sequence[ObjectName]) -> None:
        """Take objects off that have been deleted. What cannot be taken off now is found by the janitor."""
        with suppress(StoreUnavailableError):
            for name in names:
                await self.registry.take(name, pinned=True)

    async def discard(self, name: ObjectName, reason: str, *, held: bool = False) -> bool:
        """Delete an object that is of no use; False if a turn holds it.

        Args:
            name: The object.
            reason: Why.
            held: Whether the caller itself holds it.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        if not await self._keepers[name.kind].remove(name.qualified, held=held):
            return False
        self._took(name, await self.registry.take(name, pinned=True) or 0, reason)
        return True

    async def mend(self, name: ObjectName, size: int, ttl: float) -> bool:
        """Enter the bytes that an object really has, or take it off if it has none; False if it is pinned.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        if size:
            return await self.registry.set(name, size, ttl, used=False)
        return await self.registry.take(name) is not None

    async def evict(self, found: StoredObject, reason: str) -> bool:
        """Delete a whole object; False if it is in use, or gone by now.

        Raises:
            StoreUnavailableError: The store does not answer; what was not deleted is entered again by the janitor.
        """
        keeper = self._keepers[found.name.kind]
        size = await self.registry.take(found.name)
        if size is None:
            return False
        if not await keeper.remove(found.name.qualified):
            await self.registry.add(found.name, size, 0, keeper.ttl, self.limits.pin)
            return False
        self._took(found.name, size, reason)
        return True

    async def over(self) -> list[tuple[str, str, int]]:
        """Return which tenants must give bytes up, why, and how many; for people and for the janitor.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        tenants = await self.registry.tenants()
        self._sizes = {tenant: (await self.registry.totals(tenant, ["all"]))["all"].size for tenant in tenants}
        excess = [
            (tenant, "quota", size - round(self.limits.low * self.limits.quota))
            for tenant, size in self._sizes.items()
            if 0 < self.limits.quota < size
        ]
        total = sum(self._sizes.values())
        if 0 < self.high < total:
            excess.append(("", "high_water", total - round(self.limits.low * self.high)))
        return excess

    async def trim(self) -> list[tuple[str, StoredObject]]:
        """Evict until all are within their bounds again, as far as that is possible; return what went, and why.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        gone = []
        for tenant, reason, size in await self.over():
            tenants = [tenant] if tenant else list(self._sizes)
            evicted = await self._make_room(tenants, size, reason)
            gone += [(reason, each) for each in evicted]
        return gone

    async def beyond(self) -> list[tuple[str, StoredObject]]:
        """Return what :meth:`trim` would evict, some hundred objects at most.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        found: dict[ObjectName, tuple[str, StoredObject]] = {}
        for tenant, reason, size in await self.over():
            left = size
            for each in await self.candidates([tenant] if tenant else list(self._sizes), _MOST_SHOWN):
                if left > 0:
                    found.setdefault(each.name, (reason, each))
                    left -= each.size
        return list(found.values())

    async def measure(self) -> dict[str, dict[str, Totals]]:
        """Return what the objects of each tenant and kind come to, and show it in the metrics.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        sums = {tenant: await self.registry.totals(tenant, KINDS) for tenant in await self.registry.tenants()}
        for kind in KINDS:
            self._metrics.space.objects.labels(kind).set(sum(each[kind].objects for each in sums.values()))
            self._metrics.space.size.labels(kind).set(sum(each[kind].size for each in sums.values()))
        return sums

    def bound_by_store(self, most_bytes: int) -> None:
        """Take a share of what the store may hold as the high-water mark, if none is set."""
        if not self.limits.high:
            self.high = round(_HIGH_SHARE * most_bytes)

    async def candidates(self, tenants: Sequence[str], most: int) -> list[StoredObject]:
        """Return what would be evicted first, of some tenants together.

        Raises:
            StoreUnavailableError: The store does not answer.
        """
        found = [each for tenant in tenants for each in await self.registry.oldest(tenant, most)]
        known = [each for each in found if self.keeper(each.name)]
        return sorted(known, key=lambda each: each.used_at)[:most]

    async def _keep_entered(self, tenant: str) -> None:
        if tenant != DEFAULT_TENANT and self._entered.get(tenant, 0.0) <= asyncio.get_running_loop().time():
            await self.enter(tenant)

    async def _reserve(self, name: ObjectName, size: int, ttl: float, pin: float) -> None:
        quota, low = self.limits.quota, self.limits.low
        for setting, most in ((QUOTA_SETTING, quota), (HIGH_SETTING, self.high)):
            if 0 < most < size:
                self._metrics.space.refusals.labels(name.kind).inc()
                raise QuotaError(setting, f"a stored {name.kind} of {size} bytes is above the bound of {most}")
        for _ in range(_TRIES):
            done, total = await self.registry.add(name, size, quota, ttl, pin)
            if done:
                break
            await self._make_room([name.tenant], total + size - max(size, round(low * quota)), "quota")
        else:
            self._metrics.space.refusals.labels(name.kind).inc()
            raise QuotaError(QUOTA_SETTING, f"{quota} bytes are all in use; no room for {size} more")
        # What the others have is looked up by every round of the janitor, not by every write.
        self._sizes[name.tenant] = total
        if 0 < self.high < sum(self._sizes.values()):
            await self.trim()

    async def _make_room(self, tenants: Sequence[str], size: int, reason: str) -> list[StoredObject]:
        """Evict about ``size`` bytes, or less if all that is left is in use; return what went."""
        freed, gone = 0, []
        # Each is evicted, or turns out to be in use and is pinned, so the next are others.
        while freed < size and (found := await self.candidates(tenants, _BATCH)):
            for each in found:
                if freed < size and await self.evict(each, reason):
                    freed += each.size
                    gone.append(each)
        return gone

    def _took(self, name: ObjectName, size: int, reason: str) -> None:
        LOGGER.info("stored %s %s was evicted: %s", name.kind, name.name, reason)
        self._metrics.space.evicted.labels(name.kind, reason).inc()
        self._metrics.space.evicted_bytes.labels(name.kind, reason).inc(size)
