"""How many rows run at once within a bound of bytes, and how their prompts are read between tokens."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.tiny_models import random_tokens
from support.tiny_worker import collect, metrics, request, settings, tiny_worker
from support.waiting import until

from scissorhands.v1 import generation_pb2


def prompt(count, seed):
    return random_tokens(count, seed=seed).tolist()


async def row_bytes(stub, message):
    """Return the bytes that are granted to a request."""
    events = aiter(stub.Generate(message))
    granted = (await anext(events)).accepted.grant.bytes
    await collect(events)
    return granted


@pytest.mark.parametrize("codec", ["none", "int4"])
async def test_as_many_rows_run_as_the_bytes_hold_and_no_more(codec):
    def message(seed, **more):
        return request(prompt(40, seed), slots=32, policy="h2o", resident_codec=codec, **({"new": 120} | more))

    async with tiny_worker() as (_, stub):
        size = await row_bytes(stub, message(0, new=1))
    async with tiny_worker(cache_bytes=5 * size + size // 2, queue=64) as (worker, stub):
        described = await stub.GetModel(generation_pb2.GetModelRequest())
        assert (described.max_rows, described.cache_bytes) == (1024, 5 * size + size // 2)
        answers = [asyncio.create_task(collect(stub.Generate(message(seed), timeout=60))) for seed in range(12)]
        await until(lambda: metrics(worker)["scissorhands_worker_rows"] == 5, "five rows")
        most = 0
        while not all(answer.done() for answer in answers):
            rows = metrics(worker)
            most = max(most, rows["scissorhands_worker_cache_allocated_bytes"])
            # What was granted is what is allocated, to the byte.
            assert rows["scissorhands_worker_cache_allocated_bytes"] % size == 0
            await asyncio.sleep(0.01)
        assert most == 5 * size
        tokens = [(await answer)[0] for answer in answers]
        assert metrics(worker)["scissorhands_worker_more_rows"] == 5
        assert (await stub.GetModel(generation_pb2.GetModelRequest())).more_rows == 5
        alone, _, _ = await collect(stub.Generate(message(7)))
        assert tokens[7] == alone


async def test_a_row_that_can_never_fit_is_refused_and_told_why():
    async with tiny_worker(cache_bytes=50_000) as (worker, stub):
        call = stub.Generate(request(prompt(200, 1), new=100, policy="full"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        bad = error_details_pb2.BadRequest()
        assert any(detail.Unpack(bad) for detail in rpc_status.from_call(caught.value).details)
        assert [violation.field for violation in bad.field_violations] == ["budget"]
        assert "50000 in all" in bad.field_violations[0].description
        tokens, _, _ = await collect(stub.Generate(request(prompt(200, 1), new=30, slots=32, policy="h2o")))
        assert len(tokens) == 30
        assert metrics(worker)["scissorhands_worker_cache_allocated_bytes"] == 0


async def test_small_rows_make_room_for_a_large_urgent_one():
    low = generation_pb2.PRIORITY_LOW
    async with tiny_worker() as (_, stub):
        size = await row_bytes(stub, request(prompt(40, 0), slots=32, policy="h2o", new=1))
    async with tiny_worker(cache_bytes=4 * size) as (worker, stub):
        messages = [request(prompt(40, seed), slots=32, policy="h2o", new=150, priority=low) for seed in range(4)]
        alone = [(await collect(stub.Generate(message)))[0] for message in messages]
        answers = [asyncio.create_task(collect(stub.Generate(message, timeout=60))) for message in messages]
        await until(lambda: metrics(worker)["scissorhands_worker_rows"] == 4, "four rows")
        urgent = request(prompt(50, 9), slots=80, policy="h2o", new=60, priority=generation_pb2.PRIORITY_HIGH)
        assert len((await collect(stub.Generate(urgent, timeout=60)))[0]) == 60
        assert [(await answer)[0] for answer in answers] == alone
        found = metrics(worker)
        assert found['scissorhands_worker_preemptions_total{reason="bytes",result="put_away"}'] == 3


def test_without_a_bound_of_bytes_the_rows_are_as_many_as_ever():
    assert settings().most_rows == 4
    assert settings(rows=7).most_rows == 7
    assert settings(cache_bytes=1 << 20).most_rows == 1024
    assert settings(cache_bytes=1 << 20, rows=7).most_rows == 7


def test_a_step_reads_less_on_a_cpu():
    assert settings().tokens_of_step("cpu") == 32
    assert settings().tokens_of_step("cuda") == 512
    assert settings(step_tokens=7).tokens_of_step("cuda") == 7


@pytest.mark.parametrize("step_tokens", [1, 16, 4096])
async def test_whatever_a_step_may_read_the_answers_are_the_same(step_tokens):
    messages = [
        request(prompt(length, seed), slots=slots, policy="h2o", new=40)
        for seed, (length, slots) in enumerate([(30, 24), (300, 48), (120, 100), (7, 24), (64, 40)])
    ]
    async with tiny_worker(rows=1) as (_, stub):
        alone = [(await collect(stub.Generate(message)))[0] for message in messages]
    async with tiny_worker(rows=5, step_tokens=step_tokens) as (_, stub):
        together = await asyncio.gather(*(collect(stub.Generate(message, timeout=60)) for message in messages))
    assert [tokens for tokens, _, _ in together] == alone


async def test_a_long_prompt_neither_holds_up_tokens_nor_a_short_prompt():
    """A chunk of 8 tokens at most is read between two tokens; so much is counted, not timed."""
    policy = {"slots": 32, "policy": "h2o"}
    async with tiny_worker(rows=3, step_tokens=8) as (worker, stub):
        running = stub.Generate(request(prompt(10, 1), new=480, **policy), timeout=60)
        while not (await running.read()).delta.token_ids:
            pass
        long = stub.Generate(request(prompt(450, 2), new=2, **policy), timeout=60)
        while not (await long.read()).prefill.done:
            pass
        tokens, _, _ = await collect(stub.Generate(request(prompt(10, 3), new=2, **policy), timeout=60))
        assert len(tokens) == 2
        # The short one was done while the long one was being read, and tokens came all the while.
        read = metrics(worker)["scissorhands_worker_prompt_tokens_total"]
        generated = metrics(worker)["scissorhands_worker_generated_tokens_total"]
        assert read < 460
        assert generated >= read // 8
        running.cancel()
        long.cancel()


async def test_a_priority_that_is_none_is_refused():
    async with tiny_worker() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="PRIORITY_HIGH") as caught:
            await collect(stub.Generate(request(prompt(5, 1), new=1, priority=9)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
