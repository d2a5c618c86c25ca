"""The store in Redis, or in any server that speaks its protocol. It knows Redis and nothing else."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scissorhands.errors import StoreUnavailableError
from scissorhands_server.store.base import PageInfo, PageStore

PREFIX = "scissorhands"
# The page that lists an owner's committed pages; no other page may have this name.
INDEX = "index"

_COMPARE_AND_SET = """
local current = redis.call('GET', KEYS[1])
if (ARGV[1] == '' and current == false) or (ARGV[1] ~= '' and current == ARGV[2]) then
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
  return 1
end
return 0
"""


class RedisStore(PageStore):
    """Pages as Redis strings, an owner's list as a Redis set.

    The keys of one owner carry the same hash tag, ``scissorhands:{<owner>}:<page>``, so they share a slot of a Redis
    Cluster and fit in one transaction.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout: The most that connecting, and waiting for one reply, may take, in seconds.
        connections: Most connections at once; more callers wait for one, at most ``timeout``.
    """

    def __init__(self, url: str, timeout: float, connections: int) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            # One fresh try, for connections that a restarted server has closed behind our back.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )
        self._client = Redis.from_pool(pool)

    async def ping(self) -> None:
        """See :class:`PageStore`."""
        async with _translated("ping"):
            await self._client.ping()

    async def put(self, owner: str, page: str, data: bytes, ttl: float) -> None:
        """See :class:`PageStore`."""
        async with _translated("put"):
            await self._client.set(_key(owner, page), data, px=_milliseconds(ttl))

    async def commit(self, owner: str, pages: Sequence[str], ttl: float) -> None:
        """See :class:`PageStore`."""
        index = _key(owner, INDEX)
        async with _translated("commit"), self._client.pipeline(transaction=True) as pipeline:
            pipeline.sadd(index, *pages)
            for key in (index, *(_key(owner, page) for page in pages)):
                pipeline.pexpire(key, _milliseconds(ttl))
            await pipeline.execute()

    async def compare_and_set(self, owner: str, page: str, expected: bytes | None, data: bytes, ttl: float) -> bool:
        """See :class:`PageStore`. After a lost reply it may have been written; whoever lost one reads it again."""
        present = "" if expected is None else "1"
        async with _translated("compare_and_set"):
            written = await self._client.eval(
                _COMPARE_AND_SET, 1, _key(owner, page), present, expected or b"", data, _milliseconds(ttl)
            )
        return bool(written)

    async def get(self, owner: str, page: str) -> bytes | None:
        """See :class:`PageStore`."""
        async with _translated("get"):
            return cast("bytes | None", await self._client.get(_key(owner, page)))

    async def get_range(self, owner: str, page: str, start: int, size: int) -> bytes:
        """See :class:`PageStore`."""
        async with _translated("get_range"):
            return cast("bytes", await self._client.getrange(_key(owner, page), start, start + size - 1))

    async def delete(self, owner: str, pages: Sequence[str]) -> int:
        """See :class:`PageStore`."""
        if not pages:
            return 0
        async with _translated("delete"), self._client.pipeline(transaction=True) as pipeline:
            pipeline.unlink(*(_key(owner, page) for page in pages))
            pipeline.srem(_key(owner, INDEX), *pages)
            deleted, _ = await pipeline.execute()
        return int(deleted)

    async def list_pages(self, owner: str) -> list[PageInfo]:
        """See :class:`PageStore`. Pages whose time is over are taken off the list on the way."""
        index = _key(owner, INDEX)
        async with _translated("list_pages"):
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
        async with _translated("stat"):
            size = await self._client.strlen(_key(owner, page))
        return PageInfo(page, size) if size else None

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose(close_connection_pool=True)


@asynccontextmanager
async def _translated(method: str) -> AsyncIterator[None]:
    """Turn the client's exceptions into ours."""
    try:
        yield
    except (RedisTimeoutError, TimeoutError) as error:
        raise StoreUnavailableError(f"{method}: {error}", "timeout") from error
    except (RedisConnectionError, OSError) as error:
        raise StoreUnavailableError(f"{method}: {error}", "unreachable") from error
    except RedisError as error:
        raise StoreUnavailableError(f"{method}: {error}", "refused") from error


def _key(owner: str, page: str) -> str:
    return f"{PREFIX}:{{{owner}}}:{page}"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
