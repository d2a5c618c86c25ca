"""The real model, served: with a budget at or above the length the tokens are exactly transformers' own."""

import asyncio
from functools import cache
from pathlib import Path

import pytest
import torch
from support.real_model import REAL_MODEL, require
from support.system import running_system
from transformers import AutoModelForCausalLM, AutoTokenizer

from scissorhands_client import AsyncClient, Budget, GenerateOptions, TokenIds

pytestmark = pytest.mark.real_model

TEXTS = Path(__file__).parents[2] / "examples" / "texts"
NEW_TOKENS = 24
LENGTHS = (50, 300, 1100, 120)


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    with running_system(tmp_path_factory.mktemp("system"), require(REAL_MODEL)) as running:
        yield running


@cache
def reference_model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(REAL_MODEL, dtype=torch.float32)


@cache
def prompt(length: int) -> tuple[int, ...]:
    """Return that many tokens of a novel; each length begins elsewhere."""
    text = (TEXTS / "sense-and-sensibility.txt").read_text()[length:]
    ids = AutoTokenizer.from_pretrained(REAL_MODEL)(text)["input_ids"]
    assert len(ids) >= length
    return tuple(ids[:length])


@cache
def expected(length: int) -> list[int]:
    """Return transformers' own greedy tokens, with its own full cache."""
    ids = torch.tensor([prompt(length)])
    output = reference_model().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    return output[0, length:].tolist()


async def served(client: AsyncClient, length: int) -> list[int]:
    options = GenerateOptions(max_new_tokens=NEW_TOKENS, budget=Budget.tokens(length + NEW_TOKENS), ignore_eos=True)
    result = await client.generate(TokenIds(prompt(length)), options).result()
    assert result.finish.cache.evictions == 0
    return list(result.token_ids)


async def test_tokens_are_those_of_transformers_alone_and_batched(system):
    async with AsyncClient(system.address("worker"), timeout=240) as client:
        for length in LENGTHS[:3]:
            assert await served(client, length) == expected(length)
        together = await asyncio.gather(*(served(client, length) for length in LENGTHS))
    assert together == [expected(length) for length in LENGTHS]
