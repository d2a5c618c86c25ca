"""The real model: a question behind a shared beginning is answered exactly as if the beginning had been read."""

from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import torch
from support.conversations import ask
from support.real_model import REAL_MODEL, require
from support.shared_prompts import counts, stored
from support.tiny_worker import settings

from scissorhands.probe import probe
from scissorhands.v1 import budget_pb2, generation_pb2_grpc
from scissorhands_server.worker.loading import load
from scissorhands_server.worker.server import Worker

pytestmark = pytest.mark.real_model

TEXT = Path(__file__).parents[2] / "examples" / "texts" / "sense-and-sensibility.txt"
SHARED, QUESTION, NEW = 192, 16, 8


async def test_questions_behind_a_shared_beginning(start_manager, redis_server, tmp_path):
    torch.set_num_threads(1)
    loaded = load(str(require(REAL_MODEL)), cache_folder=tmp_path)
    probe(loaded.model)
    ids = loaded.tokenizer(TEXT.read_text()[:8000])["input_ids"]
    shared, ends = ids[:SHARED], [ids[at : at + QUESTION] for at in (900, 1000)]
    manager = start_manager(store_url=redis_server.url)
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(2):
            chosen = settings(manager=manager.address, prefix_tokens=64, prefix_advantage=0)
            worker = await stack.enter_async_context(Worker(chosen, loaded))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}"))
            made.append((worker, generation_pb2_grpc.GenerationServiceStub(channel)))
        (one, first), (two, second) = made
        for policy, slots, codec in (("full", 0, "none"), ("scissorhands", 128, "turboquant:k4v4")):
            asked = budget_pb2.Policy(name=policy, parameters={"chunk": 32})
            more = {"policy": asked, "slots": slots, "resident_codec": codec, "new": NEW}
            _, cold, _ = await ask(first, shared + ends[0], **more)
            await stored(one)
            _, expected, _ = await ask(first, shared + ends[1], no_prefix_cache=True, **more)
            for stub, end, tokens in ((second, ends[0], cold), (second, ends[1], expected)):
                _, found, finish = await ask(stub, shared + end, **more)
                assert (found, finish.usage.prefix_tokens) == (tokens, SHARED)
        assert counts(two) == {"hit": 4}
