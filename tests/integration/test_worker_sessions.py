"""Conversations whose cache is kept between turns, through real workers, a manager and a Redis."""

from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from support.tiny_models import random_tokens
from support.tiny_worker import collect, metrics, request, settings, tiny_loaded

from scissorhands.v1 import generation_pb2_grpc
from scissorhands_server.worker.server import Worker

FIRST, SECOND, THIRD = (random_tokens(count, seed=seed).tolist() for count, seed in ((70, 1), (20, 2), (9, 3)))
NEW = 25


@asynccontextmanager
async def workers(manager, count=2, **given):
    """Run workers of a manager; yield them with what connects to each."""
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            worker = Worker(settings(manager=manager.address, **given), tiny_loaded())
            await stack.enter_async_context(worker)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}"))
            made.append((worker, generation_pb2_grpc.GenerationServiceStub(channel)))
        yield made


async def ask(stub, prompt, **more):
    """Return what a worker answers: its acceptance, the tokens and the end."""
    events = aiter(stub.Generate(request(prompt, new=NEW, **more), timeout=60))
    accepted = (await anext(events)).accepted
    tokens, _, last = await collect(events)
    return accepted, tokens, last.finish


async def converse(stubs, turns=(FIRST, SECOND, THIRD), **more):
    """Hold a conversation, turn by turn in the given workers; return its ids and what was resumed in each turn."""
    ids, resumed = [], []
    for turn, stub in zip(turns, stubs, strict=True):
        ids += turn
        accepted, tokens, finish = await ask(stub, ids, **more)
        ids += tokens
        resumed.append(accepted.resumed_tokens)
        assert bool(finish.cache.suspended_bytes) is bool(more.get("session_id"))
    return ids, resumed


def results(worker, kind="resumes"):
    """Return how often each result was counted."""
    prefix = f'scissorhands_worker_{kind}_total{{result="'
    return {
        name.removeprefix(prefix)[:-2]: value
        for name, value in metrics(worker).items()
        if name.startswith(prefix) and value
    }


@pytest.fixture
def manager(start_manager, redis_server):
    return start_manager(store_url=redis_server.url)


async def test_a_full_conversation_is_that_of_one_that_was_never_suspended(manager):
    async with workers(manager) as ((one, first), (two, second)):
        more = {"policy": "full"}
        alone, nothing = await converse([first] * 3, **more)
        kept, resumed = await converse([first, second, first], session_id="c1", **more)
        assert kept == alone
        assert nothing == [0, 0, 0]
        # All but the last token of each answer, which nobody has read.
        lengths = [len(FIRST) + NEW - 1, len(FIRST) + len(SECOND) + 2 * NEW - 1]
        assert resumed == [0, *lengths]
        assert results(one) == {"new": 1, "resumed": 1}
        assert results(two) == {"resumed": 1}
        assert metrics(one)["scissorhands_worker_resumed_tokens_total"] == lengths[1]
        # The last token of an answer is read with the next turn.
        again = sum(map(len, (FIRST, SECOND, THIRD))) + 2
        alone_read = 3 * len(FIRST) + 2 * (NEW + len(SECOND)) + NEW + len(THIRD)
        read = sum(metrics(worker)["scissorhands_worker_prompt_tokens_total"] for worker in (one, two))
        assert read == alone_read + again
