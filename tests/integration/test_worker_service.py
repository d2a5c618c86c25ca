"""A worker on its own: what it answers, what it refuses, and what is left when a request has ended."""

import asyncio
import math
import random
import subprocess
import urllib.request

import grpc
import pytest
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.tiny_worker import EOS, POSITIONS, collect, metrics, request, tiny_loaded, tiny_worker

from scissorhands.budget import BudgetRequest
from scissorhands.budgeted import BudgetedCache
from scissorhands.grant import PolicyRequest
from scissorhands.v1 import budget_pb2, generation_pb2
from scissorhands_server.worker.sampling import Sampler

GAUGES = (
    *("rows", "queue_requests", "cache_slots", "cache_budget_slots", "cache_allocated_bytes", "cache_packed_bytes"),
    *("cache_full_bytes", "cache_full_16bit_bytes"),
)
POLICIES = (
    *("scissorhands", "scissorhands:paper", "h2o", "tova", "snapkv", "streaming"),
    *("r-kv", "fastgen", "expected-attention", "protected:h2o", "merged:h2o"),
)


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}-{index}").randrange(3, 250) for index in range(length)]


def in_process(tokens: list[int], slots: int, policy: str, new: int) -> list[int]:
    """Generate with transformers and our cache, without any service."""
    model = tiny_loaded().model
    name, _, preset = policy.partition(":")
    cache = BudgetedCache(model, BudgetRequest.tokens(slots), PolicyRequest(name, preset))
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(tokens) :].tolist()


async def wait_for_idle(worker) -> dict[str, float]:
    """Return the metrics once every gauge is back to zero; fail if that takes too long."""
    for _ in range(250):
        found = metrics(worker)
        if all(found[f"scissorhands_worker_{gauge}"] == 0 for gauge in GAUGES):
            return found
        await asyncio.sleep(0.02)
    pytest.fail(f"gauges are not back to zero: { ({g: found[f'scissorhands_worker_{g}'] for g in GAUGES}) }")


@pytest.mark.parametrize("policy", POLICIES)
async def test_tokens_are_those_of_the_core_in_process(policy):
    tokens = prompt(150, seed=1)
    async with tiny_worker() as (_, stub):
        served, _, last = await collect(stub.Generate(request(tokens, slots=40, policy=policy, new=60)))
    assert last.finish.cache.evictions > 3
    assert served == in_process(tokens, 40, policy, 60)


async def test_rows_that_step_together_answer_as_if_alone():
    jobs = [
        (prompt(30 + 25 * index, seed=index), 24 + 8 * index, POLICIES[index % len(POLICIES)], 40 + 7 * index)
        for index in range(6)
    ]
    # Equal budgets and policies share a pool, so that rows of a pool leave at different times.
    jobs += [(prompt(90, seed=50 + index), 32, "h2o", 20 + 15 * index) for index in range(4)]
    async with tiny_worker(rows=4) as (_, stub):
        calls = [
            collect(stub.Generate(request(tokens, slots=slots, policy=policy, new=new)))
            for tokens, slots, policy, new in jobs
        ]
        together = [tokens for tokens, _, _ in await asyncio.gather(*calls)]
    assert together == [in_process(*job) for job in jobs]


async def test_final_message_counts_what_happened():
    tokens = prompt(100, seed=3)
    async with tiny_worker() as (worker, stub):
        events = [event async for event in stub.Generate(request(tokens, slots=32, new=30))]
        found = await wait_for_idle(worker)
    accepted, finish = events[0].accepted, events[-1].finish
    assert accepted.prompt_tokens == finish.usage.prompt_tokens == 100
    assert finish.usage.generated_tokens == 30
    assert [event.prefill.done for event in events if event.HasField("prefill")][-1] == 100
    assert list(accepted.grant.layer_slots) == [32, 32]
    assert accepted.grant.source == budget_pb2.GRANT_SOURCE_LOCAL
    # 2 layers, 2 KV heads, head_dim 8, float32: 64 bytes for key and value, 10 for evidence.
    assert finish.cache.allocated_bytes == accepted.grant.bytes == 32 * 2 * 2 * (64 + 8)
    assert finish.cache.full_bytes == 130 * 2 * 2 * 64
    assert finish.cache.full_16bit_bytes == 130 * 2 * 2 * 32
    assert finish.cache.plans_local == finish.cache.evictions > 0
    assert 0 < finish.cache.mass_dropped < 1
    assert found["scissorhands_worker_evicted_slots_total"] == finish.cache.evicted_slots
    assert found["scissorhands_worker_prompt_tokens_total"] == 100
    assert found["scissorhands_worker_generated_tokens_total"] == 30
    assert found['scissorhands_worker_requests_total{model_name="tiny",result="length"}'] == 1
    dropped = (
        found["scissorhands_worker_attention_mass_dropped_total"] / found["scissorhands_worker_attention_mass_total"]
    )
    assert dropped == pytest.approx(finish.cache.mass_dropped, rel=1e-6)


async def test_allocated_bytes_are_the_budget_at_every_step():
    async with tiny_worker(rows=3) as (worker, stub):
        calls = [
            asyncio.ensure_future(collect(stub.Generate(request(prompt(60, s), slots=24 + s, new=80))))
            for s in range(3)
        ]
        seen = set()
        while not all(call.done() for call in calls):
            rows = list(worker.cache.rows)
            seen.add((worker.cache.allocated_bytes(), sum(row.grant.bytes for row in rows)) if rows else (0, 0))
            await asyncio.sleep(0.001)
        await asyncio.gather(*calls)
        assert worker.cache.allocated_bytes() == 0
    largest = sum((24 + s) * 2 * 2 * (64 + 8) for s in range(3))
    assert max(allocated for allocated, _ in seen) == largest


async def test_budget_fraction_is_of_prompt_and_answer():
    message = request(prompt(100, 1), new=100)
    message.budget.fraction = 0.25
    async with tiny_worker() as (_, stub):
        first = await stub.Generate(message).read()
    assert list(first.accepted.grant.layer_slots) == [50, 50]
    assert not first.accepted.grant.raised


async def test_stop_string_eos_and_seed():
    tokens = prompt(20, seed=9)
    sampling = generation_pb2.Sampling(temperature=1.0, seed=5, top_k=50)
    async with tiny_worker() as (_, stub):
        ids, text, _ = await collect(stub.Generate(request(tokens, new=60, sampling=sampling)))
        again, _, _ = await collect(stub.Generate(request(tokens, new=60, sampling=sampling)))
        assert again == ids
        stop = text[10:14]
        _, stopped, last = await collect(stub.Generate(request(tokens, new=60, sampling=sampling, stop=[stop])))
        assert stopped == text[: text.index(stop)]
        assert last.finish.reason == generation_pb2.FINISH_REASON_STOP
        assert last.finish.stop == stop
        # Among many sampled answers, one meets the end-of-sequence token.
        for seed in range(200):
            message = request(tokens, new=60, sampling=generation_pb2.Sampling(temperature=5.0, seed=seed))
            message.ignore_eos = False
            ids, _, last = await collect(stub.Generate(message))
            if last.finish.reason == generation_pb2.FINISH_REASON_EOS:
                assert ids[-1] == EOS
                assert ids.count(EOS) == 1
                break
        else:
            pytest.fail("no answer ended with the end-of-sequence token")


BAD = {
    "prompt": generation_pb2.GenerateRequest(),
    "text": generation_pb2.GenerateRequest(text=""),
    "tokens.ids": request([]),
    "tokens.ids[1]": request([5, 100_000]),
    "tokens": request([5] * POSITIONS),
    "max_new_tokens": request([5] * 10, new=POSITIONS),
    "budget.tokens": request([5] * 100, slots=3),
    "budget.amount": request([5] * 100, budget=budget_pb2.Budget()),
    "budget.fraction": request([5], budget=budget_pb2.Budget(fraction=float("nan"))),
    "budget.bytes": request([5] * 100, budget=budget_pb2.Budget(bytes=500)),
    "budget": request([5] * 100, policy="full", slots=20),
    "policy.name": request([5], policy="lru"),
    "policy.preset": request([5], policy="h2o:paper"),
    "policy.parameters.decay": generation_pb2.GenerateRequest(
        text="hi", policy=budget_pb2.Policy(name="h2o", parameters={"decay": 3})
    ),
    "sampling.temperature": request([5], sampling=generation_pb2.Sampling(temperature=float("inf"))),
    "sampling.top_p": request([5], sampling=generation_pb2.Sampling(temperature=1, top_p=0)),
    "sampling.top_k": request([5], sampling=generation_pb2.Sampling(temperature=1, top_k=1_000_000)),
    "sampling.repetition_penalty": request([5], sampling=generation_pb2.Sampling(repetition_penalty=-1)),
    "stop[0]": request([5], stop=[""]),
    "chat": generation_pb2.GenerateRequest(
        chat=generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    ),
}


@pytest.mark.parametrize("field", BAD)
async def test_bad_input_names_the_field_and_loses_nothing(field):
    async with tiny_worker() as (worker, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(BAD[field]))
        status = rpc_status.from_call(caught.value)
        violations = error_details_pb2.BadRequest()
        assert any(detail.Unpack(violations) for detail in status.details)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violations.field_violations[0].field == field
        assert len(violations.field_violations[0].description) > 10
        found = await wait_for_idle(worker)
        assert found['scissorhands_worker_requests_total{model_name="tiny",result="refused"}'] == 1


async def test_unknown_model_is_not_found():
    async with tiny_worker() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request([5], model="gpt-5")))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "tiny" in caught.value.details()


async def test_full_queue_is_refused_with_a_time_to_retry():
    async with tiny_worker(rows=1, queue=1) as (worker, stub):
        running = stub.Generate(request(prompt(10, 1), new=POSITIONS - 10))
        await running.read()
        while metrics(worker)["scissorhands_worker_rows"] == 0:
            await asyncio.sleep(0.01)
        queued = stub.Generate(request(prompt(10, 2), new=5))
        queued_events = aiter(queued)
        assert (await anext(queued_events)).accepted.queued_ahead == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request(prompt(10, 3), new=5)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in rpc_status.from_call(caught.value).details)
        assert retry.retry_delay.ToMilliseconds() > 0
        running.cancel()
        tokens, _, _ = await collect(queued_events)
        assert len(tokens) == 5
        found = await wait_for_idle(worker)
        assert found['scissorhands_worker_requests_total{model_name="tiny",result="overloaded"}'] == 1


async def test_fifty_cancelled_streams_leave_nothing():
    async with tiny_worker(rows=4, queue=64) as (worker, stub):
        calls = [stub.Generate(request(prompt(40, index), slots=24, new=400)) for index in range(50)]
        for index, call in enumerate(calls):
            await call.read()
            if index % 3 == 0:
                call.cancel()
        await asyncio.sleep(0.1)
        for call in calls:
            call.cancel()
        found = await wait_for_idle(worker)
        assert worker.cache.rows == []
        assert found['scissorhands_worker_requests_total{model_name="tiny",result="cancelled"}'] == 50
        tokens, _, _ = await collect(stub.Generate(request(prompt(10, 1), new=5)))
        assert len(tokens) == 5


async def test_a_failing_request_ends_alone(monkeypatch):
    """Once in choosing a token, once inside the forward pass of a batch; the others' tokens do not change."""
    good = [(prompt(60, seed=index), 30, "scissorhands", 80) for index in range(3)]
    bad = prompt(30, seed=99)
    poison = 251
    chosen = Sampler.next
    steps = 0

    def next_token(self, logits, ids):
        nonlocal steps
        if ids[: len(bad)] == bad:
            steps += 1
            if steps == 10:
                return poison
        return chosen(self, logits, ids)

    monkeypatch.setattr(Sampler, "next", next_token)
    layer = tiny_loaded().model.model.layers[1]

    def fail_on_poison(module, arguments):
        del module, arguments
        if bool((embedded == poison).any()):
            raise RuntimeError("injected")

    embedded = torch.zeros(1)

    def remember(module, arguments):
        nonlocal embedded
        del module
        embedded = arguments[0]

    hooks = [
        tiny_loaded().model.model.embed_tokens.register_forward_pre_hook(remember),
        layer.register_forward_pre_hook(fail_on_poison),
    ]
    try:
        async with tiny_worker(rows=4) as (worker, stub):
            calls = [
                asyncio.ensure_future(collect(stub.Generate(request(t, slots=s, policy=p, new=n))))
                for t, s, p, n in good
            ]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stub.Generate(request(bad, slots=24, new=40)))
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            served = [tokens for tokens, _, _ in await asyncio.gather(*calls)]
            found = await wait_for_idle(worker)
            assert found['scissorhands_worker_requests_total{model_name="tiny",result="error"}'] == 1
    finally:
        for hook in hooks:
            hook.remove()
    monkeypatch.undo()
    assert served == [in_process(*job) for job in good]


async def test_every_series_is_there_at_zero_and_promtool_is_content():
    async with tiny_worker() as (worker, _):
        found = metrics(worker)
        body = urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/metrics").read()
    ours = {series: value for series, value in found.items() if series.startswith("scissorhands_worker_")}
    capacities = {"scissorhands_worker_rows_capacity", "scissorhands_worker_queue_capacity_requests"}
    # Without TLS no certificate ever ends.
    assert ours.pop("scissorhands_worker_certificate_left_seconds") == math.inf
    assert {series for series, value in ours.items() if value} == capacities
    checked = subprocess.run(["promtool", "check", "metrics"], check=False, input=body, capture_output=True, timeout=30)
    assert checked.returncode == 0, checked.stderr.decode()
    assert checked.stderr == b""


async def test_get_model_describes_the_worker():
    async with tiny_worker(rows=3, queue=7) as (_, stub):
        described = await stub.GetModel(generation_pb2.GetModelRequest())
    assert described.model.name == "tiny"
    assert (described.model.layers, described.model.kv_heads, described.model.head_dim) == (2, 2, 8)
    assert (described.max_rows, described.max_queued) == (3, 7)
    assert "scissorhands:paper" in described.policies
    assert not described.chat
    assert not described.manager_connected
