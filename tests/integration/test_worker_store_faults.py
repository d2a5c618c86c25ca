"""Conversations whose store is slow, holds what is another's, or is asked by two at once."""

import asyncio
from dataclasses import fields, replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.conversations import FIRST, NEW, SECOND, THIRD, ask, results, workers
from support.tiny_worker import metrics
from support.waiting import until

from benchmarks.delay_proxy import DelayProxy
from scissorhands.suspended import Manifest, SuspendedIdentity
from scissorhands.v1 import cache_manager_pb2_grpc, suspension_pb2
from scissorhands_server.manager.suspended_rows import Record

FULL = {"policy": "full", "no_prefix_cache": True}
KEPT = {**FULL, "session_id": "c1"}
RECORD = "scissorhands:{default/c1}:suspended:record"


def keys(redis, ending="*"):
    found = redis.command("KEYS", f"scissorhands:*suspended:{ending}").decode().split("\r\n")
    return sorted(line for line in found if line.startswith("scissorhands"))


def idle(*made):
    """Tell whether nothing is held any more."""
    gauges = ("suspension_held_bytes", "rows", "queue_requests", "cache_allocated_bytes")
    return all(metrics(worker)[f"scissorhands_worker_{gauge}"] == 0 for worker in made for gauge in gauges)


async def nothing_leaks(manager, redis, *made, sessions=("c1",)):
    """Whatever has happened: memory is given back, no lease is held, and the store can be emptied."""
    await until(lambda: idle(*made), "the gauges to be zero")
    await until(lambda: not keys(redis, "*:lease"), "the leases to be given up")
    async with grpc.aio.insecure_channel(manager.address) as channel:
        stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
        for name in sessions:
            await stub.DeleteSession(suspension_pb2.DeleteSessionRequest(session_id=name), timeout=10)
    await until(redis.holds_nothing, "the store to be empty")


async def first_turn(stub, **more):
    """Hold the first turn; return the prompt of the second and what it is answered without any session."""
    _, tokens, _ = await ask(stub, FIRST, **(KEPT | more))
    ids = [*FIRST, *tokens, *SECOND]
    return ids, (await ask(stub, ids, **FULL))[1]


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url, lease=2)


async def test_a_store_that_is_far_away_behind_a_narrow_line(start_manager, redis_server):
    async with DelayProxy(redis_server.port, 0.02, rate=400_000) as proxy:
        manager = await asyncio.to_thread(start_manager, store_url=f"redis://127.0.0.1:{proxy.port}", store_timeout=20)
        async with workers(manager, suspend_deadline=60, manager_deadline=10) as ((one, first), (two, second)):
            ids, expected = await first_turn(first)
            accepted, found, finish = await ask(second, ids, **KEPT)
            assert (accepted.resumed_tokens, found) == (len(FIRST) + NEW - 1, expected)
            assert finish.cache.suspended_bytes > 10_000
            assert results(two) == {"resumed": 1}
            await nothing_leaks(manager, redis_server, one, two)


@pytest.mark.parametrize(
    ("store_timeout", "suspend_deadline", "result"), [(0.5, 20, "store_unavailable"), (20, 0.5, "late")]
)
async def test_a_store_that_is_too_slow(start_manager, redis_server, store_timeout, suspend_deadline, result):
    """Whoever gives up first, manager or worker: the prompt is read anew, and the row stays as it was."""
    async with DelayProxy(redis_server.port, 0) as proxy:
        manager = await asyncio.to_thread(
            start_manager, store_url=f"redis://127.0.0.1:{proxy.port}", store_timeout=store_timeout, lease=2
        )
        async with workers(manager, suspend_deadline=suspend_deadline) as ((one, first), (two, second)):
            ids, expected = await first_turn(first)
            proxy.rate = 2000
            accepted, found, finish = await ask(second, ids, **KEPT)
            assert (accepted.resumed_tokens, found, finish.cache.suspended_bytes) == (0, expected, 0)
            assert results(two) == {result: 1}
            proxy.rate = None
            again = 0
            while not again:
                accepted, found, _ = await ask(second, ids, **KEPT)
                assert found == expected
                again = accepted.resumed_tokens
            assert again == len(FIRST) + NEW - 1
            await nothing_leaks(manager, redis_server, one, two)


async def test_a_part_of_another_conversation_is_none_of_this_one(manager, redis_server):
    async with workers(manager) as ((one, first), (two, second)):
        ids, expected = await first_turn(first)
        # As large, and of the same model: only its bytes tell.
        await ask(first, [token + 1 for token in FIRST], **KEPT | {"session_id": "c2"})
        foreign, own = (next(key for key in keys(redis_server, "*:0") if name in key) for name in ("c2", "c1"))
        assert redis_server.command("STRLEN", foreign) == redis_server.command("STRLEN", own)
        redis_server.command("COPY", foreign, own, "REPLACE")
        accepted, found, _ = await ask(second, ids, **KEPT)
        assert (accepted.resumed_tokens, found) == (0, expected)
        assert results(two) == {"corrupt": 1}
        assert manager.metric('resumptions_total{result="corrupt"}') == 1
        await nothing_leaks(manager, redis_server, one, two, sessions=("c1", "c2"))


@pytest.mark.parametrize("name", [field.name for field in fields(SuspendedIdentity)])
async def test_a_manifest_of_something_else_is_none_of_this_one(manager, redis_server, name):
    """Of another model, dtype, policy, version, tenant: whole, with right checksums, in the place of this one's."""
    async with workers(manager) as ((one, first), (two, second)):
        ids, expected = await first_turn(first)
        reply = redis_server.command("GET", RECORD)
        record = Record.parse(reply.partition(b"\r\n")[2][:-2])
        manifest = Manifest.parse(record.manifest)
        other = replace(manifest.identity, **{name: "another"})
        forged = replace(record, manifest=replace(manifest, identity=other).pack())
        redis_server.command("SET", RECORD, forged.pack())
        accepted, found, _ = await ask(second, ids, **KEPT)
        assert (accepted.resumed_tokens, found) == (0, expected)
        assert results(two) == {"tokens" if name == "tokens" else "mismatch": 1}
        # It leaves a row of its own in its place.
        accepted, _, _ = await ask(first, [*ids, *found, *THIRD], **KEPT)
        assert accepted.resumed_tokens == len(ids) + NEW - 1
        await nothing_leaks(manager, redis_server, one, two)


async def test_of_two_workers_that_resume_at_once_one_wins(manager, redis_server):
    async with workers(manager, session_patience=0) as ((one, first), (two, second)):
        ids, expected = await first_turn(first)
        for _ in range(5):
            turns = await asyncio.gather(
                *(ask(stub, ids, new=NEW, **KEPT) for stub in (first, second)), return_exceptions=True
            )
            answered = [turn for turn in turns if not isinstance(turn, BaseException)]
            refused = [turn for turn in turns if isinstance(turn, grpc.aio.AioRpcError)]
            assert len(answered) + len(refused) == 2
            # One may have ended before the other began.
            assert answered
            for _, found, _ in answered:
                assert found == expected
            for error in refused:
                assert error.code() is grpc.StatusCode.ABORTED
                info = error_details_pb2.ErrorInfo()
                assert any(detail.Unpack(info) for detail in rpc_status.from_call(error).details)
                assert info.reason == "SESSION_CONFLICT"
            if refused:
                break
        assert refused, "both ran one after the other, every time"
        assert results(one).get("conflict", 0) + results(two).get("conflict", 0) == 1
        await nothing_leaks(manager, redis_server, one, two)


async def test_a_store_that_is_paused_when_a_row_goes_there(manager, redis_server):
    """For longer than every deadline: the answer is whole, its row is not kept, and the one before still is."""
    async with workers(manager, suspend_deadline=1) as ((one, first), (two, second)):
        ids, expected = await first_turn(first)
        answering = asyncio.create_task(ask(second, ids, new=200, **KEPT))
        await until(lambda: metrics(two)["scissorhands_worker_resumed_tokens_total"], "the row to be resumed")
        redis_server.pause()
        _, found, finish = await answering
        assert found[:NEW] == expected
        if not finish.cache.suspended_bytes:
            assert set(results(two, "suspends")) <= {"late", "store_unavailable"}
        redis_server.resume()
        await until(lambda: manager.metric("store_up") == 1, "the store")
        await asyncio.sleep(2.1)  # The lease, unless its end has reached the store.
        accepted, again, _ = await ask(first, ids, **KEPT)
        assert again == expected
        assert accepted.resumed_tokens in {0, len(FIRST) + NEW - 1}
        await nothing_leaks(manager, redis_server, one, two)
