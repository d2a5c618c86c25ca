"""Turns that begin at the same moment, step by step in a real Redis."""

import asyncio

import pytest

from scissorhands.errors import SessionConflictError
from scissorhands_server.manager.suspended_rows import SuspendedRows
from scissorhands_server.store.decorator import StoreDecorator
from scissorhands_server.store.redis import RedisStore


class Meeting(StoreDecorator):
    """Lets writes of records go on only when two are there."""

    def __init__(self, inner):
        super().__init__(inner)
        self.barrier = asyncio.Barrier(2)

    async def guard(self, method, call):
        if method == "compare_and_set":
            await self.barrier.wait()
        return await call()


async def claimed(rows):
    try:
        return (await rows.claim("s1")).fence
    except SessionConflictError:
        return None


@pytest.mark.parametrize("later", [0.0, 0.001, 1.0])
async def test_who_is_slower_takes_nothing_away_from_who_is_faster(redis_server, later):
    store = RedisStore(redis_server.url, timeout=5, connections=4)
    meeting = Meeting(store)
    both = [SuspendedRows(meeting, 60, 30, now=lambda at=at: at) for at in (1000.0, 1000.0 + later)]
    fences = await asyncio.gather(*map(claimed, both))
    (winner,) = (fence for fence in fences if fence)
    third = SuspendedRows(store, 60, 30)
    assert await claimed(third) is None
    await third.release("s1", winner)
    assert await claimed(third)
    await third.delete("s1")
    assert redis_server.command("DBSIZE") == b":0\r\n"
    await store.close()
