"""Metrics are true: after a run whose counts are known they are equal to them, and no series depends on who asks."""

import asyncio

import grpc
import pytest
from support.manager_data import fetch, opened, spec
from support.processes import ManagerProcess
from support.tiny_models import random_tokens
from support.tiny_worker import collect, metrics, request, tiny_loaded, tiny_worker
from support.waiting import until

from scissorhands.budget import BudgetRequest
from scissorhands.budgeted import BudgetedCache
from scissorhands.grant import PolicyRequest
from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc

SLOTS = 64
# Prompt and answer of each request, in tokens: none evicts, one decodes and evicts, one evicts while it reads.
SIZES = ((30, 20), (90, 60), (150, 9))


@pytest.fixture(scope="module")
def manager():
    with ManagerProcess() as running:
        yield running


def evictions(prompt: int, new: int) -> int:
    """Return how often transformers' own loop evicts with the library's cache; the last token is never read."""
    model = tiny_loaded().model
    ids = random_tokens(prompt, seed=prompt).unsqueeze(0)
    cache = BudgetedCache(model, BudgetRequest.tokens(SLOTS), PolicyRequest("h2o"))
    model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        cache=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )
    return cache.rows[0].epoch


def total(series: dict[str, float], name: str, *having: str) -> float:
    """Return the sum of a family's series that have some labels."""
    return sum(
        value
        for key, value in series.items()
        if key.partition("{")[0] == f"scissorhands_{name}" and all(label in key for label in having)
    )


async def test_counts_are_those_of_the_run(manager):
    before = {name: manager.metric(name) for name in ("segments_stored_total", "segment_bytes_stored_total")}
    async with (
        tiny_worker(manager=manager.address, rows=1) as (worker, stub),
        grpc.aio.insecure_channel(manager.address) as channel,
    ):
        finished, stored = [], 0
        for prompt, new in SIZES:
            ids = random_tokens(prompt, seed=prompt).tolist()
            call = stub.Generate(request(ids, slots=SLOTS, new=new, policy="h2o"))
            session = (await anext(aiter(call))).accepted.session_id
            tokens, _, last = await collect(call)
            assert len(tokens) == new
            finished.append(last.finish)
            found = await fetch(cache_manager_pb2_grpc.CacheManagerServiceStub(channel), session)
            stored += sum(map(len, found.values()))
        # Too long for the model, and one that leaves before it gets a row.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(stub.Generate(request([5] * 30, slots=SLOTS, new=10_000)))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        first = stub.Generate(request([5] * 30, slots=SLOTS, new=450, policy="h2o"))
        await anext(aiter(first))
        waiting = stub.Generate(request([6] * 30, slots=SLOTS, new=20, policy="h2o"))
        assert (await anext(aiter(waiting))).HasField("accepted")
        waiting.cancel()
        await until(lambda: total(metrics(worker), "worker_requests_total", 'result="cancelled"') == 1, "its end")
        _, _, last = await collect(first)
        finished.append(last.finish)
        series = metrics(worker)

    sizes = (*SIZES, (30, 450))
    counts = {
        'requests_total{model_name="tiny",result="length"}': len(sizes),
        'requests_total{model_name="tiny",result="refused"}': 1,
        'requests_total{model_name="tiny",result="cancelled"}': 1,
        'requests_total{model_name="tiny",result="error"}': 0,
        "prompt_tokens_total": sum(prompt for prompt, _ in sizes),
        "generated_tokens_total": sum(new for _, new in sizes),
        "time_to_first_token_seconds_count": len(sizes),
        "inter_token_latency_seconds_count": sum(new - 1 for _, new in sizes),
        "evicted_slots_total": sum(finish.cache.evicted_slots for finish in finished),
        'segments_total{result="offloaded"}': sum(finish.cache.segments for finish in finished),
        'segments_total{result="dropped"}': 0,
        "rows": 0,
        "queue_requests": 0,
        "cache_slots": 0,
        "cache_allocated_bytes": 0,
    }
    assert {name: series[f"scissorhands_worker_{name}"] for name in counts} == counts
    per_row = [finish.cache.evictions for finish in finished]
    assert per_row[:3] == [evictions(*size) for size in SIZES]
    assert per_row[0] == 0 < min(per_row[1:])
    assert total(series, "worker_evictions_total", 'policy="h2o"') == sum(per_row)
    assert total(series, "worker_evictions_total") == total(series, "worker_plans_total") == sum(per_row)
    by_manager = sum(finish.cache.plans_manager for finish in finished)
    assert total(series, "worker_plans_total", 'source="manager"') == by_manager > 0
    offloaded = series['scissorhands_worker_segment_bytes_total{result="offloaded"}']
    assert manager.metric("segments_stored_total") - before["segments_stored_total"] == sum(per_row)
    assert manager.metric("segment_bytes_stored_total") - before["segment_bytes_stored_total"] == offloaded > stored > 0


async def test_a_thousand_sessions_make_no_series(manager):
    async with grpc.aio.insecure_channel(manager.address) as channel:
        stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
        before = set(metrics(manager.metrics_port))
        granted = metrics(manager.metrics_port)['scissorhands_manager_grants_total{result="granted"}']
        for index in range(1000):
            await opened(stub, spec(f"many-{index}"))
        after = metrics(manager.metrics_port)
        assert set(after) == before
        assert after['scissorhands_manager_grants_total{result="granted"}'] - granted == 1000
        for index in range(1000):
            await stub.CloseSession(cache_manager_pb2.CloseSessionRequest(session_id=f"many-{index}"), timeout=10)
        assert set(metrics(manager.metrics_port)) == before


async def test_many_requests_make_no_series_of_a_worker():
    async with tiny_worker(rows=4, queue=64) as (worker, stub):
        before = set(metrics(worker))
        prompts = [random_tokens(5 + index % 7, seed=index).tolist() for index in range(60)]
        ended = await asyncio.gather(*(collect(stub.Generate(request(ids, new=3))) for ids in prompts))
        assert all(len(tokens) == 3 for tokens, _, _ in ended)
        assert set(metrics(worker)) == before
