"""The page store against all servers that it may meet: Debian's Redis, also several of it, and the embedded Valkey."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest
from support.processes import RedisProcess
from support.redis_groups import RedisCluster, RedisWatched

from scissorhands.errors import StoreUnavailableError
from scissorhands_server.store.base import PageInfo
from scissorhands_server.store.embedded import EmbeddedStore
from scissorhands_server.store.redis import RedisStore

MEMORY = 32 << 20


LIMITS = ("--maxmemory", str(MEMORY), "--maxmemory-policy", "noeviction")


@contextmanager
def running(servers, nodes):
    for node in nodes:
        node.add_options(*LIMITS)
    servers.start()
    try:
        yield servers.url, nodes
    finally:
        servers.stop()


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    with running(server, [server]) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    servers = RedisCluster(tmp_path_factory.mktemp("cluster"))
    with running(servers, servers.nodes) as found:
        yield found


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory):
    servers = RedisWatched(tmp_path_factory.mktemp("sentinel"), sentinels=1)
    with running(servers, servers.servers) as found:
        yield found


@asynccontextmanager
async def valkey():
    server = EmbeddedStore(MEMORY)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


@pytest.fixture(params=["redis", "valkey", "cluster", "sentinel"])
def serving(request):
    """Return a context manager that gives a store on an empty server."""

    @asynccontextmanager
    async def opened(**options):
        async with AsyncExitStack() as stack:
            if request.param == "valkey":
                url = await stack.enter_async_context(valkey())
            else:
                url, nodes = request.getfixturevalue(request.param)
                for node in nodes:
                    node.command("FLUSHALL")
            store = RedisStore(url, **{"timeout": 5.0, "connections": 4, **options})
            stack.push_async_callback(store.close)
            yield store

    return opened


async def test_a_page_is_written_committed_read_and_deleted(serving):
    async with serving() as store:
        await store.ping()
        await store.put("t/a", "segment:1", b"0123456789", 60)
        assert await store.list_pages("t/a") == []
        assert await store.stat("t/a", "segment:1") == PageInfo("segment:1", 10)
        await store.put("t/a", "segment:0", b"abc", 60)
        await store.commit("t/a", ["segment:1", "segment:0"], 60)
        assert await store.list_pages("t/a") == [PageInfo("segment:0", 3), PageInfo("segment:1", 10)]
        assert await store.get("t/a", "segment:1") == b"0123456789"
        assert await store.delete("t/a", ["segment:1", "segment:9"]) == 1
        assert await store.list_pages("t/a") == [PageInfo("segment:0", 3)]
        assert await store.get("t/a", "segment:1") is None
        assert await store.delete("t/a", []) == 0


async def test_a_task_that_is_cancelled_in_a_call_ends(serving):
    async with serving() as first:
        await first.ping()
        for turns in range(60):
            async with serving() as store:
                task = asyncio.create_task(store.ping())
                for _ in range(turns):
                    await asyncio.sleep(0)
                done = task.done()
                task.cancel()
                await asyncio.wait([task], timeout=30)
                assert done or task.cancelled(), f"after {turns} turns of the loop"


async def test_ranges(serving):
    async with serving() as store:
        await store.put("t/a", "p", b"0123456789", 60)
        assert await store.get_range("t/a", "p", 0, 4) == b"0123"
        assert await store.get_range("t/a", "p", 8, 100) == b"89"
        assert await store.get_range("t/a", "p", 10, 4) == b""
        assert await store.get_range("t/a", "absent", 0, 4) == b""


async def test_what_is_absent(serving):
    async with serving() as store:
        assert await store.get("t/a", "p") is None
        assert await store.stat("t/a", "p") is None
        assert await store.list_pages("t/a") == []


async def test_owners_do_not_see_each_other(serving):
    async with serving() as store:
        for owner in ("t/a", "t/ab", "u/a"):
            await store.put(owner, "p", owner.encode(), 60)
            await store.commit(owner, ["p"], 60)
        await store.delete("t/a", ["p"])
        assert await store.list_pages("t/a") == []
        assert await store.get("t/ab", "p") == b"t/ab"
        assert await store.list_pages("u/a") == [PageInfo("p", 3)]


async def test_large_pages_and_every_byte(serving):
    data = bytes(range(256)) * (4 << 12)
    async with serving() as store:
        await store.put("t/a", "p", data, 60)
        assert await store.get("t/a", "p") == data
        assert await store.get_range("t/a", "p", (1 << 20) + 7, 1 << 20) == data[(1 << 20) + 7 : (2 << 20) + 7]


async def test_pages_end_with_the_time_of_their_commit_and_leave_the_list(serving):
    async with serving() as store:
        await store.put("t/a", "short", b"x", 0.2)
        await store.put("t/a", "long", b"x", 0.2)
        await store.commit("t/a", ["short"], 0.2)
        await store.commit("t/a", ["long"], 60)
        while await store.get("t/a", "short") is not None:
            await asyncio.sleep(0.02)
        assert await store.list_pages("t/a") == [PageInfo("long", 1)]


async def test_compare_and_set(serving):
    async with serving() as store:
        assert not await store.compare_and_set("t/a", "lease", b"1", b"2", 60)
        assert await store.compare_and_set("t/a", "lease", None, b"1", 60)
        assert not await store.compare_and_set("t/a", "lease", None, b"9", 60)
        assert not await store.compare_and_set("t/a", "lease", b"0", b"9", 60)
        assert await store.compare_and_set("t/a", "lease", b"1", b"2", 60)
        assert await store.get("t/a", "lease") == b"2"


async def test_of_many_who_compare_and_set_one_wins(serving):
    async with serving() as store:
        won = await asyncio.gather(
            *(store.compare_and_set("t/a", "lease", None, b"%d" % index, 60) for index in range(20))
        )
        assert won.count(True) == 1
        assert await store.get("t/a", "lease") == b"%d" % won.index(True)


async def test_a_full_store_refuses_and_goes_on_reading(serving):
    async with serving() as store:
        await store.put("t/a", "p", b"kept", 60)

        async def fill():
            for index in range(10):
                await store.put("t/a", f"big{index}", bytes(8 << 20), 60)

        with pytest.raises(StoreUnavailableError) as caught:
            await fill()
        assert caught.value.reason == "full"
        assert await store.get("t/a", "p") == b"kept"


async def test_more_callers_than_connections_wait_for_one(serving):
    async with serving(connections=2) as store:
        await asyncio.gather(*(store.put("t/a", f"p{index}", b"x" * 1000, 60) for index in range(50)))
        sizes = await asyncio.gather(*(store.stat("t/a", f"p{index}") for index in range(50)))
        assert {info.size for info in sizes} == {1000}


async def test_a_cancelled_call_leaves_no_stale_reply_behind(serving):
    async with serving(connections=1) as store:
        await store.put("t/a", "large", b"a" * (8 << 20), 60)
        await store.put("t/a", "small", b"b", 60)
        for steps in range(12):
            reading = asyncio.create_task(store.get("t/a", "large"))
            for _ in range(steps):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert await store.get("t/a", "small") == b"b"


@pytest.mark.parametrize("size", [12_000, 353_408, 1 << 20, 3_500_000])
async def test_a_page_takes_its_bytes_rounded_up_by_the_allocator(redis_server, size):
    """jemalloc has four sizes between two powers of two, so up to a fifth of what Redis counts is never used."""
    store = RedisStore(redis_server.url, timeout=5.0, connections=1)
    try:
        await store.put("t/a", "segment:1", bytes(size), 60)
        used = redis_server.command("MEMORY", "USAGE", "scissorhands:{t/a}:segment:1", "SAMPLES", 0)
        assert size <= int(used[1:]) <= 1.25 * size + 256
    finally:
        await store.close()
