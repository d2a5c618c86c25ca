"""What crashes and a full store leave behind is mended, and nothing that is whole or on its way is touched."""

import asyncio

import pytest
from support.manager_data import offload, opened, segment, spec
from support.prefix_data import BASE, manifest_of, store_messages
from support.processes import wait_for
from support.stored_objects import keep, kept, keys, parts
from support.suspended_data import resume, suspend, suspend_messages

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.grant import PolicyRequest, grant
from scissorhands.prefix import boundaries
from scissorhands_server.manager.keeper import UNLISTED_SECONDS
from scissorhands_server.store.redis import RedisStore
from scissorhands_server.store.registry import ObjectName, Registry

PIECES = [bytes(5000), bytes(3000)]
DATA = b"".join(PIECES)
SHAPE = ModelShape(2, 2, 8, 4)
GRANT = grant(BudgetRequest.tokens(160), PolicyRequest("h2o"), SHAPE, 600)
PLACE = boundaries(BASE, GRANT, SHAPE, [*range(100)], 80)[0]
REGISTRY = ("scissorhands:{registry:default}:entries", "scissorhands:{registry:default}:used")


def mends(manager, result):
    return manager.metric(f'janitor_mends_total{{result="{result}"}}')


async def until(condition, what):
    await asyncio.to_thread(wait_for, condition, what)


async def store_one_of_each(stub):
    """Store a row, an archive and a prefix."""
    turn = await resume(stub, session_id="s1")
    session = await opened(stub, spec("s1", fence=turn.fence))
    await offload(stub, session, *((epoch, segment(session, epoch)) for epoch in range(3)))
    await suspend(stub, turn.fence, PIECES)
    manifest = manifest_of(PLACE, [b"g" * 500], [b"e" * 50])
    await stub.StorePrefix(iter(store_messages(manifest, [b"g" * 500, b"e" * 50])), timeout=30)


def sizes(manager):
    return {kind: manager.metric(f'stored_bytes{{kind="{kind}"}}') for kind in ("row", "archive", "prefix")}


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url, janitor_interval=0.1, lease=1)


async def test_a_lost_registry_is_made_anew_and_a_wrong_one_corrected(manager, redis_server, connect):
    async with connect(manager) as stub:
        await store_one_of_each(stub)
        await until(lambda: all(sizes(manager).values()), "the sizes")
        before = sizes(manager)
        redis_server.command("DEL", *REGISTRY)
        await until(lambda: mends(manager, "found_object") == 3, "the objects to be found")
        await until(lambda: sizes(manager) == before, "the sizes to be the same again")
        store = RedisStore(redis_server.url, timeout=5, connections=2)
        await Registry(store).add(ObjectName("default", "archive", "s1"), 12345, 0, 60, 0)
        await store.close()
        await until(lambda: mends(manager, "mended_entry") >= 1, "the size to be corrected")
        await until(lambda: sizes(manager) == before, "the sizes to be right")
        assert mends(manager, "dead_page") == mends(manager, "gone_object") == 0
        assert (await resume(stub)).data == DATA


async def test_entries_of_what_is_gone_are_taken_off(manager, redis_server, connect):
    async with connect(manager) as stub:
        await store_one_of_each(stub)
        await until(lambda: all(sizes(manager).values()), "the sizes")
        redis_server.command("DEL", *(key for key in keys(redis_server) if "{default/" in key))
        await until(lambda: mends(manager, "gone_object") == 3, "the entries to be taken off")
        await until(lambda: redis_server.command("DBSIZE") == b":0\r\n", "an empty store")
        assert set(sizes(manager).values()) == {0}


@pytest.mark.parametrize("registered", [True, False])
async def test_what_is_left_of_an_object_without_a_part_is_deleted(manager, redis_server, connect, registered):
    async with connect(manager) as stub:
        await store_one_of_each(stub)
        await keep(stub, "s2", PIECES)
        of_prefix = [key for key in keys(redis_server) if "prefix:" in key]
        lost = [parts(redis_server)[0], next(key for key in of_prefix if key.endswith(":0"))]
        assert "default/s1" in lost[0]
        redis_server.command("DEL", *lost, *([] if registered else REGISTRY))
        await until(lambda: kept(redis_server) == {"s2"}, "the rest to be deleted")
        await until(lambda: not [key for key in keys(redis_server) if "prefix:" in key], "the prefix to be deleted")
        for kind in ("row", "prefix"):
            assert manager.metric(f'evicted_objects_total{{kind="{kind}",reason="broken"}}') == 1
        assert len([key for key in keys(redis_server) if "segment" in key]) == 3
        assert (await resume(stub, session_id="s2")).data == DATA


async def test_a_manager_killed_between_parts_and_record(start_manager, redis_server, connect):
    """The parts of a turn are left alone while it may still name them, and deleted when the next one has begun."""
    first = start_manager(store_url=redis_server.url, janitor_interval=0.1, lease=1)
    async with connect(first) as stub:
        turn = await resume(stub)
        endless = asyncio.Event()

        async def messages():
            for message in suspend_messages(turn.fence, PIECES):
                yield message
            await endless.wait()

        call = stub.SuspendSession(messages(), timeout=30)
        await until(lambda: len(parts(redis_server)) == 2, "the parts")
        await asyncio.sleep(0.5)
        assert len(parts(redis_server)) == 2
        assert mends(first, "dead_page") == 0
        first.kill()
        call.cancel()
    # As if it had been killed one call later, when the parts already have their full time.
    for key in parts(redis_server):
        redis_server.command("PEXPIRE", key, "3590000")
    second = start_manager(store_url=redis_server.url, janitor_interval=0.1, lease=1)
    async with connect(second) as stub:
        await asyncio.sleep(1.1)
        assert len(parts(redis_server)) == 2
        again = await resume(stub)
        await until(lambda: mends(second, "dead_page") == 2, "the parts to be deleted")
        assert parts(redis_server) == []
        await suspend(stub, again.fence, PIECES)
        assert (await resume(stub)).data == DATA


async def test_parts_that_wait_in_vain_are_deleted(manager, redis_server, connect):
    async with connect(manager) as stub:
        turn = await resume(stub)
        owner = "scissorhands:{default/s1}:suspended:"
        overdue, waiting = (f"{seconds:.0f}000" for seconds in (3590 - UNLISTED_SECONDS, UNLISTED_SECONDS - 10))
        redis_server.command("SET", f"{owner}{turn.fence}:0", b"x", "PX", overdue)
        redis_server.command("SET", f"{owner}{turn.fence}:1", b"x", "PX", waiting)
        redis_server.command("SET", f"{owner}{turn.fence - 1}:0", b"x", "PX", "3000000")
        # Without a record no turn can name parts.
        redis_server.command("SET", "scissorhands:{default/s9}:suspended:77:0", b"x", "PX", "3000000")
        # Not on the list of its session, though it has the time of those that are.
        redis_server.command("SET", "scissorhands:{default/s1}:segment:3", b"x", "PX", "500000")
        redis_server.command("SET", "scissorhands:{default/s1}:segment:4", b"x", "PX", "100000")
        await until(lambda: mends(manager, "dead_page") == 4, "the pages to be deleted")
        left = [key.removeprefix("scissorhands:{default/s1}:") for key in keys(redis_server)]
        assert f"suspended:{turn.fence}:1" in left
        assert "segment:4" in left
        assert len(parts(redis_server)) == 1


async def test_one_manager_at_a_time(start_manager, redis_server, connect):
    redis_server.command("SET", "scissorhands:{janitor}:lease", b"somebody", "PX", "60000")
    manager = start_manager(store_url=redis_server.url, janitor_interval=0.1)
    async with connect(manager) as stub:
        await keep(stub, "s1", PIECES)
        redis_server.command("DEL", *REGISTRY)
        await asyncio.sleep(0.5)
        assert mends(manager, "found_object") == 0
        redis_server.command("DEL", "scissorhands:{janitor}:lease")
        await until(lambda: mends(manager, "found_object") == 1, "the object to be found")
        lease = ("EXISTS", "scissorhands:{janitor}:lease")
        await until(lambda: redis_server.command(*lease) == b":0\r\n", "the lease to be given up")
