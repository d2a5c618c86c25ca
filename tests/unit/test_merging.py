"""Merging: what is folded into what, what queries get from it, and rows whose heads have their own budgets."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engine_path import EnginePath, kept_positions
from support.oracle import RULES, assert_close
from support.tiny_models import random_tokens, tiny_model

from scissorhands.attention import attend
from scissorhands.budget import BudgetRequest
from scissorhands.errors import InvalidRequestError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.layer_pool import LayerPool
from scissorhands.merging import fold
from scissorhands.policies import get_policy
from scissorhands.signals import signals_for
from scissorhands.slots import Slots
from scissorhands.span import Span

STEP = 11


def slots(keys, values, positions, mass):
    return Slots(
        torch.tensor([keys], dtype=torch.float32),
        torch.tensor([values], dtype=torch.float32),
        torch.tensor([positions], dtype=torch.int32),
        torch.tensor([mass], dtype=torch.float32),
    )


def kept_slots(mass):
    """Return slots whose keys are 5 from their mean on average; the queries seen are 11, 6 and 1."""
    return slots([[0, 0], [10, 0], [0, 0]], [[1, 0], [0, 1], [5, 5]], [0, 5, 10], mass)


def test_values_are_averaged_by_the_mean_attention_of_those_that_could_see_them():
    kept = kept_slots([1.1, 1.2, 0.5])
    evicted = slots([[9, 0], [10, 1]], [[4, 0], [0, 8]], [6, 7], [0.5, 0.4])
    values, weights = fold(kept, torch.tensor([[0.0, 0.5, 0.0]]), evicted)
    # Rates: 0.2 kept, 0.1 and 0.1 evicted.
    torch.testing.assert_close(values, torch.tensor([[[1.0, 0.0], [1.0, 2.5], [5.0, 5.0]]]))
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.5 + np.log(2.0), 0.0]], dtype=torch.float32))


def test_a_slot_unlike_all_others_is_dropped():
    kept = kept_slots([1.1, 1.2, 0.5])
    values, weights = fold(kept, torch.zeros(1, 3), slots([[10, 7]], [[9, 9]], [6], [3.0]))
    torch.testing.assert_close(values, kept.values)
    torch.testing.assert_close(weights, torch.zeros(1, 3))


def test_a_slot_that_nobody_attended_to_does_not_come_to_weigh_without_bound():
    values, weights = fold(kept_slots([1.1, 0.0, 0.5]), torch.zeros(1, 3), slots([[10, 1]], [[0, 8]], [6], [0.5]))
    torch.testing.assert_close(values[0, 1], torch.tensor([0.0, 8.0]), rtol=1e-4, atol=1e-4)
    assert weights[0, 1] == pytest.approx(np.log(20.0))


def test_queries_get_from_a_folded_slot_what_both_tokens_would_have_given():
    shape = EnginePath(tiny_model("llama_grouped")).shape
    granted = grant(BudgetRequest.tokens(64), PolicyRequest("merged", "h2o"), shape)
    pools = [LayerPool(1, 1, 8, 4, signals_for(granted, 1), torch.float32, torch.device("cpu")) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    keys, values, queries = torch.randn(3, 1, 1, 5, 4, generator=generator)
    keys[..., 2, :] = keys[..., 1, :]  # Twins, but for their values: every later query gives both as much.

    def step(pool: LayerPool, length: int, tokens: slice) -> torch.Tensor:
        span = Span(slice(0, 1), (length,), (tokens.start,), tokens.stop - tokens.start, torch.device("cpu"))
        new = (states[:, :, tokens] for states in (queries, keys, values))
        return attend(pool, span, *new, scaling=0.5, observe=True)

    for pool in pools:
        step(pool, 0, slice(0, 4))
    full, folded = pools
    # The queries that saw one of them alone are not to tell: the rates are set equal.
    folded.states[0][0, 0, 1:3] = torch.tensor([0.3, 0.2])
    taken = folded.take(0, torch.tensor([[2]]))
    folded.compact(0, torch.tensor([[0, 1, 3]]))
    folded.fold(0, 3, taken)
    assert_close(step(folded, 3, slice(4, 5)), step(full, 4, slice(4, 5)))


def test_heads_with_their_own_budgets_are_folded_alike():
    model, rules = tiny_model("llama_grouped"), RULES["merged"]
    engine, other = EnginePath(model), EnginePath(model)
    even = engine.grant(rules)
    own = tuple(slots for slots in even.layer_slots for _ in range(engine.shape.kv_heads))
    split = engine.cache.add_row(replace(even, layer_slots=own, by_head=True))
    whole = other.cache.add_row(even)
    assert engine.cache.allocated_bytes() == other.cache.allocated_bytes() == even.bytes
    tokens = random_tokens(110, seed=1)
    assert_close(engine.read(split, tokens[:57]), other.read(whole, tokens[:57]))
    for token in tokens[57:]:
        expected = other.decode([whole], token.reshape(1))
        assert_close(engine.decode([split], token.reshape(1)), expected)
    assert [head for layer in kept_positions(split) for head in layer] == [
        head for layer in kept_positions(whole) for head in layer
    ]


def test_the_first_eviction_archives_what_the_inner_policy_does():
    evicted = []
    for policy in ("default", "merged"):
        engine = EnginePath(tiny_model("llama_grouped"))
        engine.read(engine.add(replace(RULES["default"], policy=RULES[policy].policy)), random_tokens(57, seed=2))
        evicted.append(engine.evictions[0].layers)
    for plain, merged in zip(*evicted, strict=True):
        assert torch.equal(plain.positions, merged.positions)
        assert torch.equal(plain.keys, merged.keys)
        assert torch.equal(plain.values, merged.values)


def test_weights_are_paid_for_and_need_slots_as_they_are():
    shape = EnginePath(tiny_model("llama_grouped")).shape
    plain, merged = (
        grant(BudgetRequest.tokens(64), policy, shape)
        for policy in (PolicyRequest("h2o"), PolicyRequest("merged", "h2o"))
    )
    assert merged.bytes - plain.bytes == 4 * 64 * shape.layers * shape.kv_heads
    with pytest.raises(InvalidRequestError, match="merged reads keys and values"):
        grant(BudgetRequest.tokens(64), PolicyRequest("merged", "h2o"), shape, codec="int4-hadamard")
    assert all(get_policy("merged", preset).reads_vectors for preset in get_policy("merged").presets)
    assert get_policy("merged", "scissorhands").shares_by_loss
    assert not get_policy("merged", "h2o").shares_by_loss
