"""Conversations of several turns with workers that keep sessions."""

from contextlib import AsyncExitStack, asynccontextmanager

import grpc
from support.tiny_models import random_tokens
from support.tiny_worker import collect, metrics, request, settings, tiny_loaded

from scissorhands.v1 import generation_pb2_grpc
from scissorhands_server.worker.server import Worker

# What is said in three turns, in token ids, and how many tokens answer each.
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


async def ask(stub, prompt, new=NEW, **more):
    """Return what a worker answers: its acceptance, the tokens and the end."""
    events = aiter(stub.Generate(request(prompt, new=new, **more), timeout=60))
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
