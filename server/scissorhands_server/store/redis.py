"""The store in Redis, or in any server that speaks its protocol. It knows Redis and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

from redis.exceptions import ClusterDownError, OutOfMemoryError, RedisClusterException, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scissorhands.errors import StoreFullError, StoreUnavailableError
from scissorhands_server.store.address import Access, StoreAddress
from scissorhands_server.store.base import PageInfo, PageStore, StoreInfo
from scissorhands_server.store.client import close_client, make_client, scan_keys, server_infos

PREFIX = "scissorhands"
# The page that lists an owner's committed pages; no other page may have this name.
INDEX = "index"
# Keys that are looked at by one scan, about.
_SCAN_KEYS = 256

# Scripts are transactions that take one round trip and are the same in a cluster, where they run in their keys' slot.
_COMPARE_AND_SET = """
local current = redis.call('GET', KEYS[1])
if (ARGV[1] == '' and current == false) or (ARGV[1] ~= '' and current == ARGV[2]) then
  if ARGV[3] == '' then redis.call('UNLINK', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4]) end
  return 1
end
return 0
"""
# The first key is the list; the others are pages, whose names come at the end of the arguments.
_COMMIT = """
for page = 2, #KEYS do redis.call('SADD', KEYS[1], ARGV[page]) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[1]) end
"""
# Unlike a transaction, a full server lets it run, since it begins with what frees memory.
_DELETE = """
local deleted = 0
for page = 2, #KEYS do
  deleted = deleted + redis.call('UNLINK', KEYS[page])
  redis.call('SREM', KEYS[1], ARGV[page - 1])
end
return deleted
"""


class RedisStore(PageStore):
    """Pages as Redis strings, an owner's list as a Redis set.

    The keys of one owner carry the same hash tag, ``scissorhands:{<owner>}:<page>``, so they share a slot of a Redis
    Cluster and one script reaches them all.

    Args:
        url: Where it is, of one of :data:`~scissorhands_server.store.address.SCHEMES`.
        timeout: The most that one call should take, in seconds; its parts, such as connecting, take no longer.
        connections: Calls that are made at once; others wait for their turn, as long as their callers let them.
        access: How connections prove and protect themselves.

    Raises:
        ValueError: The URL is malformed.
    """

    def __init__(self, url: str, timeout: float, connections: int, access: Access | None = None) -> None:
        self._client = make_client(StoreAddress.parse(url), access or Access(), timeout, connections)
        self._turns = asyncio.Semaphore(connections)

    async def ping(self) -> None:
        """See :class:`PageStore`."""
        async with self._call("ping"):
            await self._client.ping()

    async def put(self, owner: str, page: str, data: bytes, ttl: float) -> None:
        """See :class:`PageStore`."""
        async with self._call("put"):
            await self._client.set(_key(owner, page), data, px=_milliseconds(ttl))

    async def commit(self, owner: str, pages: Sequence[str], ttl: float) -> None:
        """See :class:`PageStore`."""
        keys = [_key(owner, page) for page in (INDEX, *pages)]
        async with self._call("commit"):
            await self._client.eval(_COMMIT, len(keys), *keys, _milliseconds(ttl), *pages)

    async def compare_and_set(self, owner: str, page: str, expected: bytes | None, data: bytes, ttl: float) -> bool:
        """See :class:`PageStore`. After a lost reply it may have been written; whoever lost one reads it again."""
        present = "" if expected is None else "1"
        async with self._call("compare_and_set"):
            written = await self._client.eval(
                _COMPARE_AND_SET, 1, _key(owner, page), present, expected or b"", data, _milliseconds(ttl)
            )
        return bool(written)

    async def get(self, owner: str, page: str) -> bytes | None:
        """See :class:`PageStore`."""
        async with self._call("get"):
            return cast("bytes | None", await self._client.get(_key(owner, page)))

    async def get_range(self, owner: str, page: str, start: int, size: int) -> bytes:
        """See :class:`PageStore`."""
        async with self._call("get_range"):
            return cast("bytes", await self._client.getrange(_key(owner, page), start, start + size - 1))

    async def delete(self, owner: str, pages: Sequence[str]) -> int:
        """See :class:`PageStore`."""
        if not pages:
            return 0
        keys = [_key(owner, page) for page in (INDEX, *pages)]
        async with self._call("delete"):
            return int(await self._client.eval(_DELETE, len(keys), *keys, *pages))

    async def list_pages(self, owner: str) -> list[PageInfo]:
        """See :class:`PageStore`. Pages whose time is over are taken off the list on the way."""
        index = _key(owner, INDEX)
        async with self._call("list_pages"):
            members = cast("set[bytes]", await self._client.smembers(index))
            names = sorted(name.decode() for name in members)
            if not names:
                return []
            async with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.strlen(_key(owner, name))
                sizes = await pipeline.execute()
            gone = [name for name, size in zip(names, sizes, strict=True) if size == 0]
            if gone:
                await self._client.srem(index, *gone)
        return [PageInfo(name, size) for name, size in zip(names, sizes, strict=True) if size]

    async def stat(self, owner: str, page: str) -> PageInfo | None:
        """See :class:`PageStore`."""
        async with self._call("stat"):
            size = await self._client.strlen(_key(owner, page))
        return PageInfo(page, size) if size else None

    async def time_left(self, owner: str, page: str) -> float:
        """See :class:`PageStore`."""
        async with self._call("time_left"):
            return max(0, await self._client.pttl(_key(owner, page))) / 1000

    async def run(self, owner: str, script: str, pages: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """See :class:`PageStore`."""
        keys = [_key(owner, page) for page in pages]
        async with self._call("run"):
            return await self._client.eval(script, len(keys), *keys, *arguments)

    async def scan(self, cursor: str) -> tuple[str, list[tuple[str, str]]]:
        """See :class:`PageStore`. Keys that are not ours are left out."""
        async with self._call("scan"):
            following, keys = await scan_keys(self._client, cursor, f"{PREFIX}:{{*", _SCAN_KEYS)
        return following, [_parse_key(key) for key in keys]

    async def info(self) -> StoreInfo:
        """See :class:`PageStore`. Numbers of a cluster are those of its primaries together."""
        async with self._call("info"):
            each = await server_infos(self._client)
        return StoreInfo(
            used_bytes=sum(int(info["used_memory"]) for info in each),
            most_bytes=sum(int(info["maxmemory"]) for info in each),
            policy=str(each[0]["maxmemory_policy"]),
            hits=sum(int(info["keyspace_hits"]) for info in each),
            misses=sum(int(info["keyspace_misses"]) for info in each),
            evicted_keys=sum(int(info["evicted_keys"]) for info in each),
        )

    async def close(self) -> None:
        """Close all connections."""
        await close_client(self._client)

    @asynccontextmanager
    async def _call(self, method: str) -> AsyncIterator[None]:
        """Wait for a turn, and turn the client's exceptions into ours."""
        async with self._turns:
            try:
                with _cancellable():
                    # A cluster's layout; redis-py sends what is asked before it has that to any node.
                    await self._client.initialize()
                    yield
            except (RedisTimeoutError, TimeoutError) as error:
                raise StoreUnavailableError(f"{method}: {error}", "timeout") from error
            except (RedisConnectionError, OSError, ClusterDownError, RedisClusterException) as error:
                raise StoreUnavailableError(f"{method}: {error}", "unreachable") from error
            except OutOfMemoryError as error:
                raise StoreFullError(f"{method}: {error}") from error
            except RedisError as error:
                raise StoreUnavailableError(f"{method}: {error}", "refused") from error


@contextmanager
def _cancellable() -> Iterator[None]:
    """Let a task that was asked to end do so.

    redis-py waits by :func:`asyncio.wait_for`, which loses what asks if what it waits for has just been done (before
    Python 3.12), and whoever waits for the task to end would wait for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    asked = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > asked:
            raise asyncio.CancelledError


def _key(owner: str, page: str) -> str:
    return f"{PREFIX}:{{{owner}}}:{page}"


def _parse_key(key: bytes) -> tuple[str, str]:
    """Return owner and page of a key of ours."""
    owner, _, page = key.decode(errors="replace").removeprefix(f"{PREFIX}:{{").partition("}:")
    return owner, page


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
