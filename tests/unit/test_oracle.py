"""The cache against a slow, dense reference that was written from the design: logits and kept sets at every step."""

from dataclasses import replace

import numpy as np
import pytest
from support.dense_reference import DenseSequence, Rules
from support.engine_path import EnginePath, kept_positions, policy_of
from support.oracle import RULES, assert_close, assert_kept, forward
from support.tiny_models import TINY_MODELS, random_tokens, tiny_model

from scissorhands.budget import BudgetRequest, Grant
from scissorhands.budgeted import BudgetedCache
from scissorhands.grant import PolicyRequest, grant
from scissorhands.row import Phase

PROMPT, TOKENS = 57, 330
# Every model with two policies. What the others see of a model that these do not are keys, values and scores: grouped
# heads or not make a difference. The rest of the models take turns.
EVERY_MODEL = ("default", "paper")
FEW_MODELS = ("llama_grouped", "gpt_neox")
ONE_MORE = {
    "counts": "opt", "h2o": "llama_multi_head", "tova": "qwen2", "snapkv": "opt", "streaming": "llama_multi_head",
    "expected-attention": "qwen2",
}  # fmt: skip
CASES = [
    (name, policy)
    for policy in RULES
    for name in TINY_MODELS
    if policy in EVERY_MODEL or name in FEW_MODELS or ONE_MORE.get(policy) == name
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_both_paths_equal_the_reference_at_every_step(name, policy):
    model, rules = tiny_model(name), RULES[policy]
    # Enough for all these evictions, of which some are of a whole chunk.
    count = min(TOKENS, rules.B + 30 * rules.m)
    tokens = random_tokens(count, seed=len(name) + len(policy))
    reference = DenseSequence(model, rules, count)
    engine = EnginePath(model)
    row = engine.add(rules)
    cache = BudgetedCache(model, BudgetRequest.tokens(rules.B), policy_of(rules))

    expected = reference.read(tokens[:PROMPT])
    assert_close(engine.read(row, tokens[:PROMPT]), expected)
    assert_close(forward(model, cache, tokens[:PROMPT]), expected)
    in_prefill = reference.evictions
    for step in range(PROMPT, count):
        expected = reference.decode(tokens[step])
        assert_close(engine.decode([row], tokens[step : step + 1])[0], expected)
        assert_close(forward(model, cache, tokens[step : step + 1])[0], expected)
        assert_kept(row, reference)
        assert_kept(cache.rows[0], reference)

    assert reference.evictions >= 24
    phases = [eviction.phase for eviction in engine.evictions]
    assert phases == [Phase.PREFILL] * in_prefill + [Phase.DECODE] * (reference.evictions - in_prefill)
    assert [eviction.epoch for eviction in engine.evictions] == list(range(reference.evictions))
    assert row.epoch == cache.rows[0].epoch == reference.evictions
    assert_contents(row, reference)
    assert_contents(cache.rows[0], reference)
    assert_accounts(engine, cache, reference)


def test_the_default_numbers_equal_the_reference_too():
    model = tiny_model("llama_grouped")
    tokens = random_tokens(TOKENS, seed=3)
    engine = EnginePath(model)
    granted = grant(BudgetRequest.tokens(64), PolicyRequest("scissorhands"), engine.shape)
    numbers = granted.parameters
    rules = Rules(
        "default", 64, numbers.recent, numbers.sinks, numbers.drop, numbers.lookahead, numbers.chunk, numbers.window
    )
    reference = DenseSequence(model, rules, TOKENS)
    row = engine.cache.add_row(granted)
    assert_close(engine.read(row, tokens[:150]), reference.read(tokens[:150]))
    for step in range(150, TOKENS):
        assert_close(engine.decode([row], tokens[step : step + 1])[0], reference.decode(tokens[step]))
        assert_kept(row, reference)


@pytest.mark.parametrize("policy", RULES)
def test_a_second_prompt_goes_on_where_decoding_stopped(policy):
    # The snapshot that decoding took is void then: it counted on single tokens.
    model, rules = tiny_model("llama_grouped"), RULES[policy]
    tokens = random_tokens(200, seed=8)
    reference = DenseSequence(model, rules, 200)
    engine = EnginePath(model)
    row = engine.add(rules)
    cache = BudgetedCache(model, BudgetRequest.tokens(rules.B), policy_of(rules))
    voided = begin = 0
    # The turns end at different distances from the next eviction; some prompts fit without one.
    turns = [(30, 21), (9, 10), (14, 7), (6, 12), *((2, answered) for answered in range(3, 11))]
    for asked, answered in turns:
        prompt = begin + asked
        end = prompt + answered
        expected = reference.read(tokens[begin:prompt])
        voided += row.pending is not None and asked <= row.slack
        assert_close(engine.read(row, tokens[begin:prompt]), expected)
        assert_close(forward(model, cache, tokens[begin:prompt]), expected)
        for step in range(prompt, end):
            expected = reference.decode(tokens[step])
            assert_close(engine.decode([row], tokens[step : step + 1])[0], expected)
            assert_close(forward(model, cache, tokens[step : step + 1])[0], expected)
            assert_kept(row, reference)
            assert_kept(cache.rows[0], reference)
        begin = end
    # With a snapshot in flight at most L - 1 tokens fit, and a single one is decoded.
    assert voided or rules.L <= 2


@pytest.mark.parametrize("policy", RULES)
def test_layers_of_different_budgets_evict_together(policy):
    model = tiny_model("llama_grouped")
    numbers = RULES[policy]
    slots = (numbers.B + 7, numbers.B + 3)
    rules = replace(numbers, B=slots)
    tokens = random_tokens(200, seed=9)
    reference = DenseSequence(model, rules, 200)
    engine = EnginePath(model)
    even = engine.grant(numbers)
    per_slot = even.bytes // numbers.B // engine.shape.layers
    row = engine.cache.add_row(Grant(even.policy, even.preset, slots, even.parameters, per_slot * sum(slots)))
    assert_close(engine.read(row, tokens[:50]), reference.read(tokens[:50]))
    for step in range(50, 200):
        assert_close(engine.decode([row], tokens[step : step + 1])[0], reference.decode(tokens[step]))
        assert_kept(row, reference)
        assert engine.cache.allocated_bytes() == row.grant.bytes
        assert all(length <= budget for length, budget in zip(row.lengths, slots, strict=True))
    assert min(layer.dropped_mass for layer in reference.layers) > 0


def assert_contents(row, reference):
    """The kept slots hold their tokens' keys, values and evidence."""
    for index, (layer, pool, n) in enumerate(zip(reference.layers, row.pool.layers, row.lengths, strict=True)):
        evidence = pool.evidence(row.index, n, row.step)
        expected = reference.signals(layer)
        for head, kept in enumerate(reference.kept()[index]):
            assert_close(pool.keys[row.index, head, :n], layer.keys[head, kept])
            assert_close(pool.values[row.index, head, :n], layer.values[head, kept])
            for name, signal in evidence.signals.items():
                # Counts are exact, attention is rounded.
                exact = np.issubdtype(signal.dtype, np.integer)
                tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
                np.testing.assert_allclose(signal[head], expected[name][head, kept], **tolerances)


def assert_accounts(engine, cache, reference):
    """What was evicted, and the attention that lay on it, is counted exactly."""
    dropped = sum(int((~layer.keep[:, : reference.step]).sum()) for layer in reference.layers)
    mass = sum(layer.dropped_mass for layer in reference.layers)
    heads = len(reference.layers) * len(reference.layers[0].keep)
    assert cache.evicted_slots == sum(eviction.slots for eviction in engine.evictions) == dropped
    assert sum(eviction.mass() for eviction in engine.evictions) == pytest.approx(mass, rel=1e-5)
    assert cache.mass_dropped_share() == pytest.approx(mass / heads / reference.step, rel=1e-5)
    for index, layer in enumerate(reference.layers):
        for slots in (eviction.layers[index] for eviction in engine.evictions):
            for head, positions in enumerate(slots.positions.tolist()):
                assert positions == sorted(positions)
                assert not layer.keep[head, positions].any()
                assert_close(slots.keys[head], layer.keys[head, positions])
                assert_close(slots.values[head], layer.values[head, positions])


def test_reading_a_prompt_never_drops_an_exempt_slot():
    """These numbers are valid, and the second chunk's ``m`` is all that the row holds."""
    model = tiny_model("llama_grouped")
    rules = Rules("counts", B=100, r=30, s=4, m=60, L=0, c=60, w=32)
    tokens = random_tokens(240, seed=8)
    reference = DenseSequence(model, rules, len(tokens))
    engine = EnginePath(model)
    row = engine.add(rules)
    for start in range(0, len(tokens), 60):
        chunk = tokens[start : start + 60]
        exempt = {*range(rules.s), *range(start - rules.r, start)} if start else set()
        assert_close(engine.read(row, chunk), reference.read(chunk))
        assert_kept(row, reference)
        for heads in kept_positions(row):
            assert all(exempt <= {*positions} for positions in heads)
    assert reference.evictions == 3
