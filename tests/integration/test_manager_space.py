"""What a tenant may store: quotas, least-recently-used eviction of whole objects, and pins, over several managers."""

import asyncio

import grpc
import pytest
from support.manager_data import offload, opened, segment, spec
from support.prefix_data import BASE, load_request, manifest_of, store_messages
from support.processes import wait_for
from support.stored_objects import keep, kept, keys, parts, release
from support.suspended_data import resume, suspend

from scissorhands.budget import BudgetRequest, ModelShape
from scissorhands.grant import PolicyRequest, grant
from scissorhands.prefix import boundaries
from scissorhands.v1 import cache_manager_pb2, suspension_pb2

MIB = 1 << 20
EXHAUSTED, OK = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK
# A row of 1 MiB, less what its manifest takes.
PIECES = [bytes(MIB - 1024)]


async def gauge(manager, series, value):
    """Wait until a gauge, which is measured now and then, has a value."""
    await asyncio.to_thread(wait_for, lambda: manager.metric(series) == value, f"{series} to be {value}")


async def shown(manager, objects):
    await gauge(manager, 'stored_objects{kind="row"}', objects)


@pytest.fixture
def start(start_manager, redis_server):
    """Return a function that starts managers of one store."""
    return lambda **options: start_manager(store_url=redis_server.url, janitor_interval=0.2, **options)


async def test_what_was_used_least_lately_goes_first_whoever_used_it(start, redis_server, connect):
    limits = {"tenant_quota_bytes": 4 * MIB, "store_low_share": 1}
    one, two = start(**limits), start(**limits)
    async with connect(one) as first, connect(two) as second:
        for number in range(4):
            await keep(first, f"s{number}", PIECES)
        # Reading it is a use, even through another manager.
        turn = await resume(second, session_id="s0")
        await release(second, turn.fence, "s0")
        await keep(second, "s4", PIECES)
        assert kept(redis_server) == {"s0", "s2", "s3", "s4"}
        # A restarted manager knows as much.
        one.kill()
        one.restart()
        await keep(second, "s5", PIECES)
        assert kept(redis_server) == {"s0", "s3", "s4", "s5"}
        assert (await resume(second, session_id="s1")).code is grpc.StatusCode.NOT_FOUND
        assert (await resume(second, session_id="s0")).data == PIECES[0]
    await shown(one, 4)
    # The other may still show what it saw while the last row was on its way.
    series = 'stored_bytes{kind="row"}'
    await asyncio.to_thread(wait_for, lambda: one.metric(series) == two.metric(series), "both to show the same")
    assert 4 * (MIB - 1024) < one.metric(series) <= 4 * MIB
    assert two.metric('evicted_objects_total{kind="row",reason="quota"}') == 2
    assert two.metric('evicted_object_bytes_total{kind="row",reason="quota"}') > 2 * (MIB - 1024)


async def test_eviction_goes_down_to_the_low_mark(start, redis_server, connect):
    manager = start(tenant_quota_bytes=8 * MIB, store_low_share=0.5)
    async with connect(manager) as stub:
        for number in range(9):
            await keep(stub, f"s{number}", PIECES)
        assert kept(redis_server) == {"s5", "s6", "s7", "s8"}


async def test_the_high_water_mark_is_over_all_kinds(start, redis_server, connect):
    manager = start(store_high_bytes=4 * MIB - 8192, store_low_share=0.9, lease=1)
    async with connect(manager) as stub:
        session = await opened(stub, spec("a1"))
        await offload(stub, session, (0, segment(session, sizes=(MIB, 0, MIB, 10))))
        await asyncio.sleep(1.1)  # The pin of what was just added to.
        await keep(stub, "s1", PIECES)
        await keep(stub, "s2", PIECES)
        assert kept(redis_server) == {"s1", "s2"}
        assert not [key for key in keys(redis_server) if "segment" in key]
        assert manager.metric('evicted_objects_total{kind="archive",reason="high_water"}') == 1
        await shown(manager, 2)
        await gauge(manager, 'stored_objects{kind="archive"}', 0)


async def test_turns_in_progress_are_spared_until_their_lease_ends(start, redis_server, connect):
    manager = start(tenant_quota_bytes=2 * MIB + 4096, store_low_share=1, lease=1.5)
    async with connect(manager) as stub:
        await keep(stub, "s1", PIECES)
        running = await resume(stub, session_id="s1")
        await keep(stub, "s2", PIECES)
        await keep(stub, "s3", PIECES)
        assert kept(redis_server) == {"s1", "s3"}
        session = await opened(stub, spec(session_id="s1", fence=running.fence))
        second = await resume(stub, session_id="s3")
        turn = await resume(stub, session_id="s4")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await suspend(stub, turn.fence, PIECES, session_id="s4")
        assert caught.value.code() is EXHAUSTED
        assert "tenant_quota_bytes" in caught.value.details()
        assert kept(redis_server) == {"s1", "s3"}
        assert manager.metric('quota_refusals_total{kind="row"}') == 1
        assert manager.metric('suspensions_total{result="quota"}') == 1
        # Renewing a lease renews the pin; one that is not renewed ends.
        for _ in range(6):
            await stub.RenewSessions(cache_manager_pb2.RenewSessionsRequest(sessions=[session]), timeout=10)
            await asyncio.sleep(0.4)
        await keep(stub, "s5", PIECES)
        assert kept(redis_server) == {"s1", "s5"}
        await release(stub, second.fence, "s3")
        # What a turn leaves can be evicted as soon as it has ended.
        await release(stub, running.fence)
        await keep(stub, "s6", PIECES)
        await keep(stub, "s7", PIECES)
        assert kept(redis_server) == {"s6", "s7"}


async def test_what_is_above_the_quota_is_refused_and_takes_nothing_away(start, redis_server, connect):
    manager = start(tenant_quota_bytes=MIB + 4096)
    async with connect(manager) as stub:
        await keep(stub, "s1", PIECES)
        turn = await resume(stub, session_id="s2")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await suspend(stub, turn.fence, [bytes(2 * MIB)], session_id="s2")
        assert caught.value.code() is EXHAUSTED
        assert "raise tenant_quota_bytes of the manager" in caught.value.details()
        session = await opened(stub, spec("a1"))
        response = await offload(stub, session, (0, segment(session, sizes=(2 * MIB, 0, 10, 10))))
        assert [(each.epoch, each.reason) for each in response.refused] == [(0, "quota")]
        assert kept(redis_server) == {"s1"}
        assert manager.metric('segments_refused_total{reason="quota"}') == 1
        # A row that was refused leaves the one before.
        again = await resume(stub, session_id="s1")
        with pytest.raises(grpc.aio.AioRpcError):
            await suspend(stub, again.fence, [bytes(2 * MIB)], session_id="s1")
        await release(stub, again.fence)
        assert (await resume(stub, session_id="s1")).data == PIECES[0]


async def test_of_a_prefix_the_end_goes_first(start, redis_server, connect):
    """What goes on from a boundary is of no use without it."""
    shape = ModelShape(2, 2, 8, 4)
    granted = grant(BudgetRequest.tokens(960), PolicyRequest("h2o"), shape, 1000)
    chain = [place for place in boundaries(BASE, granted, shape, [*range(999)], 80) if not place.whole][:3]
    manager = start(tenant_quota_bytes=3 * MIB, store_low_share=1)
    first, second, _ = steps = [place.step for place in chain]

    def stored():
        owners = [key for key in keys(redis_server) if "prefix:record" in key]
        return [place.step for place in chain if any(place.key.hex() in owner for owner in owners)]

    async with connect(manager) as stub:
        for place in reversed(chain):
            manifest = manifest_of(place, PIECES, [])
            await stub.StorePrefix(iter(store_messages(manifest, PIECES)), timeout=30)
        assert stored() == steps
        async for _ in stub.LoadPrefix(load_request(chain), timeout=30):
            pass
        await keep(stub, "s1", PIECES)
        assert stored() == [first, second]
        await keep(stub, "s2", PIECES)
        assert stored() == [first]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StorePrefix(iter(store_messages(manifest_of(chain[2], PIECES * 5, []), PIECES * 5)), timeout=30)
        assert "tenant_quota_bytes" in caught.value.details()
    assert manager.metric('evicted_objects_total{kind="prefix",reason="quota"}') == 2
    assert manager.metric('prefix_stores_total{result="quota"}') == 1


async def test_many_at_once_stay_within_the_quota(start, redis_server, connect):
    manager = start(tenant_quota_bytes=4 * MIB)
    async with connect(manager) as stub:

        async def put(number):
            try:
                await keep(stub, f"s{number}", PIECES)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return OK

        codes = await asyncio.gather(*map(put, range(16)))
        assert set(codes) <= {OK, EXHAUSTED}
        assert codes.count(OK) >= 1
        assert len(kept(redis_server)) <= 4
        for session_id in kept(redis_server):
            assert (await resume(stub, session_id=session_id)).data == PIECES[0]
        await shown(manager, len(kept(redis_server)))


async def test_a_row_counts_once_however_often_it_is_replaced(start, redis_server, connect):
    manager = start(tenant_quota_bytes=2 * MIB + 8192)
    async with connect(manager) as stub:
        for _ in range(5):
            await keep(stub, "s1", PIECES)
        assert len(parts(redis_server)) == 1
        await shown(manager, 1)
        assert manager.metric('stored_bytes{kind="row"}') < MIB
        assert manager.metric('evicted_objects_total{kind="row",reason="quota"}') == 0


async def test_nothing_is_left_when_all_sessions_are_deleted(start, redis_server, connect):
    manager = start(tenant_quota_bytes=64 * MIB)
    async with connect(manager) as stub:
        for number in range(4):
            name = f"s{number}"
            turn = await resume(stub, session_id=name)
            session = await opened(stub, spec(name, fence=turn.fence))
            await offload(stub, session, (0, segment(session)))
            await suspend(stub, turn.fence, PIECES, session_id=name)
        await shown(manager, 4)
        for number in range(4):
            request = suspension_pb2.DeleteSessionRequest(session_id=f"s{number}")
            await stub.DeleteSession(request, timeout=10)
        await asyncio.to_thread(wait_for, lambda: redis_server.command("DBSIZE") == b":0\r\n", "an empty store")
        await shown(manager, 0)
