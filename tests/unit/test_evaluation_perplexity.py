"""Block-wise feeding keeps and computes what decoding token by token does."""

import numpy as np
import pytest
import torch
from support.engine_path import EnginePath, kept_positions
from support.oracle import assert_close
from support.tiny_models import random_tokens, tiny_model

from scissorhands.budget import BudgetRequest
from scissorhands.cache import ResidentCache
from scissorhands.errors import EngineError
from scissorhands.evaluation import perplexity
from scissorhands.evaluation.perplexity import feed, measure
from scissorhands.grant import PolicyRequest, grant

LENGTH = 120
SLOTS = 40
POLICIES = {
    "h2o": PolicyRequest("h2o"),
    "streaming": PolicyRequest("streaming"),
    "default": PolicyRequest("scissorhands"),
    "paper": PolicyRequest("scissorhands", "paper"),
    # m > L > 0, m = L, and m not a divisor of anything.
    "apart": PolicyRequest("h2o", parameters={"drop": 11, "lookahead": 3, "recent": 8}),
    "touching": PolicyRequest("h2o", parameters={"drop": 7, "lookahead": 7, "recent": 8}),
    "one by one": PolicyRequest("h2o", parameters={"drop": 1, "lookahead": 0, "recent": 8}),
}


@pytest.fixture(scope="module")
def engine():
    return EnginePath(tiny_model("llama_grouped"))


def sequences(count, length=LENGTH):
    return torch.stack([random_tokens(length, seed) for seed in range(count)])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("most", [64, 5])
def test_blocks_keep_and_compute_what_decoding_does(engine, policy, most):
    model, shape = engine.model, engine.shape
    granted = grant(BudgetRequest.tokens(SLOTS), POLICIES[policy], shape, LENGTH)
    tokens = sequences(2)
    cache = ResidentCache(shape, model.dtype, model.device)
    blocks = [cache.add_row(granted, limit=LENGTH) for _ in tokens]
    decoded = [engine.cache.add_row(granted, limit=LENGTH) for _ in tokens]
    done = 0
    for logits in feed(model, cache, blocks, tokens, most):
        for index in range(logits.shape[1]):
            expected = engine.decode(decoded, tokens[:, done + index])
            assert_close(logits[:, index], expected)
        done += logits.shape[1]
        for row, twin in zip(blocks, decoded, strict=True):
            assert row.epoch == twin.epoch
            assert kept_positions(row) == kept_positions(twin)
    assert done == LENGTH
    assert blocks[0].epoch >= 3
    for row in decoded:
        engine.cache.remove_row(row)


def test_losses_of_the_full_cache_are_those_of_transformers():
    model = tiny_model("llama_grouped")
    tokens = sequences(3)
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    engine = EnginePath(model)
    granted = grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), engine.shape, LENGTH)
    measured = measure(model, granted, tokens.numpy())
    np.testing.assert_allclose(measured.losses, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert measured.first_eviction is None
    assert measured.sizes.allocated == granted.bytes


def test_losses_are_equal_up_to_the_first_eviction_and_differ_after_it(engine):
    tokens = sequences(2).numpy()
    full = grant(BudgetRequest.fraction(1.0), PolicyRequest("full"), engine.shape, LENGTH)
    few = grant(BudgetRequest.tokens(SLOTS), PolicyRequest("h2o"), engine.shape, LENGTH)
    reference, measured = (measure(engine.model, each, tokens) for each in (full, few))
    assert measured.first_eviction == SLOTS
    np.testing.assert_allclose(measured.losses[:, :SLOTS], reference.losses[:, :SLOTS], rtol=1e-4, atol=1e-4)
    assert np.all(np.abs(measured.losses[:, SLOTS:] - reference.losses[:, SLOTS:]).max(axis=1) > 1e-2)
    assert measured.sizes.allocated == few.bytes


def test_more_sequences_than_a_batch_holds(engine, monkeypatch):
    tokens = sequences(5, 60).numpy()
    granted = grant(BudgetRequest.tokens(SLOTS), PolicyRequest("h2o"), engine.shape, 60)
    together = measure(engine.model, granted, tokens)
    monkeypatch.setattr(perplexity, "MOST_ROWS", 2)
    told = []
    apart = measure(engine.model, granted, tokens, told.append)
    np.testing.assert_allclose(apart.losses, together.losses, rtol=1e-4, atol=1e-4)
    assert apart.losses.shape == (5, 59)
    assert sum(told) == 5 * 59


def test_losses_that_are_not_finite_are_refused():
    model = tiny_model("llama_grouped")
    engine = EnginePath(model)
    granted = grant(BudgetRequest.tokens(SLOTS), PolicyRequest("h2o"), engine.shape, 60)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(EngineError, match="--dtype float32"):
        measure(model, granted, sequences(1, 60).numpy())
