"""Sliding layers: they see their window, exactly, whatever the budget is and however their tokens come."""

import pytest
import torch
from support.dense_reference import DenseSequence
from support.engine_path import EnginePath, policy_of
from support.oracle import RULES, assert_close, assert_kept, forward
from support.sliding_models import SLIDING_MODELS, WINDOW, sliding_model
from support.tiny_models import VOCABULARY, random_tokens
from transformers import DynamicCache

from scissorhands.archive import encode_segment
from scissorhands.budget import BudgetRequest, ModelShape, slots_to_drop
from scissorhands.budgeted import BudgetedCache
from scissorhands.codec import get_codec
from scissorhands.errors import BudgetTooSmallError, EngineError, InvalidRequestError
from scissorhands.grant import PolicyRequest, grant
from scissorhands.plan import plan
from scissorhands.probe import model_shape
from scissorhands.segment import SegmentIdentity, check_segment

PROMPT, NEW = 3 * WINDOW + 5, 2 * WINDOW
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
# One global layer, two sliding ones.
SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=8, element_bytes=4, layer_windows=(0, WINDOW, WINDOW))
SLIDING_BYTES = 2 * WINDOW * 2 * (2 * 8 * 4)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return three prompts, padded on the left: longer than the window, shorter than it, and in between."""
    ids, mask = torch.zeros(2, 3, PROMPT, dtype=torch.long)
    for row, length in enumerate((PROMPT, WINDOW - 7, 2 * WINDOW + 1)):
        ids[row, -length:] = random_tokens(length, seed=row)
        mask[row, -length:] = 1
    return ids, mask


@pytest.mark.parametrize("rows", [1, 3], ids=["solo", "batch"])
@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_a_budget_of_everything_equals_transformers(name, rows):
    model = sliding_model(name)
    ids, mask = (tensor[:rows] for tensor in batch())
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    # A chunk that is smaller than the window, one that is larger, and the whole prompt at once.
    for chunk in (WINDOW - 3, WINDOW + 3, PROMPT):
        policy = PolicyRequest("scissorhands", parameters={"chunk": chunk})
        cache = BudgetedCache(model, BudgetRequest.fraction(1.0), policy, total_tokens=PROMPT + NEW)
        found = model.generate(ids, attention_mask=mask, cache=cache, **GREEDY)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits))
        assert cache.evicted_slots == 0
        assert cache.allocated_bytes() == rows * cache.grant.bytes


@pytest.mark.parametrize("policy", ["default", "h2o"])
@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_a_real_budget_equals_the_dense_reference(name, policy):
    model, rules = sliding_model(name), RULES[policy]
    tokens = random_tokens(PROMPT + 150, seed=2)
    windows = model_shape(model).layer_windows
    reference = DenseSequence(model, rules, len(tokens), windows)
    engine = EnginePath(model)
    row = engine.add(rules)
    assert row.grant.layer_slots == tuple(window or rules.B for window in windows)
    cache = BudgetedCache(model, BudgetRequest.tokens(rules.B), policy_of(rules))
    expected = reference.read(tokens[:PROMPT])
    assert_close(engine.read(row, tokens[:PROMPT]), expected)
    assert_close(forward(model, cache, tokens[:PROMPT]), expected)
    for token in tokens[PROMPT:]:
        expected = reference.decode(token)
        assert_close(engine.decode([row], token.reshape(1))[0], expected)
        assert_close(forward(model, cache, token.reshape(1))[0], expected)
        assert_kept(row, reference)
        assert_kept(cache.rows[0], reference)
    governed = windows.count(0)
    assert (row.epoch > 20) == (cache.evicted_slots > 0) == (governed > 0)
    assert row.epoch == cache.rows[0].epoch == reference.evictions
    # Every policy's evidence is gathered in the global layers alone, and nothing is evicted from the others.
    assert all(
        (layer.positions.numel() == 0) == bool(window)
        for eviction in engine.evictions
        for layer, window in zip(eviction.layers, windows, strict=True)
    )
    heads = governed * engine.shape.kv_heads
    dropped = sum(eviction.mass() for eviction in engine.evictions)
    assert dropped == pytest.approx(sum(layer.dropped_mass for layer in reference.ruled), rel=1e-4)
    assert cache.mass_dropped_share() == pytest.approx(dropped / (heads * len(tokens)) if heads else 0.0, rel=1e-4)


@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_rows_of_other_lengths_beside_it_change_nothing(name):
    model, rules = sliding_model(name), RULES["default"]
    engine = EnginePath(model)
    lengths = (WINDOW - 9, WINDOW, 3 * WINDOW + 1)
    together, alone = ([engine.add(rules) for _ in lengths] for _ in range(2))
    for index, length in enumerate(lengths):
        for row in (together[index], alone[index]):
            engine.read(row, random_tokens(length, seed=index))
    for token in random_tokens(40, seed=9):
        logits = engine.decode(together, token.repeat(len(lengths)))
        for row, expected in zip(alone, logits, strict=True):
            assert_close(engine.decode([row], token.reshape(1))[0], expected)


def test_blocks_of_decoded_tokens_equal_single_ones():
    # Evaluation feeds tokens in blocks, which end where an eviction is due.
    engine = EnginePath(sliding_model("gemma3"))
    tokens = random_tokens(120, seed=4)
    granted = grant(BudgetRequest.tokens(120), PolicyRequest("full"), engine.shape, 120)
    row, other = engine.cache.add_row(granted), engine.cache.add_row(granted)
    single = torch.cat([engine.decode([row], token.reshape(1)) for token in tokens])
    parts = tokens.split([1, 7, WINDOW, 1, 2 * WINDOW + 3, 1, 59])
    assert_close(torch.cat([engine.forward([other], part.unsqueeze(0))[0] for part in parts]), single)


def test_a_repeated_token_changes_nothing_and_a_repeated_chunk_is_refused():
    engine = EnginePath(sliding_model("qwen2"))
    row, twin = engine.add(RULES["h2o"]), engine.add(RULES["h2o"])
    for each in (row, twin):
        engine.read(each, random_tokens(WINDOW + 4, seed=1))
    last = torch.tensor([[5], [5]])
    for tokens in (last, torch.tensor([[5, 6, 7]] * 2)):
        handle = engine.model.model.layers[2].register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="boom"):
            engine.forward([row], tokens[:1])
        handle.remove()
        if tokens is last:
            assert_close(engine.forward([row], tokens[:1]), engine.forward([twin], tokens[1:]))
        else:
            with pytest.raises(EngineError, match="a chunk cannot be repeated over a sliding window"):
                engine.forward([row], tokens[:1])


def test_a_sequence_longer_than_was_said_is_refused_before_it_is_answered_wrongly():
    model = sliding_model("mistral")
    cache = BudgetedCache(model, BudgetRequest.fraction(1.0), total_tokens=10)
    forward(model, cache, random_tokens(10, seed=0))
    with pytest.raises(InvalidRequestError, match="total_tokens: was 10, but the sequence has 11 tokens"):
        forward(model, cache, random_tokens(1, seed=0))


class TestGrants:
    """A budget governs the global layers; sliding ones take their window."""

    @pytest.mark.parametrize(("total", "slots"), [(1000, (64, WINDOW, WINDOW)), (10, (10, 10, 10)), (40, (40, 16, 16))])
    def test_slots(self, total, slots):
        assert grant(BudgetRequest.tokens(64), PolicyRequest("h2o"), SHAPE, total).layer_slots == slots

    def test_bytes_count_every_layer(self):
        granted = grant(BudgetRequest.tokens(64), PolicyRequest("h2o"), SHAPE, 1000)
        # Position and mass, 8 bytes, only where a policy decides.
        assert granted.bytes == SLIDING_BYTES + 64 * 2 * (2 * 8 * 4 + 8)

    def test_a_budget_in_bytes_is_that_of_all_layers(self):
        for amount in range(SLIDING_BYTES + 10_000, SLIDING_BYTES + 12_000, 97):
            granted = grant(BudgetRequest.bytes(amount), PolicyRequest("h2o"), SHAPE, 1000)
            assert amount - 2 * (2 * 8 * 4 + 8) < granted.bytes <= amount

    def test_bytes_that_leave_the_global_layer_too_little_are_refused_with_what_would_do(self):
        with pytest.raises(BudgetTooSmallError, match="smallest is") as caught:
            grant(BudgetRequest.bytes(SLIDING_BYTES), PolicyRequest("h2o"), SHAPE, 1000)
        smallest = SLIDING_BYTES + caught.value.smallest * 2 * (2 * 8 * 4 + 8)
        assert f"the smallest is {smallest} bytes" in str(caught.value)
        assert grant(BudgetRequest.bytes(smallest), PolicyRequest("h2o"), SHAPE, 1000).bytes == smallest

    def test_a_layer_without_slots_in_a_snapshot_drops_nothing(self):
        numbers = grant(BudgetRequest.tokens(64), PolicyRequest("h2o"), SHAPE, 1000).parameters
        assert slots_to_drop([64, 0, 0], (64, 16, 16), numbers, incoming=1) == [numbers.drop, 0, 0]
        # Neither does a chunk that is longer than its window make the others drop.
        assert slots_to_drop([30, 0, 0], (64, 16, 16), numbers, incoming=20) == [0, 0, 0]
        assert slots_to_drop([56, 0, 0], (64, 16, 16), numbers, incoming=1, ahead=8) == [numbers.drop, 0, 0]


@pytest.mark.parametrize("tokens", [WINDOW - 4, 3 * WINDOW])
@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_the_full_cache_is_the_one_that_transformers_would_hold(name, tokens):
    model = sliding_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 3 + tokens).unsqueeze(0) % VOCABULARY, cache=cache, use_cache=True)
    held = sum(states.numel() for layer in cache.layers for states in (layer.keys, layer.values))
    assert model_shape(model).full_bytes(tokens) == held * 4
    assert model_shape(model).full_bytes(tokens, 2) == held * 2


def test_a_segment_has_empty_sections_for_sliding_layers():
    engine = EnginePath(sliding_model("gemma3"))
    row = engine.add(RULES["default"])
    engine.read(row, random_tokens(PROMPT, seed=0))
    eviction = engine.evictions[0]
    texts = dict.fromkeys(SegmentIdentity.__dataclass_fields__, "x")
    head_dim = engine.shape.head_dim
    for name in ("int4", "none"):
        data = encode_segment(SegmentIdentity(**texts), 0, PROMPT, eviction.layers, get_codec(name, head_dim), head_dim)
        header = check_segment(data)
        sizes = [[header.section(layer, head).slots for head in range(2)] for layer in range(3)]
        assert sizes[0] == sizes[2] == [0, 0]
        assert header.slots == sum(sizes[1]) == eviction.slots


def test_a_plan_says_nothing_about_sliding_layers():
    engine = EnginePath(sliding_model("gemma3"))
    row = engine.add(RULES["default"])
    engine.read(row, random_tokens(PROMPT, seed=0))
    snapshot = engine.cache.snapshot(row, ahead=0, incoming=RULES["default"].c)
    assert [layer.length for layer in snapshot.layers] == [0, row.lengths[1], 0]
    assert [layer.signals for layer in snapshot.layers[::2]] == [{}, {}]
    decided = plan(row.grant, snapshot)
    assert [keep.shape[1] for keep in decided.keep] == [0, row.lengths[1], 0]
    assert row.lengths[::2] == [WINDOW, WINDOW]


def _fail(*args: object) -> None:
    raise RuntimeError("boom")
