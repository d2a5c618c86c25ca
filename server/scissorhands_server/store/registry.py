"""The registry of a tenant's stored objects: how large each is, when it was used last, and whether it may go.

An object is a whole thing made of pages, such as a suspended row. Its entry lies in the store, so all managers see the
same, and a restarted one loses nothing. Objects and entries cannot change in one step: they are in different slots of a
Redis Cluster. So an entry comes first and goes first. Who is killed in between leaves an entry without an object, or an
object without an entry, which the janitor mends; what is read is decided by the object alone.

All tenants that may have objects are in one sorted set, which the janitor fills again if it is lost.

A tenant's entries are one hash, which also has their sums, and a sorted set of their last uses. Every change is one
script, so the sums are exact. If the store has dropped one of the two for want of memory, the other is dropped too, and
the janitor finds the objects again. Times are those of the store's clock, in microseconds.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scissorhands.tenant import DEFAULT_TENANT, qualified
from scissorhands_server.store.base import PageStore

_PAGES = ("entries", "used")
# A sorted set of all tenants that have objects, by the time at which they are forgotten. No tenant is called so.
_KNOWN_OWNER, _KNOWN_PAGE = "registry", "tenants"
_MICROSECONDS = 1_000_000
# Entries that are looked at together where all are.
_WALKED = 256

_CLOCK = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function text(number) return string.format('%.0f', number) end
"""

_COMMON = (
    _CLOCK
    + """
local entries, used = KEYS[1], KEYS[2]

local function find(name)
  local found = redis.call('HGET', entries, name)
  if not found then return nil end
  local bytes, last, expires, pinned = string.match(found, '^(%d+):(%d+):(%d+):(%d+)$')
  return {bytes = tonumber(bytes), used = tonumber(last), expires = tonumber(expires), pinned = tonumber(pinned)}
end

local function row(name, entry)
  local pinned = entry.pinned > now and '1' or '0'
  return {name, text(entry.bytes), text(entry.used), text(entry.expires), text(entry.pinned), pinned}
end

local function sum(field, by)
  if redis.call('HINCRBY', entries, field, text(by)) == 0 then redis.call('HDEL', entries, field) end
end

local function count(name, objects, bytes)
  for _, kind in ipairs({'all', string.match(name, '^[^/]+')}) do
    sum('#' .. kind .. ':objects', objects)
    sum('#' .. kind .. ':bytes', bytes)
  end
end

local function drop(name, entry)
  redis.call('ZREM', used, name)
  redis.call('HDEL', entries, name)
  count(name, -1, -entry.bytes)
end

local function write(name, entry, before)
  -- A full server refuses what may grow, unless the script has written something else before.
  redis.call('ZREM', used, name)
  redis.call('HSET', entries, name, table.concat({text(entry.bytes), text(entry.used), text(entry.expires),
    text(entry.pinned)}, ':'))
  redis.call('ZADD', used, text(entry.used), name)
  count(name, before and 0 or 1, entry.bytes - (before and before.bytes or 0))
  local left = math.ceil((entry.expires - now) / 1000)
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < left then redis.call('PEXPIRE', key, text(left)) end
  end
end

local objects = tonumber(redis.call('HGET', entries, '#all:objects') or '0')
if redis.call('ZCARD', used) ~= objects then redis.call('UNLINK', entries, used) end
"""
)

# Name, bytes to add, the most of all entries (0: no bound), time to live, pin.
_ADD = """
local name, add, most, ttl, pin = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local before = find(name)
local total = tonumber(redis.call('HGET', entries, '#all:bytes') or '0')
if add > 0 and most > 0 and total + add > most then return {0, text(total)} end
local entry = {bytes = math.max(0, (before and before.bytes or 0) + add)}
if add > 0 or not before then
  entry.used, entry.expires = now, now + ttl
  entry.pinned = math.max(now + pin, before and before.pinned or 0)
else
  entry.used, entry.expires, entry.pinned = before.used, before.expires, before.pinned
end
if entry.bytes > 0 then write(name, entry, before) elseif before then drop(name, before) end
return {1, text(total + entry.bytes - (before and before.bytes or 0))}
"""

# Name, bytes, time to live, whether it has just been used.
_SET = """
local name, bytes, ttl, fresh = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
local before = find(name)
local entry = {bytes = bytes, used = now, expires = now + ttl, pinned = 0}
if before and not fresh then
  if before.pinned > now then return 0 end
  entry.used, entry.expires, entry.pinned = before.used, before.expires, before.pinned
end
write(name, entry, before)
return 1
"""

# Pin (0: none any more), time to live (0: as it is), names; the first counts as the one used last.
_USE = """
local pin, ttl, known = tonumber(ARGV[1]), tonumber(ARGV[2]), 0
for index = 3, #ARGV do
  local entry = find(ARGV[index])
  if entry then
    local before = {bytes = entry.bytes}
    entry.used, entry.expires = now - index, math.max(entry.expires, now + ttl)
    entry.pinned = pin > 0 and math.max(entry.pinned, now + pin) or 0
    write(ARGV[index], entry, before)
    known = known + 1
  end
end
return known
"""

# Name, whether pinned ones too.
_TAKE = """
local entry = find(ARGV[1])
if not entry then return -1 end
if entry.pinned > now and ARGV[2] == '0' then return -2 end
drop(ARGV[1], entry)
return text(entry.bytes)
"""

# The most to return. Looks at a bounded number of entries; few are pinned at a time.
_OLDEST = """
local most, found = tonumber(ARGV[1]), {}
for _, name in ipairs(redis.call('ZRANGE', used, 0, 4 * most + 255)) do
  local entry = find(name)
  if entry and entry.pinned <= now then found[#found + 1] = row(name, entry) end
  if #found == most then break end
end
return found
"""

# Cursor, about how many.
_WALK = """
local reply, found = redis.call('ZSCAN', used, ARGV[1], 'COUNT', ARGV[2]), {}
for index = 1, #reply[2], 2 do
  local entry = find(reply[2][index])
  if entry then found[#found + 1] = row(reply[2][index], entry) end
end
return {reply[1], found}
"""

# Names.
_LOOK = """
local found = {}
for _, name in ipairs(ARGV) do
  local entry = find(name)
  if entry then found[#found + 1] = row(name, entry) end
end
return found
"""

# Tenant, time to live.
_ENTER = """
local expires = math.max(now + tonumber(ARGV[2]), tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0'))
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[1], text(expires), ARGV[1])
local left = math.ceil((expires - now) / 1000)
if redis.call('PTTL', KEYS[1]) < left then redis.call('PEXPIRE', KEYS[1], text(left)) end
"""

_TENANTS = """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', text(now))
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""

# Kinds.
_TOTALS = """
local sums = {}
for _, kind in ipairs(ARGV) do
  for _, field in ipairs({':objects', ':bytes'}) do
    sums[#sums + 1] = redis.call('HGET', entries, '#' .. kind .. field) or '0'
  end
end
return sums
"""


class ObjectName(NamedTuple):
    """What an object is called.

    Args:
        tenant: Whose it is.
        kind: What it is, from a small closed set.
        name: Its name among those of its kind.
    """

    tenant: str
    kind: str
    name: str

    @property
    def qualified(self) -> str:
        """Its name with its tenant's."""
        return qualified(self.tenant, self.name)


@dataclass(frozen=True)
class StoredObject:
    """An entry of the registry.

    Args:
        name: What it is called.
        size: Bytes that it counts with.
        used_at: When it was used last, in seconds since 1970.
        expires_at: When its time to live ends.
        pinned_until: When its pin ends, or has ended.
        pinned: Whether it may not be evicted now.
    """

    name: ObjectName
    size: int
    used_at: float
    expires_at: float
    pinned_until: float
    pinned: bool


class Totals(NamedTuple):
    """What objects come to."""

    objects: int
    size: int


class Registry:
    """The registries of all tenants. Every method raises StoreUnavailableError when the store does not answer.

    Args:
        store: Where they lie.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store

    async def add(self, name: ObjectName, size: int, most: int, ttl: float, pin: float) -> tuple[bool, int]:
        """Count bytes that an object is about to grow by, or take bytes off again if ``size`` is below 0.

        Args:
            name: The object; entered if it is not there.
            size: The bytes.
            most: The most that all of the tenant's objects may come to; 0 if there is no bound.
            ttl: How long the object stays from now on, in seconds.
            pin: How long it may not be evicted, in seconds.

        Returns:
            Whether it was done, and what all objects of the tenant come to.
        """
        done, total = await self._run(_ADD, name.tenant, _field(name), size, most, _time(ttl), _time(pin))
        return bool(done), int(total)

    async def set(self, name: ObjectName, size: int, ttl: float, *, used: bool) -> bool:
        """Enter an object's bytes as they are; tell whether that was done.

        Args:
            name: The object.
            size: Its bytes.
            ttl: How long it stays, in seconds.
            used: Whether it was used now, and is pinned no more; otherwise times stay as they are, and an entry that is
                pinned is left alone: whoever has pinned it may be changing it.
        """
        return bool(await self._run(_SET, name.tenant, _field(name), size, _time(ttl), int(used)))

    async def use(self, names: Sequence[ObjectName], pin: float, ttl: float = 0.0) -> None:
        """Take note that objects of one tenant are used; those that are not entered are left out.

        Args:
            names: The objects, the one to be evicted last first.
            pin: How long they may not be evicted, in seconds; with 0 they may from now on.
            ttl: How long they stay from now on at least, in seconds.
        """
        await self._run(_USE, names[0].tenant, _time(pin), _time(ttl), *map(_field, names))

    async def take(self, name: ObjectName, *, pinned: bool = False) -> int | None:
        """Take an object off; return its bytes, None if it is not there or is pinned.

        Args:
            name: The object.
            pinned: Do so even if it is pinned.
        """
        size = int(await self._run(_TAKE, name.tenant, _field(name), int(pinned)))
        return None if size < 0 else size

    async def oldest(self, tenant: str, most: int) -> list[StoredObject]:
        """Return the objects that were used least lately and are not pinned, the oldest first."""
        return _objects(tenant, await self._run(_OLDEST, tenant, most))

    async def walk(self, tenant: str, cursor: str, about: int) -> tuple[str, list[StoredObject]]:
        """Look at some of a tenant's objects, as :meth:`PageStore.scan` does at pages."""
        following, rows = await self._run(_WALK, tenant, cursor or "0", about)
        return "" if following == b"0" else following.decode(), _objects(tenant, rows)

    async def entries(self, tenant: str) -> AsyncIterator[StoredObject]:
        """Yield all of a tenant's objects. Those that come or go meanwhile may be left out or come twice."""
        cursor = ""
        while True:
            cursor, found = await self.walk(tenant, cursor, _WALKED)
            for each in found:
                yield each
            if not cursor:
                return

    async def look(self, names: Sequence[ObjectName]) -> Mapping[ObjectName, StoredObject]:
        """Return the entries of those of one tenant's objects that are entered."""
        if not names:
            return {}
        found = _objects(names[0].tenant, await self._run(_LOOK, names[0].tenant, *map(_field, names)))
        return {each.name: each for each in found}

    async def totals(self, tenant: str, kinds: Sequence[str]) -> dict[str, Totals]:
        """Return what a tenant's objects of each kind come to."""
        sums = list(map(int, await self._run(_TOTALS, tenant, *kinds)))
        return {kind: Totals(*sums[2 * index : 2 * index + 2]) for index, kind in enumerate(kinds)}

    async def enter(self, tenant: str, ttl: float) -> None:
        """Let a tenant be known for a time, in seconds: one that has objects must be for as long as they stay."""
        await self._store.run(_KNOWN_OWNER, _CLOCK + _ENTER, [_KNOWN_PAGE], [tenant, _time(ttl)])

    async def tenants(self) -> list[str]:
        """Return the tenants that are known, in order; the default one always is."""
        known = await self._store.run(_KNOWN_OWNER, _CLOCK + _TENANTS, [_KNOWN_PAGE], [])
        return sorted({DEFAULT_TENANT, *(name.decode() for name in known)})

    async def _run(self, script: str, tenant: str, *arguments: str | int) -> Any:
        return await self._store.run(owner_of(tenant), _COMMON + script, _PAGES, arguments)


def owner_of(tenant: str) -> str:
    """Return the owner of a tenant's registry. Owners of objects are ``<tenant>/...``, so it is none of them."""
    return f"registry:{tenant}"


def _field(name: ObjectName) -> str:
    return f"{name.kind}/{name.name}"


def _time(seconds: float) -> int:
    return round(seconds * _MICROSECONDS)


def _objects(tenant: str, rows: Sequence[Sequence[bytes]]) -> list[StoredObject]:
    found = []
    for field, size, used, expires, pinned, is_pinned in rows:
        kind, _, name = field.decode().partition("/")
        used_at, expires_at, pinned_until = (int(time) / _MICROSECONDS for time in (used, expires, pinned))
        known = ObjectName(tenant, kind, name)
        found.append(StoredObject(known, int(size), used_at, expires_at, pinned_until, is_pinned == b"1"))
    return found
