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
from scissorhands.codec import get_codec
from scissorhands.compaction import evict
from scissorhands.grant import PolicyRequest, grant
from scissorhands.layer_pool import LayerCodec, LayerPool
from scissorhands.merging import fold, match, rates
from scissorhands.new_tokens import NewTokens
from scissorhands.policies import get_policy
from scissorhands.signals import signals_for
from scissorhands.span import Span

STEP = torch.tensor([[11]])


def numbers(*rows):
    return torch.tensor([rows], dtype=torch.float32)


# Keys that are 5 from their mean on average; the queries that could see them are 11, 6 and 1.
KEYS = numbers([0, 0], [10, 0], [0, 0])
VALUES = numbers([1, 0], [0, 1], [5, 5])
POSITIONS = torch.tensor([[0, 5, 10]])


def folded(mass, evicted_keys, evicted_values, evicted_rates):
    """Fold into the slots above; keys are looked at in two pieces."""
    found = match(evicted_keys, KEYS.split(2, dim=1))
    own = rates(torch.tensor([mass]), POSITIONS, STEP).gather(1, found.slots)
    values = VALUES.gather(1, found.slots.unsqueeze(-1).expand(-1, -1, 2))
    return found, fold(found, values, own, evicted_values, torch.tensor([evicted_rates]))


def test_values_are_averaged_by_the_mean_attention_of_those_that_could_see_them():
    found, result = folded([1.1, 1.2, 0.5], numbers([9, 0], [10, 1]), numbers([4, 0], [0, 8]), [0.1, 0.1])
    assert found.slots.tolist() == [[1, 1]]
    # The kept one's rate is 0.2.
    torch.testing.assert_close(result.values, numbers([1.0, 2.5], [1.0, 2.5]))
    torch.testing.assert_close(result.growth, torch.tensor([[2.0, 2.0]]))
    assert result.grown.all()


def test_a_slot_unlike_all_others_is_dropped_beside_one_that_is_not():
    found, result = folded([1.1, 1.2, 0.5], numbers([10, 7], [10, 1]), numbers([9, 9], [0, 8]), [3.0, 0.2])
    assert found.near.tolist() == [[False, True]]
    torch.testing.assert_close(result.values, numbers([0, 4.5], [0, 4.5]))
    found, result = folded([1.1, 1.2, 0.5], numbers([10, 7]), numbers([9, 9]), [3.0])
    assert not result.grown.any()
    assert result.growth.tolist() == [[1.0]]


def test_a_slot_that_nobody_attended_to_does_not_come_to_weigh_without_bound():
    _, result = folded([1.1, 0.0, 0.5], numbers([10, 1]), numbers([0, 8]), [0.1])
    torch.testing.assert_close(result.values, numbers([0.0, 8.0]), rtol=1e-4, atol=1e-4)
    assert result.growth.tolist() == [[20.0]]


def test_queries_get_from_a_folded_slot_what_both_tokens_would_have_given():
    shape = EnginePath(tiny_model("llama_grouped")).shape
    granted = grant(BudgetRequest.tokens(64), PolicyRequest("merged", "h2o"), shape)
    pools = [LayerPool(1, 1, 8, 4, signals_for(granted, 1), torch.float32, torch.device("cpu")) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    keys, values, queries = torch.randn(3, 1, 1, 5, 4, generator=generator)
    keys[..., 2, :] = keys[..., 1, :]  # Twins, but for their values: every later query gives both as much.

    def step(pool: LayerPool, length: int, tokens: slice) -> torch.Tensor:
        span = Span(slice(0, 1), (length,), (tokens.start,), tokens.stop - tokens.start, torch.device("cpu"))
        new = NewTokens(queries, keys, values, scaling=0.5).at(slice(None), tokens)
        return attend(pool, span, new, observe=True)

    for pool in pools:
        step(pool, 0, slice(0, 4))
    full, folded = pools
    # The queries that saw one of them alone are not to tell: the rates are set equal.
    folded.states[0][0, 0, 1:3] = torch.tensor([0.3, 0.2])
    (taken,) = evict([folded], 0, [4], [np.arange(4)[None] != 2])
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


@pytest.mark.parametrize("codec", ["int8", "turboquant:k4v4"])
def test_packed_slots_are_folded_like_what_they_stand_for(codec):
    """Fold packed slots, and the vectors that they stand for; only the slots that grew are encoded again."""
    shape = EnginePath(tiny_model("llama_grouped")).shape
    granted = grant(BudgetRequest.tokens(64), PolicyRequest("merged", "h2o"), shape, codec=codec)
    found = get_codec(codec, 16)
    packed, exact = (
        LayerPool(1, 2, 12, 16, signals_for(granted, 1), torch.float32, torch.device("cpu"), own)
        for own in (LayerCodec(found.keys, found.values), None)
    )
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 1, 2, 12, 16, generator=generator)
    keys[:, :, 9] = keys[:, :, 4] + 0.01  # Near to each other, and of no other is that certain.
    for pool, stored in ((packed, (found.keys.encode_rows(keys), found.values.encode_rows(values))), (exact, None)):
        pool.positions[:] = torch.arange(12)
        pool.states[0][:] = torch.rand(1, 2, 12, generator=generator.manual_seed(4)) * (12 - torch.arange(12))
        pool.keys[:], pool.values[:] = stored or (
            pack.decode(pack.encode(states), 12, 16, torch.float32)
            for pack, states in ((found.keys, keys), (found.values, values))
        )
    before = packed.values.clone()
    for pool in (packed, exact):
        (taken,) = evict([pool], 0, [12], [np.array([np.arange(12) != 9] * 2)])
        pool.fold(0, 11, taken)
    weights = [pool.states[1][0, :, :11] for pool in (packed, exact)]
    torch.testing.assert_close(*weights)
    grown = weights[0] != 0
    assert grown[:, 4].all()
    assert grown.sum() == 2
    expected = found.values.encode_rows(exact.values[0, :, 4])
    assert torch.equal(packed.values[0, :, 4], expected)
    rest = [slot for slot in range(11) if slot != 4]
    kept = [slot for slot in range(12) if slot not in {4, 9}]
    assert torch.equal(packed.values[0, :, rest], before[0, :, kept])


def test_weights_are_paid_for():
    shape = EnginePath(tiny_model("llama_grouped")).shape
    plain, merged = (
        grant(BudgetRequest.tokens(64), policy, shape)
        for policy in (PolicyRequest("h2o"), PolicyRequest("merged", "h2o"))
    )
    assert merged.bytes - plain.bytes == 4 * 64 * shape.layers * shape.kv_heads
    assert get_policy("merged", "scissorhands").shares_by_loss
    assert not get_policy("merged", "h2o").shares_by_loss
