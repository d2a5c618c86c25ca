"""What becomes of a conversation when the store, the manager or a worker fails: never a wrong token, and no leak."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.conversations import FIRST, NEW, SECOND, THIRD, ask, results, workers
from support.manager_here import manager_here
from support.processes import ManagerProcess, free_port
from support.tiny_worker import metrics, request
from support.waiting import until
from support.worker_process import worker_process

from scissorhands import suspended
from scissorhands.v1 import generation_pb2_grpc
from scissorhands_server.manager.suspended_rows import SuspendedRows

FULL = {"policy": "full"}
KEPT = {"policy": "full", "session_id": "c1"}
HELD = "scissorhands_worker_suspension_held_bytes"


def keys(redis, ending):
    found = redis.command("KEYS", f"*:{ending}").decode().split("\r\n")
    return [line for line in found if line.startswith("scissorhands")]


def idle(*made):
    """Tell whether nothing is held any more."""
    return all(metrics(worker)[HELD] == metrics(worker)["scissorhands_worker_rows"] == 0 for worker in made)


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url, store_timeout=0.4, lease=2)


async def first_turn(stub, **more):
    """Hold the first turn; return the prompt of the second and what it is answered without any session."""
    _, tokens, _ = await ask(stub, FIRST, **(KEPT | more))
    ids = [*FIRST, *tokens, *SECOND]
    return ids, (await ask(stub, ids, **FULL))[1]


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "emptied"])
async def test_a_row_that_is_not_whole_is_read_anew(manager, redis_server, damage):
    async with workers(manager) as ((_, first), (two, second)):
        ids, expected = await first_turn(first)
        (part,) = keys(redis_server, "0")
        if damage == "bit":
            old = redis_server.command("GETRANGE", part, 900, 900)[-3:-2]
            redis_server.command("SETRANGE", part, 900, bytes([old[0] ^ 1]))
        elif damage == "truncated":
            redis_server.command("SET", part, b"short")
        elif damage == "missing":
            redis_server.command("DEL", part)
        else:
            redis_server.command("FLUSHALL")
        accepted, found, finish = await ask(second, ids, **KEPT)
        assert (accepted.resumed_tokens, found) == (0, expected)
        assert results(two) == {{"missing": "missing", "emptied": "new"}.get(damage, "corrupt"): 1}
        # It leaves a whole row again.
        assert finish.cache.suspended_bytes > 0
        accepted, _, _ = await ask(first, [*ids, *found, *THIRD], **KEPT)
        assert accepted.resumed_tokens == len(ids) + NEW - 1
        assert idle(two)


async def test_without_a_store_or_a_manager_conversations_go_on(manager, redis_server):
    async with workers(manager, suspend_deadline=1) as ((one, first), (two, second)):
        ids, expected = await first_turn(first)
        redis_server.pause()
        for _ in range(2):
            accepted, found, finish = await ask(second, ids, **KEPT)
            assert (accepted.resumed_tokens, found, finish.cache.suspended_bytes) == (0, expected, 0)
            assert accepted.session_id != "c1"
        redis_server.resume()
        assert results(two) == {"store_unavailable": 2}
        # The manager was not taken to be away, and what was kept before is still there.
        assert metrics(two)["scissorhands_worker_manager_up"] == 1
        while results(two)["store_unavailable"] < 100:
            accepted, found, _ = await ask(second, ids, **KEPT)
            if accepted.resumed_tokens:
                break
            assert found == expected
        assert (accepted.resumed_tokens, found) == (len(FIRST) + NEW - 1, expected)
        manager.kill()
        await until(lambda: not metrics(one)["scissorhands_worker_manager_up"], "the manager to be missed")
        accepted, found, _ = await ask(first, ids, **KEPT)
        assert (accepted.resumed_tokens, found) == (0, expected)
        assert results(one)["manager_unavailable"] == 1
        assert idle(one, two)


async def test_a_store_killed_at_the_end_of_a_turn(manager, redis_server):
    async with workers(manager, 1, suspend_deadline=1) as ((worker, stub),):
        ids, expected = await first_turn(stub)
        events = aiter(stub.Generate(request(ids, new=NEW, **KEPT), timeout=60))
        await anext(events)
        redis_server.kill()
        tokens, last = [], None
        async for event in events:
            tokens += event.delta.token_ids
            last = event
        assert tokens == expected
        assert last.finish.cache.suspended_bytes == 0
        assert results(worker, "suspends") == {"suspended": 1, "store_unavailable": 1}
        redis_server.start()
        assert idle(worker)


async def test_a_store_killed_during_a_restore(redis_server, monkeypatch):
    monkeypatch.setattr(suspended, "PART_BYTES", 4096)
    original = SuspendedRows.parts

    async def parts(rows, *arguments):
        async for data in original(rows, *arguments):
            yield data
            redis_server.kill()

    async with manager_here(redis_server) as here, workers(here) as ((_, first), (two, second)):
        ids, expected = await first_turn(first)
        assert len(keys(redis_server, "[0-9]")) > 2
        monkeypatch.setattr(SuspendedRows, "parts", parts)
        accepted, found, _ = await ask(second, ids, **KEPT)
        assert (accepted.resumed_tokens, found) == (0, expected)
        assert results(two) == {"store_unavailable": 1}
        assert idle(two)


async def test_of_two_turns_at_once_one_is_aborted(manager):
    async with workers(manager, session_patience=0) as ((one, first), (two, second)):
        ids, expected = await first_turn(first)
        events = aiter(first.Generate(request(ids, new=300, **KEPT), timeout=60))
        assert (await anext(events)).accepted.resumed_tokens
        for stub in (second, first):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(stub, ids, **KEPT)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            info = error_details_pb2.ErrorInfo()
            retry = error_details_pb2.RetryInfo()
            details = rpc_status.from_call(caught.value).details
            assert any(detail.Unpack(info) for detail in details)
            assert info.reason == "SESSION_CONFLICT"
            # Its worker may be gone; then its lease ends.
            assert any(detail.Unpack(retry) for detail in details)
            assert 0 < retry.retry_delay.ToTimedelta().total_seconds() <= 2
        tokens = [token async for event in events for token in event.delta.token_ids]
        assert tokens[:NEW] == expected
        assert len(tokens) == 300
        assert results(one) == {"new": 1, "resumed": 1, "conflict": 1}
        accepted, _, _ = await ask(second, [*ids, *tokens, *THIRD], **KEPT)
        assert accepted.resumed_tokens == len(ids) + 299
        assert idle(one, two)


async def test_a_turn_that_is_stopped_leaves_what_was_there(manager):
    """Its client goes on at once, maybe with another worker."""
    async with workers(manager, rows=1) as ((one, first), (two, second)):
        ids, expected = await first_turn(first)
        stopped = first.Generate(request(ids, new=300, **KEPT), timeout=60)
        events = aiter(stopped)
        await anext(events)
        # Another waits in the queue with its row in memory.
        waiting = first.Generate(request(FIRST, new=NEW, policy="full", session_id="c2"), timeout=60)
        await anext(aiter(waiting))
        waiting.cancel()
        stopped.cancel()
        accepted, found, _ = await ask(second, ids, **KEPT)
        assert (accepted.resumed_tokens, found) == (len(FIRST) + NEW - 1, expected)
        await until(lambda: idle(one, two), "the rows to be freed")
        accepted, _, _ = await ask(second, FIRST, policy="full", session_id="c2")
        assert accepted.session_id == "c2"


async def test_a_request_that_is_refused_holds_no_session(manager):
    async with workers(manager, 1, session_patience=0) as ((worker, stub),):
        ids, expected = await first_turn(stub)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stub, ids, **KEPT, slots=1)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        accepted, found, _ = await ask(stub, ids, **KEPT)
        assert (bool(accepted.resumed_tokens), found) == (True, expected)
        assert idle(worker)


async def test_a_manager_that_is_killed_during_a_turn(redis_server):
    with ManagerProcess(store_url=redis_server.url, lease=1) as manager:
        async with workers(manager, 1) as ((worker, stub),):
            ids, expected = await first_turn(stub)
            events = aiter(stub.Generate(request(ids, new=NEW, **KEPT), timeout=60))
            await anext(events)
            manager.kill()
            tokens = [token async for event in events for token in event.delta.token_ids]
            assert tokens == expected
            manager.restart()
            await until(lambda: metrics(worker)["scissorhands_worker_manager_up"], "the manager")
            await asyncio.sleep(1.1)  # The turn's lease, unless its end has reached the manager.
            accepted, found, _ = await ask(stub, ids, **KEPT)
            assert (accepted.resumed_tokens, found) == (len(FIRST) + NEW - 1, expected)
            assert idle(worker)


async def test_a_worker_that_is_killed_while_it_suspends(start_manager, redis_server, tmp_path):
    manager = start_manager(store_url=redis_server.url, store_timeout=30, lease=1)
    port = free_port()
    options = ("--manager", manager.address, "--metrics-port", str(port), "--suspend-deadline", "30")
    async with workers(manager, 1) as ((other, stub),):
        ids, expected = await first_turn(stub)
        with worker_process(tmp_path / "worker.log", *options) as (process, address):
            async with grpc.aio.insecure_channel(address) as channel:
                doomed = generation_pb2_grpc.GenerationServiceStub(channel)
                events = aiter(doomed.Generate(request(ids, new=NEW, **KEPT), timeout=60))
                assert (await anext(events)).accepted.resumed_tokens
                redis_server.pause()
                tokens = []
                while len(tokens) < NEW:
                    tokens += (await anext(events)).delta.token_ids
                await until(lambda: metrics(port)[HELD] > 0, "the row to be on its way")
                process.kill()
                with pytest.raises(grpc.aio.AioRpcError):
                    await anext(events)
        redis_server.resume()
        await asyncio.sleep(1.1)
        assert tokens == expected
        accepted, found, _ = await ask(stub, ids, **KEPT)
        assert (accepted.resumed_tokens, found) == (len(FIRST) + NEW - 1, expected)
        assert idle(other)
