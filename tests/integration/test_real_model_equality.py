"""SmolLM2-135M with a budget at or above the length answers exactly as transformers does with its own full cache."""

from pathlib import Path

import pytest
import torch
from support.real_model import REAL_MODEL, require
from transformers import AutoModelForCausalLM, AutoTokenizer

from scissorhands.budget import BudgetRequest
from scissorhands.budgeted import BudgetedCache
from scissorhands.grant import PolicyRequest

pytestmark = pytest.mark.real_model

TEXTS = Path(__file__).resolve().parents[2] / "examples" / "texts"
NEW = 16
# All of them, whatever the model thinks of it.
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(require(REAL_MODEL), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts():
    """Return the token ids of the shipped texts."""
    tokenizer = AutoTokenizer.from_pretrained(require(REAL_MODEL))
    names = ("pride-and-prejudice.txt", "sense-and-sensibility.txt")
    return [tokenizer((TEXTS / name).read_text(), return_tensors="pt").input_ids[0] for name in names]


@pytest.mark.parametrize(("text", "length", "policy"), [(0, 50, "full"), (0, 700, "h2o"), (1, 1100, "scissorhands")])
def test_solo(model, texts, text, length, policy):
    ids = texts[text][:length].unsqueeze(0)
    assert ids.shape[1] == length
    expected = own_cache(model, ids)
    cache = BudgetedCache(model, BudgetRequest.tokens(length + NEW), PolicyRequest(policy))
    actual = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **GREEDY)
    assert actual.tolist() == expected.tolist()
    assert cache.evicted_slots == 0
    assert cache.allocated_bytes() == cache.grant.bytes


def test_four_prompts_batched_with_left_padding(model, texts):
    prompts = [texts[0][:50], texts[1][:180], texts[0][200:329], texts[1][400:407]]
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((4, longest), model.generation_config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :] = prompt
        mask[row, -len(prompt) :] = 1
    expected = own_cache(model, ids, mask)
    cache = BudgetedCache(model, BudgetRequest.fraction(1.0), total_tokens=longest + NEW)
    assert model.generate(ids, attention_mask=mask, cache=cache, **GREEDY).tolist() == expected.tolist()
    # And the most padded one as it is answered alone.
    prompt = prompts[3].unsqueeze(0)
    solo = BudgetedCache(model, BudgetRequest.fraction(1.0), total_tokens=prompt.shape[1] + NEW)
    alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), cache=solo, **GREEDY)
    assert alone[0, -NEW:].tolist() == expected[3, -NEW:].tolist()


def own_cache(model, ids, mask=None):
    """Return transformers' own greedy answer."""
    model.set_attn_implementation("sdpa")
    return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **GREEDY)
