"""The registry of stored objects, in a real Redis: sums are exact, the order is that of use, and pins hold."""

import asyncio
import random

import pytest
from support.processes import RedisProcess
from support.redis_groups import RedisCluster

from scissorhands.errors import StoreFullError
from scissorhands_server.store.redis import RedisStore
from scissorhands_server.store.registry import ObjectName, Registry, Totals

KINDS = ("all", "row", "archive")


def row(name):
    return ObjectName("t", "row", name)


def archive(name):
    return ObjectName("t", "archive", name)


@pytest.fixture
async def registry(redis_server):
    store = RedisStore(redis_server.url, timeout=5, connections=4)
    yield Registry(store)
    await store.close()


async def names(registry, most=100):
    return [each.name.name for each in await registry.oldest("t", most)]


async def test_sums_are_those_of_the_entries_whatever_comes(registry, redis_server):
    chance, held = random.Random(1), {}
    for _ in range(300):
        name = chance.choice([row, archive])(str(chance.randrange(12)))
        step = chance.randrange(4)
        if step == 0:
            size = chance.randrange(1, 1000)
            assert await registry.add(name, size, 0, 60, 0) == (True, sum(held.values()) + size)
            held[name] = held.get(name, 0) + size
        elif step == 1:
            size = chance.randrange(1, 1000)
            assert await registry.set(name, size, 60, used=True)
            held[name] = size
        elif step == 2:
            assert await registry.take(name) == held.pop(name, None)
        else:
            size = chance.randrange(1, 1000)
            await registry.add(name, -size, 0, 60, 0)
            left = held.pop(name, 0) - size
            if left > 0:
                held[name] = left
        totals = await registry.totals("t", KINDS)
        for kind in KINDS:
            sizes = [size for known, size in held.items() if kind in ("all", known.kind)]
            assert totals[kind] == Totals(len(sizes), sum(sizes))
    assert {each.name: each.size for each in await registry.oldest("t", 100)} == held
    for name in held:
        await registry.take(name)
    assert redis_server.command("DBSIZE") == b":0\r\n"


async def test_a_quota_is_hard_even_for_many_at_once(registry):
    async def add(number):
        return (await registry.add(row(str(number)), 10, 55, 60, 0))[0]

    assert sum(await asyncio.gather(*map(add, range(20)))) == 5
    assert (await registry.totals("t", ["all"]))["all"] == Totals(5, 50)
    # Another tenant's objects do not count.
    assert (await registry.add(ObjectName("u", "row", "1"), 55, 55, 60, 0))[0]


async def test_the_order_is_that_of_use_and_pinned_ones_are_spared(registry):
    for name in "abcd":
        await registry.add(row(name), 1, 0, 60, 0)
    await registry.use([row("b"), row("nobody")], 0)
    assert await names(registry) == ["a", "c", "d", "b"]
    # Of several that are used together, the first goes last.
    await registry.use([row("a"), row("d")], 0)
    assert await names(registry) == ["c", "b", "d", "a"]
    await registry.use([row("c"), row("d")], 0.2)
    assert await names(registry) == ["b", "a"]
    assert await registry.take(row("c")) is None
    # A shorter pin takes nothing away from a longer one, the end of a turn does.
    await registry.use([row("c")], 60)
    await registry.use([row("c")], 0.001)
    await asyncio.sleep(0.25)
    assert await names(registry) == ["b", "a", "d"]
    await registry.use([row("c")], 0)
    assert await names(registry) == ["b", "a", "d", "c"]
    await registry.use([row("c")], 60)
    assert await registry.take(row("c"), pinned=True) == 1


async def test_what_mends_an_entry_is_no_use(registry):
    for name in "ab":
        await registry.add(row(name), 1, 0, 60, 0)
    assert await registry.set(row("a"), 7, 60, used=False)
    assert await names(registry) == ["a", "b"]
    assert (await registry.look([row("a"), row("c")]))[row("a")].size == 7
    # A pin, too, is left alone by bytes that are taken off.
    await registry.use([row("a")], 60)
    await registry.add(row("a"), -2, 0, 60, 0)
    found = (await registry.look([row("a")]))[row("a")]
    assert (found.size, await names(registry)) == (5, ["b"])
    assert found.pinned
    assert found.pinned_until > found.used_at + 59
    assert not await registry.set(row("a"), 9, 60, used=False)
    assert (await registry.look([row("a")]))[row("a")] == found


async def test_all_entries_are_seen_in_pieces(registry):
    for number in range(700):
        await registry.add(row(str(number)), number + 1, 0, 60, 0)
    seen, cursor, rounds = {}, "", 0
    while cursor or not rounds:
        cursor, found = await registry.walk("t", cursor, 100)
        seen.update({each.name.name: each.size for each in found})
        rounds += 1
    assert seen == {str(number): number + 1 for number in range(700)}
    assert rounds > 3


async def test_a_registry_goes_with_the_last_of_its_objects(registry, redis_server):
    await registry.add(row("a"), 1, 0, 60, 0)
    await registry.add(row("b"), 1, 0, 0.1, 0)
    assert 59_000 < int(redis_server.command("PTTL", "scissorhands:{registry:t}:entries")[1:]) <= 60_000
    await registry.take(row("a"))
    await registry.take(row("b"))
    await registry.add(row("c"), 1, 0, 0.1, 0)
    await asyncio.sleep(0.2)
    assert redis_server.command("DBSIZE") == b":0\r\n"


@pytest.mark.parametrize("lost", ["entries", "used"])
async def test_a_registry_that_lost_a_part_begins_anew(registry, redis_server, lost):
    await registry.add(row("a"), 5, 0, 60, 0)
    redis_server.command("DEL", f"scissorhands:{{registry:t}}:{lost}")
    assert await registry.totals("t", KINDS) == dict.fromkeys(KINDS, Totals(0, 0))
    await registry.add(row("b"), 7, 0, 60, 0)
    assert await names(registry) == ["b"]
    assert (await registry.totals("t", ["row"]))["row"] == Totals(1, 7)


async def test_a_full_store_lets_objects_go_and_enters_no_new_ones(tmp_path):
    server = RedisProcess(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    server.start()
    try:
        store = RedisStore(server.url, timeout=5, connections=4)
        registry = Registry(store)
        await registry.add(row("a"), 5, 0, 60, 0)
        await registry.add(row("b"), 5, 0, 60, 0)
        puts = (store.put("t/x", str(number), bytes(1 << 20), 60) for number in range(20))
        with pytest.raises(StoreFullError) as caught:
            await asyncio.gather(*puts)
        assert caught.value.reason == "full"
        await registry.use([row("a")], 60)
        assert await names(registry) == ["b"]
        assert await registry.take(row("b")) == 5
        assert (await registry.totals("t", ["row"]))["row"] == Totals(1, 5)
        assert await store.delete("t/x", [str(number) for number in range(20)]) > 0
        assert await registry.add(row("b"), 5, 0, 60, 0) == (True, 10)
        await store.close()
    finally:
        server.stop()


@pytest.mark.parametrize("kind", ["server", "cluster"])
async def test_every_page_is_seen_by_a_scan_and_memory_is_told(tmp_path, redis_server, kind):
    cluster = RedisCluster(tmp_path)
    if kind == "cluster":
        cluster.start()
    try:
        store = RedisStore(cluster.url if kind == "cluster" else redis_server.url, timeout=5, connections=4)
        await asyncio.gather(*(store.put(f"t/s{number}", "p:0", b"x", 60) for number in range(700)))
        await Registry(store).add(row("a"), 1, 0, 60, 0)
        seen, cursor, rounds = set(), "", 0
        while cursor or not rounds:
            cursor, found = await store.scan(cursor)
            seen |= {*found}
            rounds += 1
        assert {page for page in seen if page[0].startswith("t/")} == {(f"t/s{number}", "p:0") for number in range(700)}
        assert {page for page in seen if page[0] == "registry:t"} == {("registry:t", "entries"), ("registry:t", "used")}
        assert rounds >= 3
        info = await store.info()
        assert info.used_bytes > 500_000 * (3 if kind == "cluster" else 1)
        assert (info.most_bytes, info.policy, info.evicted_keys) == (0, "noeviction", 0)
        await store.close()
    finally:
        cluster.stop()
