"""What a worker tells of the cost of eviction: its estimates, and the comparison with a full cache."""

import asyncio
import random

import grpc
import pytest
import torch
from support.processes import ManagerProcess
from support.tiny_worker import collect, metrics, request, tiny_folder, tiny_loaded, tiny_worker
from support.waiting import until
from transformers import AutoModelForCausalLM

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.divergence import divergence
from scissorhands.grant import PolicyRequest, grant
from scissorhands.probe import model_shape
from scissorhands.step import ModelStep
from scissorhands.v1 import cache_manager_pb2, cache_manager_pb2_grpc, quality_pb2

MEASURED = quality_pb2.SHADOW_RESULT_MEASURED
PREFIX = "scissorhands_worker_"


def random_prompt(length: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}-{index}").randrange(3, 250) for index in range(length)]


def shadows(found: dict[str, float]) -> dict[str, float]:
    """Return how many shadows ended in which way."""
    name = f'{PREFIX}shadows_total{{result="'
    return {series[len(name) : -2]: value for series, value in found.items() if series.startswith(name) and value}


def full_logits(prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return transformers' own logits, with its own attention and without any cache, at each token of the answer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]


def budget_logits(prompt: list[int], answer: list[int], slots: int) -> torch.Tensor:
    """Return the logits at each token of the answer under a budget, teacher-forced through the core."""
    model = tiny_loaded().model
    shape = model_shape(model)
    cache, step = ResidentCache(shape, model.dtype, model.device), ModelStep(model)
    row = cache.add_row(grant(BudgetRequest.tokens(slots), PolicyRequest("h2o"), shape), limit=10**6)
    with torch.inference_mode():
        while row.step < len(prompt):
            tokens = row.next_chunk(len(prompt) - row.step)
            cache.prepare_prefill(row, tokens)
            logits = step([row], [prompt[row.step : row.step + tokens]])
        found = [logits[0]]
        for token in answer[:-1]:
            cache.prepare_decode(row)
            found.append(step([row], [[token]])[0])
    return torch.stack(found)


@pytest.mark.parametrize(("length", "slots"), [(90, 40), (20, 48)], ids=["evicts in prefill", "evicts in decoding"])
async def test_the_divergence_is_that_from_transformers_own_attention(length, slots):
    prompt = random_prompt(length, seed=1)
    async with tiny_worker() as (worker, stub):
        call = stub.Generate(request(prompt, slots=slots, policy="h2o", new=70, shadow=True))
        answer, _, last = await collect(call)
        found = metrics(worker)
    quality = last.finish.quality
    nats, same = divergence(budget_logits(prompt, answer, slots), full_logits(prompt, answer))
    assert quality.shadow == MEASURED
    assert quality.divergence.tokens == 70
    assert quality.divergence.nats == pytest.approx(float(nats.mean()), rel=1e-3)
    assert quality.divergence.same_share == pytest.approx(float(same.double().mean()))
    assert quality.divergence.nats > 0.01
    assert quality.divergence.same_share < 1
    assert found[f"{PREFIX}shadow_tokens_total"] == 70
    assert found[f"{PREFIX}shadow_same_tokens_total"] == same.sum()
    assert found[f"{PREFIX}shadow_divergence_nats_total"] == pytest.approx(quality.divergence.nats * 70)
    assert found[f"{PREFIX}shadow_seconds_total"] > 0
    assert found[f"{PREFIX}shadow_reserved_bytes"] == 0
    assert shadows(found) == {"measured": 1}


async def test_what_evicts_nothing_is_a_full_cache():
    prompt = random_prompt(50, seed=2)
    async with tiny_worker() as (worker, stub):
        for options in ({"policy": "full"}, {"slots": 200}):
            _, _, last = await collect(stub.Generate(request(prompt, new=30, shadow=True, **options)))
            assert last.finish.quality.shadow == MEASURED
            assert last.finish.quality.divergence == quality_pb2.Divergence(tokens=30, nats=0, same_share=1)
            assert not last.finish.quality.HasField("recent_mass_dropped")
        found = metrics(worker)
    assert found[f"{PREFIX}shadow_tokens_total"] == 60
    assert found[f"{PREFIX}shadow_divergence_nats_total"] == 0
    assert found[f"{PREFIX}shadow_seconds_total"] == 0


async def test_a_shadow_changes_no_token_and_waits_behind_running_requests():
    jobs = [(random_prompt(80, seed), 32 + seed, 60) for seed in range(4)]

    async def answers(**options):
        async with tiny_worker(rows=2, **options) as (worker, stub):
            calls = [collect(stub.Generate(request(p, slots=s, policy="h2o", new=n))) for p, s, n in jobs]
            ended = await asyncio.gather(*calls)
            return ended, metrics(worker)

    plain, without = await answers()
    compared, found = await answers(shadow_share=1.0, shadow_patience=60)
    assert [tokens for tokens, _, _ in compared] == [tokens for tokens, _, _ in plain]
    assert shadows(without) == {}
    assert shadows(found) == {"measured": 4}
    assert all(last.finish.quality.divergence.tokens == 60 for _, _, last in compared)
    assert all(last.finish.quality.shadow == 0 for _, _, last in plain)


async def test_the_share_is_of_requests_that_do_not_say():
    async with tiny_worker(shadow_share=1.0) as (worker, stub):
        _, _, last = await collect(stub.Generate(request(random_prompt(60, 1), slots=32, new=20, shadow=False)))
        assert last.finish.quality.shadow == quality_pb2.SHADOW_RESULT_UNSPECIFIED
        assert shadows(metrics(worker)) == {}


async def test_a_shadow_that_does_not_fit_is_skipped_and_said_so():
    async with tiny_worker(shadow_bytes=1000) as (worker, stub):
        tokens, _, last = await collect(stub.Generate(request(random_prompt(60, 1), slots=32, new=20, shadow=True)))
        assert len(tokens) == 20
        assert last.finish.quality.shadow == quality_pb2.SHADOW_RESULT_NO_MEMORY
        assert not last.finish.quality.HasField("divergence")
        assert shadows(metrics(worker)) == {"no_memory": 1}


async def test_an_answer_does_not_wait_for_a_late_shadow():
    async with tiny_worker(shadow_patience=0.0) as (worker, stub):
        tokens, _, last = await collect(stub.Generate(request(random_prompt(60, 1), slots=32, new=20, shadow=True)))
        assert len(tokens) == 20
        assert last.finish.quality.shadow == quality_pb2.SHADOW_RESULT_LATE
        found = metrics(worker)
        assert shadows(found) == {"late": 1}
        assert found[f"{PREFIX}shadow_reserved_bytes"] == 0


async def test_a_failing_shadow_costs_the_comparison_and_not_the_answer(monkeypatch):
    whole = ModelStep.scores

    def scores(self, rows, tokens, last):
        if rows[0].grant.policy == "full":
            raise RuntimeError("injected")
        return whole(self, rows, tokens, last)

    monkeypatch.setattr(ModelStep, "scores", scores)
    async with tiny_worker() as (worker, stub):
        tokens, _, last = await collect(stub.Generate(request(random_prompt(60, 1), slots=32, new=40, shadow=True)))
        assert len(tokens) == 40
        assert last.finish.quality.shadow == quality_pb2.SHADOW_RESULT_FAILED
        assert shadows(metrics(worker)) == {"failed": 1}


@pytest.mark.parametrize("moment", ["decoding", "waiting for its shadow"])
async def test_cancelling_frees_the_shadow(moment, monkeypatch):
    if moment != "decoding":  # The shadow never gets a turn, so that its task waits for as long as it may.
        monkeypatch.setattr("scissorhands_server.worker.shadows.Shadows._next", lambda self: None)
    async with tiny_worker(shadow_patience=600) as (worker, stub):
        new = 400 if moment == "decoding" else 30
        call = stub.Generate(request(random_prompt(60, 1), slots=32, new=new, shadow=True))
        tokens = 0
        while tokens < 30:
            tokens += len((await call.read()).delta.token_ids)
        if moment != "decoding":
            await until(lambda: metrics(worker)[f"{PREFIX}rows"] == 0, "the row to be free before the shadow is done")
        assert metrics(worker)[f"{PREFIX}shadow_reserved_bytes"] > 0
        call.cancel()
        await until(lambda: shadows(metrics(worker)), "the shadow's end")
        found = metrics(worker)
        assert shadows(found) == {"cancelled": 1}
        assert found[f"{PREFIX}shadow_reserved_bytes"] == 0
        assert found[f'{PREFIX}requests_total{{model_name="tiny",result="cancelled"}}'] == 1


async def test_estimates_are_of_every_eviction_and_of_some_pairs():
    async with tiny_worker() as (worker, stub):
        _, _, last = await collect(stub.Generate(request(random_prompt(100, 3), slots=40, policy="h2o", new=60)))
        found = metrics(worker)
    quality, evictions = last.finish.quality, last.finish.cache.evictions
    assert 0 < quality.recent_mass_dropped <= quality.recent_mass_dropped_peak < 1
    assert found[f"{PREFIX}recent_attention_dropped_ratio_count"] == evictions
    mean = found[f"{PREFIX}recent_attention_dropped_ratio_sum"] / evictions
    assert quality.recent_mass_dropped == pytest.approx(mean)
    # What was dropped had received less than lately dropped at random would have.
    assert 0 < quality.persistence < 1
    assert 2 <= found[f"{PREFIX}persistence_ratio_count"] < evictions


async def test_the_ledger_has_it_when_the_session_has_ended():
    with ManagerProcess() as manager:
        address = manager.address
        async with tiny_worker(manager=address) as (_, stub), grpc.aio.insecure_channel(address) as channel:
            ledger = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
            events = [
                event async for event in stub.Generate(request(random_prompt(60, 1), slots=32, new=40, shadow=True))
            ]
            wanted = cache_manager_pb2.GetSessionRequest(session_id=events[0].accepted.session_id)
            session = (await ledger.GetSession(wanted)).session
            while session.state != cache_manager_pb2.SESSION_STATE_CLOSED:
                await asyncio.sleep(0.02)
                session = (await ledger.GetSession(wanted)).session
    assert session.quality == events[-1].finish.quality
    assert session.quality.divergence.tokens == 40
