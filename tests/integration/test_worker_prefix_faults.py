"""What becomes of shared prefixes when the store, the manager or a stream fails: the same answers, and no leak."""

import asyncio
from dataclasses import replace

import pytest
from support.conversations import workers
from support.manager_here import manager_here
from support.shared_prompts import ENDS, FULL, HELD, SETTINGS, SHARED, answer, counts, options, stored
from support.tiny_worker import metrics, request
from support.waiting import until

from scissorhands_server.manager.stored_prefixes import StoredPrefixes

PROMPT = SHARED + ENDS[0]
LONG = options("full", new=200)


def pages(redis, ending):
    """Return the names of the store's values whose names end so, of each boundary one."""
    found = redis.command("KEYS", f"scissorhands:{{default/prefix:*}}:prefix:{ending}").decode().split("\r\n")
    return [line for line in found if line.startswith("scissorhands:")]


def idle(*made):
    """Tell whether nothing is held any more."""
    return all(metrics(worker)[HELD] == metrics(worker)["scissorhands_worker_rows"] == 0 for worker in made)


async def first_answer(stub, worker):
    """Answer the prompt, and wait until what it begins with is stored."""
    tokens, reused = await answer(stub, PROMPT, **FULL)
    assert reused == 0
    await stored(worker)
    return tokens


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url, store_timeout=0.4)


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "record", "exchanged", "emptied"])
async def test_a_prefix_that_is_not_whole_is_read_and_stored_anew(manager, redis_server, damage):
    async with workers(manager, **SETTINGS) as ((one, first), (two, second)):
        expected = await first_answer(first, one)
        parts, records = pages(redis_server, "*:0"), pages(redis_server, "record")
        if damage == "bit":
            old = redis_server.command("GETRANGE", parts[2], "90", "90")[-3:-2]
            redis_server.command("SETRANGE", parts[2], "90", bytes([old[0] ^ 1]))
        elif damage == "truncated":
            redis_server.command("SET", parts[2], b"short")
        elif damage == "missing":
            redis_server.command("DEL", parts[2])
        elif damage == "record":
            redis_server.command("SETRANGE", records[2], "40", b"xyz")
        elif damage == "exchanged":
            redis_server.command("COPY", parts[1], parts[2], "REPLACE")
        else:
            redis_server.command("FLUSHALL")
        tokens, reused = await answer(second, PROMPT, **FULL)
        assert tokens == expected
        assert reused < 192
        await stored(two)
        assert await answer(first, PROMPT, **FULL) == (expected, 192)
        if damage in ("bit", "truncated", "missing", "exchanged"):
            assert (reused, counts(two)) == (0, {"missing" if damage == "missing" else "corrupt": 1})
            assert counts(two, "stores").get("stored", 0) == 1
        assert idle(one, two)


async def test_without_a_store_or_a_manager_prompts_are_read(manager, redis_server):
    async with workers(manager, **SETTINGS) as ((one, first), (two, second)):
        expected = await first_answer(first, one)
        redis_server.pause()
        assert await answer(second, PROMPT, **FULL) == (expected, 0)
        await stored(two)
        redis_server.resume()
        assert counts(two) == {"store_unavailable": 1}
        await until(lambda: manager.metric("store_up") == 1, "the store")
        assert await answer(second, PROMPT, **FULL) == (expected, 192)
        manager.kill()
        await until(lambda: not metrics(two)["scissorhands_worker_manager_up"], "the manager to be missed")
        assert await answer(second, PROMPT, **FULL) == (expected, 0)
        assert counts(two) == {"store_unavailable": 1, "hit": 1, "manager_unavailable": 1}
        assert idle(one, two)


async def test_a_store_killed_during_a_load(redis_server, monkeypatch):
    original = StoredPrefixes.fetch

    async def fetch(*arguments):
        data = await original(*arguments)
        redis_server.kill()
        return data

    async with manager_here(redis_server) as here, workers(here, **SETTINGS) as ((one, first), (two, second)):
        expected = await first_answer(first, one)
        monkeypatch.setattr(StoredPrefixes, "fetch", fetch)
        assert await answer(second, PROMPT, **FULL) == (expected, 0)
        assert counts(two) == {"store_unavailable": 1}
        await stored(two)
        assert idle(one, two)


@pytest.mark.parametrize("name", ["model", "tokenizer", "dtype", "policy", "codec_version", "tenant"])
async def test_what_a_manager_says_is_checked(redis_server, monkeypatch, name):
    original = StoredPrefixes.find

    async def find(*arguments):
        found = await original(*arguments)
        if found is None:
            return None
        identity = replace(found.manifest.identity, **{name: "another"})
        return replace(found, manifest=replace(found.manifest, identity=identity))

    async with manager_here(redis_server) as here, workers(here, **SETTINGS) as ((one, first), (two, second)):
        expected = await first_answer(first, one)
        monkeypatch.setattr(StoredPrefixes, "find", find)
        assert await answer(second, PROMPT, **FULL) == (expected, 0)
        assert counts(two) == {"mismatch": 1}
        assert idle(two)


async def test_a_load_that_takes_too_long(start_manager, redis_server):
    manager = start_manager(store_url=redis_server.url, store_timeout=30)
    async with workers(manager, suspend_deadline=0.5, **SETTINGS) as ((one, first), (two, second)):
        expected = await first_answer(first, one)
        redis_server.pause()
        assert await answer(second, PROMPT, **FULL) == (expected, 0)
        assert counts(two) == {"late": 1}
        await stored(two)
        redis_server.resume()
        assert idle(two)


async def test_streams_that_go_away_leave_nothing(start_manager, redis_server):
    manager = start_manager(store_url=redis_server.url, store_timeout=30)
    async with workers(manager, rows=1, **SETTINGS) as ((one, first), _):
        await first_answer(first, one)
        running = first.Generate(request(PROMPT, **LONG), timeout=60)
        await anext(aiter(running))
        # One waits in the queue with its prefix in memory, one for the store.
        waiting = first.Generate(request(PROMPT, **LONG), timeout=60)
        await anext(aiter(waiting))
        assert metrics(one)[HELD] > 0
        redis_server.pause()
        loading = first.Generate(request(PROMPT, session_id="c1", **FULL), timeout=60)
        going = asyncio.ensure_future(anext(aiter(loading)))
        await asyncio.sleep(0.2)
        for call in (waiting, loading, running):
            call.cancel()
        await asyncio.gather(going, return_exceptions=True)
        redis_server.resume()
        await until(lambda: idle(one), "all to be freed")
        await until(lambda: not manager.metric('sessions{state="open"}'), "the sessions to be closed")


async def test_a_stop_sends_what_waits(manager):
    async with workers(manager, 1, **SETTINGS) as ((_, first),):
        expected, _ = await answer(first, PROMPT, **FULL)
    async with workers(manager, 1, **SETTINGS) as ((_, second),):
        assert await answer(second, PROMPT, **FULL) == (expected, 192)
