"""A worker and a manager that serve a model of which some layers slide."""

import grpc
import pytest
import torch
from support.manager_data import fetch
from support.processes import ManagerProcess
from support.sliding_models import WINDOW, sliding_model
from support.tiny_models import random_tokens
from support.tiny_tokenizers import byte_level
from support.tiny_worker import collect, request, settings
from transformers import PreTrainedModel

from scissorhands.probe import probe
from scissorhands.segment import check_segment
from scissorhands.v1 import budget_pb2, cache_manager_pb2, cache_manager_pb2_grpc, generation_pb2_grpc
from scissorhands_server.worker.link import ManagerLink
from scissorhands_server.worker.loading import LoadedModel, load
from scissorhands_server.worker.server import Worker

PROMPT = random_tokens(4 * WINDOW + 3, seed=5)
NEW = 3 * WINDOW
SLOTS = 40


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("sliding")
    sliding_model("gemma3").save_pretrained(folder)
    byte_level().save_pretrained(folder)
    found = load(str(folder), cache_folder=folder / "cache", name="tiny")
    probe(found.model)
    return found


def greedy(model: PreTrainedModel) -> list[int]:
    ids = PROMPT.unsqueeze(0)
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return answer[0, len(PROMPT) :].tolist()


async def serve(loaded: LoadedModel, *messages, **given):
    """Return what a worker answers to each message, tokens and events."""
    async with (
        Worker(settings(**given), loaded) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answers = []
        for message in messages:
            events = aiter(stub.Generate(message))
            first = await anext(events)
            tokens, _, last = await collect(events)
            answers.append((tokens, first.accepted, last.finish))
        return answers


async def test_a_budget_of_everything_equals_transformers(loaded):
    message = request(PROMPT.tolist(), new=NEW)
    message.budget.fraction = 1
    ((tokens, accepted, finish),) = await serve(loaded, message)
    assert tokens == greedy(sliding_model("gemma3"))
    assert list(accepted.grant.layer_slots) == [WINDOW, len(PROMPT) + NEW, WINDOW]
    assert finish.cache.evictions == 0
    # What transformers would hold: a sliding layer one token less than its window.
    slots = len(PROMPT) + NEW + 2 * (WINDOW - 1)
    assert finish.cache.full_bytes == slots * 2 * 2 * 8 * 4
    assert finish.cache.allocated_bytes > finish.cache.full_bytes


async def test_plans_and_segments_are_of_the_global_layers_alone(loaded):
    message = request(PROMPT.tolist(), slots=SLOTS, new=NEW)
    ((alone, *_),) = await serve(loaded, message)
    with ManagerProcess() as manager:
        ((tokens, accepted, finish),) = await serve(loaded, message, manager=manager.address)
        assert tokens == alone
        assert list(accepted.grant.layer_slots) == [WINDOW, SLOTS, WINDOW]
        assert finish.cache.plans_manager > 0
        assert finish.cache.segments == finish.cache.evictions > 3
        assert 0 < finish.cache.mass_dropped < 1
        async with grpc.aio.insecure_channel(manager.address) as channel:
            stub = cache_manager_pb2_grpc.CacheManagerServiceStub(channel)
            found = await fetch(stub, accepted.session_id)
            asked = cache_manager_pb2.GetSessionRequest(session_id=accepted.session_id)
            session = (await stub.GetSession(asked)).session
    headers = [check_segment(data) for data in found.values()]
    assert len(headers) == finish.cache.segments
    assert sum(header.slots for header in headers) == finish.cache.evicted_slots
    assert all(header.section(layer, 0).slots == 0 for header in headers for layer in (0, 2))
    assert {header.identity.layer_slots for header in headers} == {f"{WINDOW},{SLOTS},{WINDOW}"}
    assert session.evicted_slots == finish.cache.evicted_slots
    assert session.mass_dropped == pytest.approx(finish.cache.mass_dropped, rel=0.1)
    assert len(session.persistence) == 1


async def test_rows_of_a_batch_answer_as_if_alone(loaded):
    messages = [request(PROMPT[: 9 + 20 * row].tolist(), slots=SLOTS, new=NEW) for row in range(3)]
    expected = [tokens for tokens, *_ in await serve(loaded, *messages)]
    async with (
        Worker(settings(rows=3), loaded) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.Generate(message) for message in messages]
        assert [(await collect(call))[0] for call in calls] == expected


async def test_a_grant_without_the_windows_is_not_taken(loaded, monkeypatch):
    # As from an older manager, which knows no windows and would have sliding layers hold more than theirs.
    message = request(PROMPT.tolist(), slots=SLOTS, new=NEW)
    ((alone, *_),) = await serve(loaded, message)
    opened = ManagerLink.open

    async def open_at_an_older_one(*arguments: object) -> budget_pb2.Grant | None:
        granted = await opened(*arguments)
        if granted is not None:
            granted.layer_slots[:] = [SLOTS] * 3
        return granted

    monkeypatch.setattr(ManagerLink, "open", open_at_an_older_one)
    with ManagerProcess() as manager:
        ((tokens, accepted, _),) = await serve(loaded, message, manager=manager.address)
    assert accepted.grant.source == budget_pb2.GRANT_SOURCE_LOCAL
    assert list(accepted.grant.layer_slots) == [WINDOW, SLOTS, WINDOW]
    assert tokens == alone
