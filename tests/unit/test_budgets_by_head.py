"""Budgets by head: stored without padding, and otherwise as if every KV head were decided alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.dense_reference import DenseSequence
from support.engine_path import EnginePath, kept_positions, policy_of
from support.oracle import RULES, assert_close, forward
from support.sliding_models import WINDOW, sliding_model
from support.tiny_models import random_tokens, tiny_model

from scissorhands import view
from scissorhands.archive import decode_section, encode_segment
from scissorhands.budget import BudgetRequest, Grant, ModelShape
from scissorhands.budgeted import BudgetedCache
from scissorhands.codec import get_codec
from scissorhands.explain.record import record
from scissorhands.grant import slots_text
from scissorhands.kernels import cpu_launch
from scissorhands.kernels.cpu_launch import Call
from scissorhands.probe import model_shape
from scissorhands.row import Eviction, Row
from scissorhands.segment import SegmentIdentity, check_segment

PROMPT, TOKENS = 57, 130
MODEL = "llama_grouped"


def by_head(even: Grant, shape: ModelShape, extra: tuple[tuple[int, ...], ...] = ()) -> Grant:
    """Return a grant whose KV heads have the budgets of their layers, plus ``extra`` of each global layer and head."""
    slots = [own for own in even.layer_slots for _ in range(shape.kv_heads)]
    heads = shape.split().global_layers
    more = [n for layer in extra for n in layer] or [0] * len(heads)
    for head, n in zip(heads, more, strict=True):
        slots[head] += n
    fixed = sum(shape.layer_windows) * shape.kv_heads * shape.slot_bytes
    per_slot = (even.bytes - fixed) // sum(even.layer_slots[head // shape.kv_heads] for head in heads)
    return replace(even, layer_slots=tuple(slots), bytes=even.bytes + per_slot * sum(more), by_head=True)


def by_layer(kept: list[list[list[int]]], shape: ModelShape) -> list[list[list[int]]]:
    """Return positions of each layer and head, given those of each head as a layer of its own."""
    heads = [head for layer in kept for head in layer]
    return [heads[start : start + shape.kv_heads] for start in range(0, len(heads), shape.kv_heads)]


def assert_same(split: Row, whole: Row, shape: ModelShape) -> None:
    """Two rows, by head and not, hold the same tokens and have learned the same of them."""
    assert split.epoch == whole.epoch
    assert by_layer(kept_positions(split), shape) == kept_positions(whole)
    for layer, pool in enumerate(whole.pool.layers):
        expected = pool.evidence(whole.index, whole.lengths[layer], whole.step)
        found = [
            split.pool.layers[part].evidence(split.index, split.lengths[part], split.step)
            for part in split.pool.parts(layer)
        ]
        for name, signal in expected.signals.items():
            actual = np.concatenate([head.signals[name] for head in found])
            assert actual.dtype == signal.dtype
            np.testing.assert_allclose(actual, signal, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["default", "paper", "snapkv"])
def test_equal_budgets_keep_what_they_keep_layer_by_layer(policy):
    model, rules = tiny_model(MODEL), RULES[policy]
    engine, other = EnginePath(model), EnginePath(model)
    even = engine.grant(rules)
    split = engine.cache.add_row(by_head(even, engine.shape))
    whole = other.cache.add_row(even)
    assert engine.cache.allocated_bytes() == other.cache.allocated_bytes() == even.bytes == split.grant.bytes
    cache = BudgetedCache(model, BudgetRequest.tokens(rules.B), policy_of(rules))
    cache.grant = split.grant
    tokens = random_tokens(TOKENS, seed=1)
    expected = other.read(whole, tokens[:PROMPT])
    assert_close(engine.read(split, tokens[:PROMPT]), expected)
    assert_close(forward(model, cache, tokens[:PROMPT]), expected)
    for token in tokens[PROMPT:]:
        expected = other.decode([whole], token.reshape(1))[0]
        assert_close(engine.decode([split], token.reshape(1))[0], expected)
        assert_close(forward(model, cache, token.reshape(1))[0], expected)
        assert kept_positions(split) == kept_positions(cache.rows[0])
    assert_same(split, whole, engine.shape)
    assert_same(cache.rows[0], whole, engine.shape)
    assert whole.epoch > 6
    assert [eviction.mass() for eviction in engine.evictions] == pytest.approx(
        [eviction.mass() for eviction in other.evictions], rel=1e-4
    )


@pytest.mark.parametrize("policy", ["default", "paper", "protected"])
def test_unequal_budgets_equal_the_dense_reference(policy):
    model, numbers = tiny_model(MODEL), RULES[policy]
    engine = EnginePath(model)
    # The last head has no room for all of its recent slots.
    extra = ((9, 0), (2, -min(6, numbers.r)))
    rules = replace(numbers, B=tuple(tuple(numbers.B + n for n in layer) for layer in extra))
    granted = by_head(engine.grant(numbers), engine.shape, extra)
    row = engine.cache.add_row(granted)
    cache = BudgetedCache(model, BudgetRequest.tokens(numbers.B), policy_of(numbers))
    cache.grant = granted
    reference = DenseSequence(model, rules, TOKENS)
    tokens = random_tokens(TOKENS, seed=2)
    expected = reference.read(tokens[:PROMPT])
    assert_close(engine.read(row, tokens[:PROMPT]), expected)
    assert_close(forward(model, cache, tokens[:PROMPT]), expected)
    for token in tokens[PROMPT:]:
        expected = reference.decode(token)
        assert_close(engine.decode([row], token.reshape(1))[0], expected)
        assert_close(forward(model, cache, token.reshape(1))[0], expected)
        for each in (row, cache.rows[0]):
            assert by_layer(kept_positions(each), engine.shape) == reference.kept()
        assert all(n <= most for n, most in zip(row.lengths, granted.layer_slots, strict=True))
        assert engine.cache.allocated_bytes() == cache.allocated_bytes() == granted.bytes
    assert row.epoch == cache.rows[0].epoch == reference.evictions > 6
    assert len({*row.lengths}) > 2
    assert cache.evicted_slots == sum(eviction.slots for eviction in engine.evictions)
    dropped = sum(layer.dropped_mass for layer in reference.layers)
    heads = engine.shape.layers * engine.shape.kv_heads
    assert sum(eviction.mass() for eviction in engine.evictions) == pytest.approx(dropped, rel=1e-4)
    assert cache.mass_dropped_share() == pytest.approx(dropped / heads / TOKENS, rel=1e-4)
    for eviction in engine.evictions:
        assert_segment_holds(eviction, engine.shape, reference)


def assert_segment_holds(eviction: Eviction, shape: ModelShape, reference: DenseSequence) -> None:
    """A segment has the model's layers and heads, and each section decodes to what was evicted there."""
    codec = get_codec("none", shape.head_dim)
    texts = dict.fromkeys(SegmentIdentity.__dataclass_fields__, "x") | {"codec": codec.name}
    identity = SegmentIdentity(**texts | {"layer_slots": slots_text(eviction.row.grant)})
    data = encode_segment(
        identity, eviction.epoch, eviction.step, eviction.layers, codec, shape.head_dim, shape.kv_heads
    )
    header = check_segment(data)
    assert (header.layers, header.kv_heads) == (shape.layers, shape.kv_heads)
    for layer, of_layer in enumerate(reference.layers):
        for head in range(shape.kv_heads):
            section = header.section(layer, head)
            bare = data[section.offset : section.offset + section.size]
            positions, keys, values = decode_section(bare, section.slots, codec, shape.head_dim, torch.float32)
            assert_close(keys, of_layer.keys[head, positions.long()])
            assert_close(values, of_layer.values[head, positions.long()])
            assert not of_layer.keep[head, positions.long()].any()


def test_rows_of_both_kinds_step_together_as_if_alone():
    engine, alone = (EnginePath(tiny_model(MODEL)) for _ in range(2))
    evens = [engine.grant(RULES[name]) for name in ("default", "h2o")]
    uneven = by_head(evens[0], engine.shape, ((9, 0), (2, -6)))
    grants = [evens[0], uneven, by_head(evens[0], engine.shape), evens[1], uneven, by_head(evens[1], engine.shape)]
    rows, solos = [], []
    for index, granted in enumerate(grants):
        for path, into in ((engine, rows), (alone, solos)):
            into.append(path.cache.add_row(granted))
            path.read(into[-1], random_tokens(20 + 9 * index, seed=index))
    for step, token in enumerate(random_tokens(90, seed=7)):
        logits = engine.decode(rows, token.repeat(len(rows)))
        for row, solo, actual in zip(rows, solos, logits, strict=True):
            assert_close(actual, alone.decode([solo], token.reshape(1))[0])
            assert kept_positions(row) == kept_positions(solo)
        if step == 40:  # The last row of its pool takes the place of the one that goes.
            engine.cache.remove_row(rows.pop(1))
            alone.cache.remove_row(solos.pop(1))
        assert engine.cache.allocated_bytes() == sum(row.grant.bytes for row in rows)
    assert min(row.epoch for row in rows) > 5


def test_a_left_padded_batch_equals_its_rows_alone():
    model, rules, lengths = tiny_model(MODEL), RULES["default"], (61, 44, 9)
    engine = EnginePath(model)
    granted = by_head(engine.grant(rules), engine.shape, ((9, 0), (2, -6)))
    ids, mask = torch.zeros(2, len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = random_tokens(length, seed=row)
        mask[row, -length:] = 1
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    cache = BudgetedCache(model, BudgetRequest.tokens(rules.B), policy_of(rules))
    cache.grant = granted
    found = model.generate(ids, attention_mask=mask, cache=cache, **options)
    for index, length in enumerate(lengths):
        row = engine.cache.add_row(granted)
        answer = [engine.read(row, ids[index, -length:])[-1].argmax()]
        while len(answer) < 60:
            answer.append(engine.decode([row], answer[-1].reshape(1))[0].argmax())
        assert found[index, max(lengths) :].tolist() == [int(token) for token in answer]
        assert kept_positions(cache.rows[index]) == kept_positions(row)


# One call goes over all heads of a layer whose evidence is mass alone, and else one over each head.
@pytest.mark.parametrize(("rules", "first"), [("h2o", 2), ("tova", 1), ("tova", 2)])
def test_a_pass_that_failed_halfway_is_repeated_without_counting_twice(rules, first, monkeypatch):
    engine = EnginePath(tiny_model(MODEL))
    granted = by_head(engine.grant(RULES[rules]), engine.shape, ((9, 0), (2, -6)))
    row, twin = engine.cache.add_row(granted), engine.cache.add_row(granted)
    for each in (row, twin):
        engine.read(each, random_tokens(20, seed=1))
    broken = row.pool.layers[first]

    def failing(attend):
        def fail(place, *rest, **options):
            if place is broken or (isinstance(place, Call) and place.layers.start == first):
                raise RuntimeError("boom")
            return attend(place, *rest, **options)

        return fail

    with monkeypatch.context() as patch:
        for module in (view, cpu_launch):
            patch.setattr(module, "attend", failing(module.attend))
        with pytest.raises(RuntimeError, match="boom"):
            engine.forward([row], torch.tensor([[5]]))
    repeated, expected = engine.forward([row, twin], torch.tensor([[5], [5]]))
    assert_close(repeated, expected)
    for layer, pool in enumerate(row.pool.layers):
        first_evidence, second = (pool.evidence(each.index, each.lengths[layer], each.step) for each in (row, twin))
        for name, signal in first_evidence.signals.items():
            np.testing.assert_allclose(signal, second.signals[name], rtol=1e-5)


def test_sliding_layers_hold_their_windows_head_by_head():
    model, rules = sliding_model("gemma3"), RULES["default"]
    windows = model_shape(model).layer_windows
    engine = EnginePath(model)
    granted = by_head(engine.grant(rules), engine.shape, ((7, -5),))
    row = engine.cache.add_row(granted)
    numbers = replace(rules, B=((rules.B + 7, rules.B - 5),))
    reference = DenseSequence(model, numbers, 3 * WINDOW + 60, windows)
    tokens = random_tokens(3 * WINDOW + 60, seed=3)
    assert_close(engine.read(row, tokens[: 3 * WINDOW]), reference.read(tokens[: 3 * WINDOW]))
    for token in tokens[3 * WINDOW :]:
        assert_close(engine.decode([row], token.reshape(1))[0], reference.decode(token))
        assert by_layer(kept_positions(row), engine.shape) == reference.kept()
        assert engine.cache.allocated_bytes() == granted.bytes
    assert row.epoch == reference.evictions > 3


def test_explaining_tells_what_each_head_dropped():
    model = tiny_model(MODEL)
    engine = EnginePath(model)
    even = engine.grant(RULES["h2o"])
    prompt = random_tokens(PROMPT, seed=4).tolist()
    whole, split, uneven = (
        record(model, granted, prompt, 30)
        for granted in (even, by_head(even, engine.shape), by_head(even, engine.shape, ((9, 0), (2, -6))))
    )
    assert split.ids == whole.ids
    np.testing.assert_array_equal(split.dropped_at, whole.dropped_at)
    np.testing.assert_allclose(split.mass, whole.mass, rtol=1e-4)
    assert split.allocated_bytes == whole.allocated_bytes
    # Every query gives each head 1 in all.
    np.testing.assert_allclose(uneven.mass.sum(axis=2), uneven.appended, rtol=1e-4)
    held = (uneven.dropped_at == 0).sum(axis=2)
    assert np.all(held <= np.reshape(uneven.grant.layer_slots, held.shape))
    assert len({*held.ravel().tolist()}) > 2
