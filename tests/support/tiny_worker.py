"""A worker in this process with a tiny seeded model and a byte-level tokenizer, and what tests ask of it."""

import atexit
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import grpc
import torch
from support.tiny_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

from scissorhands.probe import probe
from scissorhands.v1 import budget_pb2, generation_pb2, generation_pb2_grpc
from scissorhands_server.worker.loading import LoadedModel, load
from scissorhands_server.worker.server import Worker
from scissorhands_server.worker.settings import WorkerSettings

POSITIONS = 512
EOS = 2


@cache
def tiny_folder() -> Path:
    """Save a two-layer grouped-query Llama with its tokenizer and return the folder."""
    torch.set_num_threads(1)
    folder = Path(mkdtemp(prefix="tiny-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = byte_level()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            initializer_range=0.25,
            bos_token_id=1,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def tiny_loaded() -> LoadedModel:
    """Load the tiny model; shared by all tests of a process, which must leave it as it is."""
    loaded = load(str(tiny_folder()), cache_folder=tiny_folder() / "cache", name="tiny")
    probe(loaded.model)
    return loaded


def settings(**given: object) -> WorkerSettings:
    """Return settings on free ports."""
    values: dict[str, object] = {"model": "tiny", "port": 0, "metrics_port": 0}
    return WorkerSettings(**{**values, **given})  # type: ignore[arg-type]


@asynccontextmanager
async def tiny_worker(**given: object) -> AsyncIterator[tuple[Worker, generation_pb2_grpc.GenerationServiceStub]]:
    """Run a worker and connect to it."""
    async with (
        Worker(settings(**given), tiny_loaded()) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        yield worker, generation_pb2_grpc.GenerationServiceStub(channel)


def request(prompt: list[int], *, slots: int = 0, policy: str | budget_pb2.Policy = "", new: int = 20, **more: object):
    """Return a request that generates exactly ``new`` tokens."""
    message = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenPrompt(ids=prompt), max_new_tokens=new, ignore_eos=True, **more
    )
    if slots:
        message.budget.tokens = slots
    if policy:
        message.policy.CopyFrom(budget_pb2.Policy(name=policy) if isinstance(policy, str) else policy)
    return message


async def collect(call) -> tuple[list[int], str, generation_pb2.GenerateResponse]:
    """Return the tokens, the text and the last event of a stream."""
    tokens, text, last = [], "", None
    async for last in call:
        tokens += last.delta.token_ids
        text += last.delta.text
    assert last is not None
    return tokens, text, last


async def ask(
    message: generation_pb2.GenerateRequest, loaded: LoadedModel, **given: object
) -> tuple[generation_pb2.Accepted, list[int], generation_pb2.Finish]:
    """Return what a worker of its own, with settings ``given``, answers: its acceptance, the tokens and the end."""
    async with (
        Worker(settings(**given), loaded) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        events = aiter(generation_pb2_grpc.GenerationServiceStub(channel).Generate(message))
        accepted = (await anext(events)).accepted
        tokens, _, last = await collect(events)
        return accepted, tokens, last.finish


def metrics(worker_or_port) -> dict[str, float]:
    """Scrape a metrics endpoint into series and values."""
    port = getattr(worker_or_port, "metrics_port", worker_or_port)
    body = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    lines = [line.rsplit(" ", 1) for line in body.splitlines() if line and not line.startswith("#")]
    return {series: float(value) for series, value in lines}
