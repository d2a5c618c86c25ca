"""Rows that make room for more urgent requests, and go on exactly where they were; with a manager and a store, and
without."""

import asyncio
import contextlib

import grpc
import pytest
from support.conversations import FIRST, SECOND, workers
from support.tiny_models import random_tokens
from support.tiny_worker import collect, metrics, request, tiny_worker
from support.waiting import until

from scissorhands.v1 import generation_pb2

LOW, NORMAL, HIGH = (
    generation_pb2.PRIORITY_LOW,
    generation_pb2.PRIORITY_NORMAL,
    generation_pb2.PRIORITY_HIGH,
)
# Long enough to be in the middle of it when others come.
NEW = 160
# Takes the worker's only row, every time.
URGENT = [random_tokens(20, seed=50 + index).tolist() for index in range(3)]
PREEMPTED = 'scissorhands_worker_preemptions_total{reason="rows",result="put_away"}'
REFUSED = 'scissorhands_worker_preemptions_total{reason="rows",result="no_memory"}'
HELD = "scissorhands_worker_suspension_held_bytes"


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url)


async def interrupted(worker, stub, message, urgent=URGENT):
    """Return the tokens and the end of an answer in whose way others come, as often as there are ``urgent``."""
    call = stub.Generate(message, timeout=60)
    tokens = []
    coming = list(urgent)
    async for event in call:
        tokens += event.delta.token_ids
        last = event
        if coming and len(tokens) >= 12 * (len(urgent) - len(coming)) + 3:
            put_away = metrics(worker)[PREEMPTED]
            others, _, end = await collect(
                stub.Generate(request(coming.pop(), new=6, slots=30, policy="h2o", priority=HIGH), timeout=60)
            )
            assert (len(others), end.finish.reason) == (6, generation_pb2.FINISH_REASON_LENGTH)
            assert metrics(worker)[PREEMPTED] == put_away + 1
    assert not coming
    return tokens, last.finish


@pytest.mark.parametrize(
    ("policy", "slots", "codec"),
    [
        ("full", 0, ""),
        ("scissorhands:counts", 40, ""),
        ("h2o", 40, "int8"),
        ("tova", 36, ""),
        ("snapkv", 40, "turboquant:k4v3"),
    ],
)
async def test_an_answer_that_was_put_away_says_what_it_would_have_said(policy, slots, codec):
    more = {"slots": slots, "policy": policy, "new": NEW, "resident_codec": codec}
    async with tiny_worker(rows=1) as (worker, stub):
        alone, _, _ = await collect(stub.Generate(request(FIRST, **more)))
        tokens, finish = await interrupted(worker, stub, request(FIRST, **more))
        assert tokens == alone
        assert finish.usage.generated_tokens == NEW
        found = metrics(worker)
        assert found[PREEMPTED] == len(URGENT)
        assert found["scissorhands_worker_preempted_seconds_count"] == len(URGENT)
        assert found["scissorhands_worker_preempted_rows"] == found[HELD] == 0
        assert found["scissorhands_worker_prompt_tokens_total"] == 2 * len(FIRST) + sum(map(len, URGENT))


async def test_it_does_with_a_manager_that_plans_and_a_session_that_is_kept(manager):
    more = {"slots": 40, "policy": "h2o", "new": NEW}
    async with workers(manager, rows=1) as ((one, first), (_, second)):
        await until(lambda: metrics(one)["scissorhands_worker_manager_up"], "the manager")
        alone, _, _ = await collect(second.Generate(request(FIRST, session_id="alone", **more)))
        tokens, _ = await interrupted(one, first, request(FIRST, session_id="c1", **more))
        assert tokens == alone
        # What it leaves for its next turn is what it would have left, too.
        ids = [*FIRST, *tokens, *SECOND]
        later = {}
        for name in ("alone", "c1"):
            events = aiter(second.Generate(request(ids, session_id=name, **(more | {"new": 20}))))
            accepted = (await anext(events)).accepted
            assert accepted.resumed_tokens == len(FIRST) + NEW - 1
            later[name], _, _ = await collect(events)
        assert later["c1"] == later["alone"]
        await until(lambda: metrics(one)[HELD] == 0, "the rows to be in the store")


async def test_a_prompt_that_was_put_away_half_read_is_read_on(manager):
    prompt = random_tokens(400, seed=9).tolist()
    more = {"slots": 48, "policy": "h2o", "new": 20}
    async with workers(manager, 1, rows=1, prefix_tokens=0) as ((worker, stub),):
        alone, _, _ = await collect(stub.Generate(request(prompt, **more)))
        read = metrics(worker)["scissorhands_worker_prompt_tokens_total"]
        call = stub.Generate(request(prompt, priority=LOW, **more), timeout=60)
        tokens, came = [], False
        async for event in call:
            tokens += event.delta.token_ids
            if event.prefill.done and not came:
                came = True
                await collect(stub.Generate(request(URGENT[0], new=3, policy="full", priority=NORMAL), timeout=60))
                assert metrics(worker)[PREEMPTED] == 1
        assert tokens == alone
        # Nothing was read twice.
        assert metrics(worker)["scissorhands_worker_prompt_tokens_total"] == read + len(prompt) + len(URGENT[0])


async def test_a_row_without_room_on_the_host_stays_and_the_urgent_one_waits():
    async with tiny_worker(rows=1, suspend_bytes=1000) as (worker, stub):
        events = aiter(stub.Generate(request(FIRST, new=NEW, policy="full", priority=LOW), timeout=60))
        while not (await anext(events)).delta.token_ids:
            pass
        urgent = asyncio.create_task(collect(stub.Generate(request(URGENT[0], new=3, priority=HIGH), timeout=60)))
        tokens, _, _ = await collect(events)
        assert len(tokens) == NEW - 1
        assert len((await urgent)[0]) == 3
        found = metrics(worker)
        assert found[REFUSED] >= 1
        assert found[PREEMPTED] == found[HELD] == 0


async def test_a_row_that_had_to_stay_is_put_away_once_there_is_memory():
    """Of two rows the host has room for one; when its stream goes away, the other makes room too."""
    more = {"slots": 40, "policy": "h2o", "priority": LOW}
    async with tiny_worker(rows=2, suspend_bytes=20_000) as (worker, stub):
        alone, _, _ = await collect(stub.Generate(request(FIRST, new=440, **more), timeout=60))
        first = stub.Generate(request(FIRST, new=440, **more), timeout=60)
        tokens = list((await anext(event async for event in first if event.delta.token_ids)).delta.token_ids)
        second = stub.Generate(request(FIRST, new=440, **more), timeout=60)
        await anext(event async for event in second if event.delta.token_ids)
        urgent = stub.Generate(request(URGENT[0], new=450, priority=HIGH), timeout=60)
        await urgent.read()
        await until(lambda: metrics(worker)[PREEMPTED] == 1, "a row to be put away")
        assert 10_000 < metrics(worker)[HELD] < 20_000
        other = asyncio.create_task(collect(stub.Generate(request(URGENT[1], new=3, priority=HIGH), timeout=60)))
        await until(lambda: metrics(worker)[REFUSED] >= 1, "the other to be refused")
        second.cancel()
        assert len((await other)[0]) == 3
        assert metrics(worker)[PREEMPTED] == 2
        async for event in first:
            tokens += event.delta.token_ids
        assert tokens == alone
        urgent.cancel()
        await until(lambda: metrics(worker)["scissorhands_worker_rows"] == 0, "the worker to be idle")
        assert metrics(worker)[HELD] == 0


async def test_a_stream_that_goes_away_while_its_row_is_put_away_leaves_nothing():
    async with tiny_worker(rows=1) as (worker, stub):
        call = stub.Generate(request(FIRST, new=NEW, policy="full", priority=LOW), timeout=60)
        while not (await call.read()).delta.token_ids:
            pass
        urgent = stub.Generate(request(URGENT[0], new=400, priority=HIGH), timeout=60)
        await urgent.read()
        await until(lambda: metrics(worker)["scissorhands_worker_preempted_rows"] == 1, "a row to be put away")
        assert metrics(worker)[HELD] > 0
        call.cancel()
        await until(lambda: metrics(worker)["scissorhands_worker_preempted_rows"] == 0, "the row to be dropped")
        assert metrics(worker)[HELD] == 0
        urgent.cancel()
        await until(lambda: metrics(worker)["scissorhands_worker_rows"] == 0, "the worker to be idle")
        assert worker.cache.rows == []


async def test_a_worker_that_ends_keeps_the_row_of_a_session_that_is_put_away(manager):
    more = {"slots": 40, "policy": "h2o"}
    async with workers(manager, rows=1) as ((one, first), (_, second)):
        call = first.Generate(request(FIRST, new=NEW, priority=LOW, session_id="c1", **more), timeout=60)
        tokens = []
        while len(tokens) < 10:
            tokens += (await call.read()).delta.token_ids
        urgent = first.Generate(request(URGENT[0], new=400, priority=HIGH), timeout=60)
        await urgent.read()
        await until(lambda: metrics(one)["scissorhands_worker_preempted_rows"] == 1, "a row to be put away")
        draining = asyncio.create_task(one.drain())
        with contextlib.suppress(grpc.aio.AioRpcError):
            while event := await call.read():
                tokens += event.delta.token_ids
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await draining
        events = aiter(second.Generate(request([*FIRST, *tokens], new=5, session_id="c1", **more), timeout=60))
        assert (await anext(events)).accepted.resumed_tokens == len(FIRST) + len(tokens) - 1
        assert len((await collect(events))[0]) == 5
