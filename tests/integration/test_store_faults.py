"""A store that is killed, stopped or never there: nobody waits for it long, and it is found again by itself."""

import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from support.manager_data import fetch, offload, opened, planned, segment, snapshot, spec
from support.processes import wait_for

from scissorhands.errors import StoreUnavailableError
from scissorhands.v1 import cache_manager_pb2
from scissorhands_server.store.breaker import BreakerStore
from scissorhands_server.store.deadline import DeadlineStore
from scissorhands_server.store.metered import MeteredStore
from scissorhands_server.store.redis import RedisStore

pb = cache_manager_pb2


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
async def store(redis_server, registry):
    """Return the store as the manager wraps it, impatient."""
    seconds = Histogram("seconds", "Time.", ["method"], registry=registry)
    errors = Counter("errors", "Errors.", ["reason"], registry=registry)
    inner = RedisStore(redis_server.url, timeout=0.3, connections=2)
    wrapped = BreakerStore(MeteredStore(DeadlineStore(inner, 0.3), seconds, errors), threshold=2, cooldown=0.1)
    yield wrapped
    await wrapped.close()


async def reason(store):
    """Return why a call failed, an empty string if it did not."""
    try:
        await store.put("t/a", "p", b"x", 60)
    except StoreUnavailableError as error:
        return error.reason
    return ""


async def reasons(store, count=8):
    return [await reason(store) for _ in range(count)]


async def found_again(store):
    while await reason(store):
        await asyncio.sleep(0.02)


async def test_a_killed_store_is_refused_at_once_and_found_again(store, redis_server, registry):
    assert await reason(store) == ""
    redis_server.kill()
    seen = await reasons(store)
    assert set(seen) == {"unreachable", "open"}
    assert seen[:2] == ["unreachable"] * 2
    redis_server.start()
    await found_again(store)
    assert not store.is_open
    assert registry.get_sample_value("errors_total", {"reason": "unreachable"}) >= 2
    assert registry.get_sample_value("seconds_count", {"method": "put"}) >= 4
    # Refusals of the breaker are no calls.
    assert registry.get_sample_value("errors_total", {"reason": "open"}) is None


async def test_a_stopped_store_costs_two_deadlines_and_no_more(store, redis_server):
    assert await reason(store) == ""
    redis_server.pause()
    assert await reasons(store, 2) == ["timeout", "timeout"]
    assert await reason(store) == "open"
    redis_server.resume()
    await found_again(store)
    assert await reasons(store) == [""] * 8


async def test_calls_that_were_cut_off_leave_no_stale_replies(store, redis_server):
    for index in range(4):
        await store.put("t/a", f"p{index}", b"%d" % index, 60)
    redis_server.pause()
    results = await asyncio.gather(*(store.get("t/a", f"p{index % 4}") for index in range(8)), return_exceptions=True)
    assert all(isinstance(result, StoreUnavailableError) for result in results)
    redis_server.resume()
    await found_again(store)
    for index in range(4):
        assert await store.get("t/a", f"p{index}") == b"%d" % index


async def test_a_manager_starts_and_plans_without_its_store_and_finds_it(redis_server, start_manager, connect):
    redis_server.kill()
    manager = start_manager(store_url=redis_server.url, store_timeout=0.5)
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        await planned(stub, session, snapshot(session))
        data = segment(session)
        response = await offload(stub, session, (0, data), (1, segment(session, 1)))
        assert [(r.epoch, r.reason) for r in response.refused] == [(0, "store_unavailable"), (1, "store_unavailable")]
        found = (await stub.GetSession(pb.GetSessionRequest(session_id="s1"), timeout=10)).session
        assert (found.evictions, found.segment_count) == (1, 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fetch(stub, "s1")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert manager.metric("store_up") == 0
        redis_server.start()
        wait_for(lambda: manager.metric("store_up") == 1, "the store to be found")
        assert (await offload(stub, session, (0, data))).stored == 1
        assert await fetch(stub, "s1") == {0: data}


@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_a_manager_outlives_the_faults_of_its_store(redis_server, start_manager, connect, fault):
    manager = start_manager(store_url=redis_server.url, store_timeout=0.5)
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        wait_for(lambda: manager.metric("store_up") == 1, "the store")
        assert (await offload(stub, session, (0, segment(session)))).stored == 1
        getattr(redis_server, fault)()
        response = await offload(stub, session, *((epoch, segment(session, epoch)) for epoch in range(1, 9)))
        assert [r.reason for r in response.refused] == ["store_unavailable"] * 8
        await planned(stub, session, snapshot(session))
        # Refused by the breaker, not by its deadline.
        wait_for(lambda: manager.metric("store_up") == 0, "the fault to be noticed")
        found = (await stub.GetSession(pb.GetSessionRequest(session_id="s1"), timeout=10)).session
        assert (found.evictions, found.segment_count) == (1, 1)
        {"kill": redis_server.start, "pause": redis_server.resume}[fault]()
        wait_for(lambda: manager.metric("store_up") == 1, "the store to be found again")
        last = segment(session, 9)
        assert (await offload(stub, session, (9, last))).stored == 1
        assert (await fetch(stub, "s1", epochs=[9])) == {9: last}
        assert manager.metric('segments_refused_total{reason="store_unavailable"}') == 8


async def test_segments_discarded_while_the_store_is_away_are_deleted_later(redis_server, start_manager, connect):
    manager = start_manager(store_url=redis_server.url, store_timeout=0.5)
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        assert (await offload(stub, session, (0, segment(session)))).stored == 1
        redis_server.pause()
        closed = await stub.CloseSession(pb.CloseSessionRequest(session_id="s1", discard_segments=True), timeout=10)
        assert (closed.session.state, closed.session.segment_count) == (pb.SESSION_STATE_CLOSED, 1)
        assert manager.metric("store_bytes") > 0
        redis_server.resume()
        wait_for(lambda: manager.metric("store_bytes") == 0, "the segments to be deleted")
        assert redis_server.command("DBSIZE") == b":0\r\n"
        assert manager.metric('sessions{state="closed"}') == 0


async def test_a_store_that_comes_back_empty_is_believed(redis_server, start_manager, connect):
    manager = start_manager(store_url=redis_server.url, store_timeout=0.5)
    async with connect(manager) as stub:
        session = await opened(stub, spec())
        assert (await offload(stub, session, (0, segment(session)))).stored == 1
        redis_server.kill()
        redis_server.start()
        wait_for(lambda: manager.metric("store_up") == 1, "the store to be found again")
        while (found := await stub.GetSession(pb.GetSessionRequest(session_id="s1"), timeout=10)).session.segment_count:
            await asyncio.sleep(0.05)
        assert list(found.session.segments) == []
        assert manager.metric("store_bytes") == 0
