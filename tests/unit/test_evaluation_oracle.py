"""The oracle foresees what transformers' own attention gives, and no policy retains more of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engine_path import EnginePath
from support.tiny_models import eager_attention, random_tokens, tiny_model

from scissorhands.budget import BudgetRequest
from scissorhands.evaluation import recorder
from scissorhands.evaluation.change import measure_change
from scissorhands.evaluation.oracle import _BASE, eviction_steps, foresee, suffix_sums
from scissorhands.evaluation.perplexity import measure
from scissorhands.evaluation.recorder import interval_sums
from scissorhands.evaluation.retention import lost
from scissorhands.grant import PolicyRequest, grant

LENGTH = 100
SLOTS = 40


@pytest.fixture(scope="module")
def engine():
    return EnginePath(tiny_model("llama_grouped"))


@pytest.fixture(scope="module")
def tokens():
    return torch.stack([random_tokens(LENGTH, seed) for seed in range(3)])


@pytest.fixture(scope="module")
def attention(tokens):
    return eager_attention(tokens)


def granted(engine, policy, length=LENGTH, **numbers):
    return grant(BudgetRequest.tokens(SLOTS), PolicyRequest(policy.name, policy.preset, policy.parameters | numbers),
                 engine.shape, length)  # fmt: skip


def named(name):
    return PolicyRequest(*name.split(":"))


@pytest.mark.parametrize("by_values", [False, True])
def test_what_is_foreseen_is_a_sum_over_later_queries(engine, tokens, attention, by_values, monkeypatch):
    monkeypatch.setattr(recorder, "_MOST_ROWS", 2)  # Three sequences in two batches.
    given = granted(engine, _BASE)
    steps = eviction_steps(given, LENGTH)
    assert steps == list(range(SLOTS, LENGTH, given.parameters.drop))
    planner = foresee(engine.model, given, tokens, by_values=by_values)
    with torch.inference_mode():
        model = tiny_model("llama_grouped")
        cached = model(input_ids=tokens, use_cache=True).past_key_values.layers
    for layer, future in enumerate(planner._future):
        assert future.shape == (3, 2, len(steps), LENGTH)
        weight = cached[layer].values.norm(dim=-1) if by_values else 1
        for index, step in enumerate(steps):
            expected = attention[layer][:, :, step:].sum(dim=2) * weight
            np.testing.assert_allclose(future[:, :, index], expected, rtol=1e-4, atol=1e-4)


def test_suffix_sums():
    sums = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    suffix_sums(sums)
    assert sums.tolist() == [[7, 70], [6, 60], [4, 40]]


def test_intervals_leave_out_the_queries_before_them(engine, tokens, attention):
    sums = interval_sums(engine.model, tokens, (7, 8, 90))
    for layer, found in zip(attention, sums, strict=True):
        for index, (first, end) in enumerate([(7, 8), (8, 90), (90, LENGTH)]):
            np.testing.assert_allclose(found[:, :, index], layer[:, :, first:end].sum(dim=2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["h2o", "scissorhands", "scissorhands:paper", "streaming"])
def test_evictions_come_when_the_cache_makes_them(engine, tokens, name):
    given = granted(engine, named(name))
    row = engine.cache.add_row(given, limit=LENGTH)
    del engine.evictions[:]
    for index in range(LENGTH):
        engine.decode([row], tokens[:1, index])
    engine.cache.remove_row(row)
    assert len(engine.evictions) >= 3
    assert [eviction.step for eviction in engine.evictions] == eviction_steps(given, LENGTH)


def test_a_plan_drops_what_will_matter_least(engine, tokens, attention):
    given = granted(engine, _BASE)
    planner = foresee(engine.model, given, tokens)
    row = engine.cache.add_row(given, name="1", limit=LENGTH)
    for index in range(SLOTS - 1):
        engine.decode([row], tokens[1:2, index])
    decided = planner.submit(row, engine.cache.snapshot(row, ahead=1, incoming=1)).take(0.0)
    engine.cache.remove_row(row)
    for layer, keep in enumerate(decided.keep):
        future = attention[layer][1, :, SLOTS:, : SLOTS - 1].sum(dim=1)
        future[:, : given.parameters.sinks] = torch.inf
        for head in range(2):
            dropped = future[head].argsort()[: given.parameters.drop]
            assert sorted(dropped.tolist()) == np.nonzero(~keep[head])[0].tolist()


@pytest.mark.parametrize("name", ["h2o", "scissorhands", "streaming", "tova", "snapkv"])
def test_no_policy_retains_more_with_a_single_plan(engine, tokens, name):
    once = {"drop": 20, "lookahead": 1, "recent": 8, "chunk": 8}
    given, base = granted(engine, named(name), 60, **once), granted(engine, _BASE, 60, drop=20, chunk=8)
    first = tokens[:, :60]
    steps = eviction_steps(given, 60)
    assert steps == eviction_steps(base, 60) == [SLOTS]
    between = interval_sums(engine.model, first, steps)
    policy = lost(engine.model, given, first, steps, between)
    floor = lost(engine.model, base, first, steps, between, foresee(engine.model, base, first))
    assert np.all(floor <= policy + 1e-6)
    assert np.all(floor > 0)
    assert floor.mean() < policy.mean() - 0.01


def test_what_is_lost_is_the_attention_to_evicted_tokens(engine, tokens, attention):
    given = granted(engine, named("streaming"))
    steps = eviction_steps(given, LENGTH)
    found = lost(engine.model, given, tokens, steps, interval_sums(engine.model, tokens, steps))
    drop, sinks = given.parameters.drop, given.parameters.sinks
    for layer, matrix in enumerate(attention):
        expected = torch.zeros(3, 2)
        for query in range(SLOTS, LENGTH):
            evictions = (query - SLOTS) // drop + 1
            expected += matrix[:, :, query, sinks : sinks + evictions * drop].sum(dim=-1)
        np.testing.assert_allclose(found[:, layer], expected / (LENGTH - SLOTS), rtol=1e-4)


def test_budgets_by_head_are_measured_alike(engine, tokens):
    given = granted(engine, named("h2o"))
    by_head = replace(given, layer_slots=given.layer_slots * 2, by_head=True)
    steps = eviction_steps(given, LENGTH)
    assert eviction_steps(by_head, LENGTH) == steps
    between = interval_sums(engine.model, tokens, steps)
    even, split = (lost(engine.model, each, tokens, steps, between) for each in (given, by_head))
    np.testing.assert_allclose(split, even, rtol=1e-4)
    changes = [measure_change(engine.model, each, tokens) for each in (given, by_head)]
    np.testing.assert_array_equal(changes[0].dropped, changes[1].dropped)
    # Fewer slots in one head lose more in it.
    uneven = replace(by_head, layer_slots=(SLOTS, SLOTS // 2, SLOTS, SLOTS))
    steps = eviction_steps(uneven, LENGTH)
    found = lost(engine.model, uneven, tokens, steps, interval_sums(engine.model, tokens, steps))
    assert steps[0] == SLOTS // 2
    assert np.all(found[:, 0, 1] > even[:, 0, 1] + 0.1)


def test_losses_under_the_oracle_come_from_its_plans(engine, tokens):
    given = granted(engine, _BASE, LENGTH)
    asked = []

    def planner_for(batch):
        asked.append(batch.shape)
        return foresee(engine.model, given, batch)

    by_mass = measure(engine.model, given, tokens.numpy())
    foreseen = measure(engine.model, given, tokens.numpy(), planner_for=planner_for)
    assert asked == [(3, LENGTH - 1)]
    assert foreseen.first_eviction == SLOTS
    np.testing.assert_array_equal(foreseen.losses[:, :SLOTS], by_mass.losses[:, :SLOTS])
    assert np.all(np.abs(foreseen.losses[:, SLOTS:] - by_mass.losses[:, SLOTS:]).max(axis=1) > 1e-2)
