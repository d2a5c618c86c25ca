"""Kinds of tokens: read from a tokenizer, and told to the cache by every forward pass."""

import numpy as np
import pytest
import torch
from support.dense_policies import kind_of
from support.oracle import RULES
from support.tiny_models import VOCABULARY, random_tokens, tiny_model
from support.tiny_tokenizers import byte_fallback, byte_level, slow
from transformers import LlamaForCausalLM

from scissorhands.budget import BudgetRequest
from scissorhands.budgeted import BudgetedCache
from scissorhands.errors import InvalidRequestError
from scissorhands.grant import PolicyRequest
from scissorhands.kinds import tell_kinds, token_kinds
from scissorhands.snapshot import TokenKind

FASTGEN = PolicyRequest("fastgen")


@pytest.mark.parametrize("make", [byte_level, byte_fallback, slow])
def test_special_tokens_and_punctuation_are_told_apart(make):
    tokenizer = make()
    kinds = token_kinds(tokenizer)
    assert len(kinds) == len(tokenizer)
    assert set(np.flatnonzero(kinds == TokenKind.SPECIAL)) == set(tokenizer.all_special_ids)
    texts = {tokenizer.decode([token]): TokenKind(kinds[token]) for token in range(len(tokenizer))}
    assert texts["."] == TokenKind.PUNCTUATION
    assert texts["a"] == TokenKind.OTHER


def test_punctuation_may_have_spaces_around_it_but_nothing_else():
    words = ("Ġ,", '..."', "Ġ(", ".a", "++", "ĠĠ", "ĊĊ", "âĢĻ")
    tokenizer = byte_level(words)
    found = token_kinds(tokenizer)
    kinds = {word: found[tokenizer.convert_tokens_to_ids(word)] for word in words}
    # The last one is a right single quotation mark, in bytes. A plus is a symbol.
    assert [word for word, kind in kinds.items() if kind == TokenKind.PUNCTUATION] == ["Ġ,", '..."', "Ġ(", "âĢĻ"]
    assert kinds[".a"] == kinds["++"] == kinds["ĠĠ"] == kinds["ĊĊ"] == TokenKind.OTHER


def test_a_batch_tells_each_row_its_own_kinds():
    model = tiny_model("llama_grouped")
    rows = [random_tokens(length, seed=length) for length in (30, 21)]
    ids = torch.zeros(2, 30, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, -len(row) :] = row
        mask[index, -len(row) :] = 1
    cache = BudgetedCache(model, BudgetRequest.tokens(100), FASTGEN)
    model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=2, do_sample=False, eos_token_id=None)
    for row, tokens in zip(cache.rows, rows, strict=True):
        for layer in row.pool.layers:
            evidence = layer.evidence(row.index, len(tokens), row.step)
            assert evidence.signals["token_kind"].tolist() == [[kind_of(int(token)) for token in tokens]] * 2


def test_a_model_may_know_more_tokens_than_its_tokenizer():
    model = tiny_model("llama_grouped")
    bare = LlamaForCausalLM(model.config).eval()
    tell_kinds(bare, np.array([TokenKind.SPECIAL], dtype=np.uint8))
    cache = BudgetedCache(bare, BudgetRequest.tokens(100), FASTGEN)
    with torch.inference_mode():
        bare(input_ids=torch.tensor([[0, VOCABULARY - 1]]), cache=cache, use_cache=True)
    evidence = cache.rows[0].pool.layers[0].evidence(0, 2, 2)
    assert evidence.signals["token_kind"].tolist() == [[TokenKind.SPECIAL, TokenKind.OTHER]] * 2


def test_a_policy_that_needs_kinds_says_so_when_nobody_tells():
    model = tiny_model("llama_grouped")
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(random_tokens(8, seed=1)).unsqueeze(0)
        for policy in (FASTGEN, PolicyRequest("protected", "fastgen")):
            cache = BudgetedCache(model, BudgetRequest.tokens(100), policy)
            with pytest.raises(InvalidRequestError, match="tell_kinds") as caught:
                model(inputs_embeds=embeddings, cache=cache, use_cache=True)
            assert caught.value.field == "policy.name"
        other = BudgetedCache(model, BudgetRequest.tokens(100), PolicyRequest(RULES["h2o"].policy))
        model(inputs_embeds=embeddings, cache=other, use_cache=True)
        assert other.rows[0].step == 8
