"""Stores of several servers: a Redis Cluster that loses a node, and a server that sentinels replace."""

import asyncio
import time

import grpc
import pytest
from support.conversations import FIRST, NEW, SECOND, THIRD, ask, converse, results, workers
from support.processes import wait_for
from support.redis_groups import RedisCluster, RedisWatched, documented_rules
from support.suspended_data import asked, manifest_for, resume, suspend

from scissorhands.errors import StoreUnavailableError
from scissorhands.suspended import cut
from scissorhands.v1 import cache_manager_pb2_grpc, suspension_pb2
from scissorhands_server.doctor.finding import Status
from scissorhands_server.doctor.store import check_store
from scissorhands_server.store.base import PageInfo
from scissorhands_server.store.redis import RedisStore

FULL = {"policy": "full"}
PIECES = cut(memoryview(bytes(range(251)) * 20_000))
DATA = b"".join(PIECES)


@pytest.fixture
def cluster(tmp_path):
    servers = RedisCluster(tmp_path)
    servers.start()
    yield servers
    servers.stop()


@pytest.fixture
def watched(tmp_path):
    servers = RedisWatched(tmp_path)
    servers.start()
    yield servers
    servers.stop()


def sessions_on(cluster, node, count=1):
    """Return ids of sessions whose keys lie on a node."""
    names = (f"s{number}" for number in range(1000))
    return [name for name in names if cluster.owner_of(f"{{default/{name}}}") is node][:count]


async def delete(manager, *names):
    async with grpc.aio.insecure_channel(manager.address) as channel:
        stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
        for name in names:
            await stub.DeleteSession(suspension_pb2.DeleteSessionRequest(session_id=name), timeout=10)


async def test_pages_of_many_owners_lie_on_all_nodes_of_a_cluster(cluster):
    store = RedisStore(cluster.url, timeout=5, connections=8)
    owners = [f"t/{number}" for number in range(60)]
    try:

        async def fill(owner):
            for page in ("a", "b"):
                await store.put(owner, page, owner.encode(), 60)
            await store.commit(owner, ["a", "b"], 60)
            assert await store.compare_and_set(owner, "lease", None, b"1", 60)
            assert not await store.compare_and_set(owner, "lease", None, b"2", 60)
            assert await store.list_pages(owner) == [PageInfo(page, len(owner)) for page in ("a", "b")]

        await asyncio.gather(*(fill(owner) for owner in owners))
        # Pages, list and lease of each owner.
        assert sum(cluster.sizes()) == 4 * len(owners)
        assert all(count >= 4 for count in cluster.sizes())
        assert [await store.delete(owner, ["a", "b", "lease"]) for owner in owners] == [3] * len(owners)
        assert cluster.sizes() == [0, 0, 0]
    finally:
        await store.close()


async def test_a_conversation_goes_on_through_a_cluster(cluster, start_manager):
    for node in cluster.nodes:
        node.command("ACL", "SETUSER", "hands", "on", ">hush", *documented_rules())
    # The manager is told of one node only; it finds the others.
    manager = start_manager(store_url=f"redis+cluster://hands:hush@{cluster.nodes[1].address}")
    async with workers(manager) as ((_, first), (_, second)):
        alone, _ = await converse([first] * 3, **FULL)
        names = [name for node in cluster.nodes for name in sessions_on(cluster, node)]
        for name in names:
            kept, resumed = await converse([first, second, first], session_id=name, **FULL)
            assert (kept, resumed[0]) == (alone, 0)
            assert all(resumed[1:])
        assert all(cluster.sizes())
        await delete(manager, *names)
        assert cluster.sizes() == [0, 0, 0]
    answers, memory = await asyncio.to_thread(check_store, cluster.url)
    assert (answers.status, memory.status) == (Status.OK, Status.WARNING)


@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_a_node_that_is_gone_is_a_counted_miss_and_the_others_go_on(cluster, start_manager, fault):
    lost = cluster.nodes[0]
    manager = start_manager(store_url=cluster.url, store_timeout=1)
    async with workers(manager, suspend_deadline=4) as ((_, first), (two, second)):
        (gone,), (here,) = sessions_on(cluster, lost), sessions_on(cluster, cluster.nodes[2])
        _, tokens, _ = await ask(first, FIRST, session_id=gone, **FULL)
        await ask(first, FIRST, session_id=here, **FULL)
        ids = [*FIRST, *tokens, *SECOND]
        expected = (await ask(first, ids, **FULL))[1]
        getattr(lost, fault)()
        began = time.monotonic()
        accepted, found, finish = await ask(second, ids, session_id=gone, **FULL)
        assert (accepted.resumed_tokens, found, finish.cache.suspended_bytes) == (0, expected, 0)
        assert time.monotonic() - began < 30
        assert results(two) == {"store_unavailable": 1}
        if fault == "kill":
            for _ in range(3):
                accepted, found, _ = await ask(second, ids, session_id=gone, **FULL)
                assert (accepted.resumed_tokens, found) == (0, expected)
            # A node that is gone refuses its calls at once, and takes no other node away.
            accepted, found, finish = await ask(second, ids, session_id=here, **FULL)
            assert (accepted.resumed_tokens, found) == (len(FIRST) + NEW - 1, expected)
            assert finish.cache.suspended_bytes > 0
            lost.start()
        else:
            lost.resume()
        # It is found again by itself; one that was killed is empty.
        ids, again = [*ids, *expected, *THIRD], False
        for _ in range(200):
            accepted, found, finish = await ask(second, ids, session_id=gone, **FULL)
            if again := bool(finish.cache.suspended_bytes):
                break
        assert again
        accepted, _, _ = await ask(first, [*ids, *found, *SECOND], session_id=gone, **FULL)
        assert accepted.resumed_tokens == len(ids) + NEW - 1
    assert manager.metric('store_errors_total{reason="timeout"}') + manager.metric(
        'store_errors_total{reason="unreachable"}'
    )


async def test_sentinels_lead_to_whoever_takes_the_place_of_a_server_that_is_gone(watched, start_manager, connect):
    master, replica = watched.servers
    manager = start_manager(store_url=watched.url, store_timeout=1, lease=1)
    async with connect(manager) as stub:
        written = manifest_for(asked(), PIECES).pack()
        await suspend(stub, (await resume(stub)).fence, PIECES)
        await asyncio.to_thread(wait_for, lambda: replica.command("DBSIZE") == master.command("DBSIZE"), "the replica")
        # One sentinel less is no harm.
        watched.sentinels[0].kill()
        master.kill()
        assert (await resume(stub)).code is grpc.StatusCode.UNAVAILABLE
        while (turn := await resume(stub)).code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED}:
            await asyncio.sleep(0.2)
        # What it had was copied before.
        assert (turn.manifest, turn.data) == (written, DATA)
        await suspend(stub, turn.fence, PIECES[:1])
        assert (await resume(stub)).data == PIECES[0]
    # Without any sentinel nobody knows the way, and nobody waits for it.
    for sentinel in watched.sentinels[1:]:
        sentinel.kill()
    store = RedisStore(watched.url, timeout=1, connections=2)
    try:
        with pytest.raises(StoreUnavailableError) as caught:
            await store.ping()
        assert caught.value.reason == "unreachable"
        assert "themaster" in str(caught.value)
    finally:
        await store.close()
