"""Views: a pass that failed halfway can be repeated, and what an evicting cache cannot do is refused."""

import contextlib

import numpy as np
import pytest
import torch
from support.engine_path import EnginePath, kept_positions
from support.oracle import RULES, assert_close
from support.tiny_models import random_tokens, tiny_model

from scissorhands.attention import adjacent_runs, attention_forward, padding_mask
from scissorhands.errors import InvalidRequestError, UnsupportedModelError
from scissorhands.view import StepView

PROMPT = 35


class BoomError(RuntimeError):
    """What a failing layer raises."""


@contextlib.contextmanager
def failing(module, *, after: bool = False, rows: int | None = None):
    """Make a module raise, before or after its work; with ``rows``, only for batches of that many rows."""

    def fail(*args):
        inputs = args[1]
        if rows is None or inputs[0].shape[0] == rows:
            raise BoomError

    handle = module.register_forward_hook(fail) if after else module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


# Where a pass of the tiny Llama may fail: before any attention, between the layers', and after the last.
PLACES = {
    "before layer 0": (lambda model: model.model.layers[0], False),
    "after attention 0": (lambda model: model.model.layers[0].post_attention_layernorm, False),
    "before layer 1": (lambda model: model.model.layers[1], False),
    "after layer 1": (lambda model: model.model.layers[1].mlp, True),
    "at the end": (lambda model: model.lm_head, True),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", RULES)
def test_a_pass_that_failed_is_repeated_as_if_nothing_had_been(policy, place):
    model = tiny_model("llama_grouped")
    find, after = PLACES[place]
    spoiled, untouched = EnginePath(model), EnginePath(model)
    row, twin = spoiled.add(RULES[policy]), untouched.add(RULES[policy])
    tokens = random_tokens(85, seed=4)
    done = 0
    while done < len(tokens):
        decoding = done >= PROMPT
        size = 1 if decoding else row.next_chunk(PROMPT - done)
        new = tokens[None, done : done + size]
        for engine, its_row in ((spoiled, row), (untouched, twin)):
            if decoding:
                engine.cache.prepare_decode(its_row)
            else:
                engine.cache.prepare_prefill(its_row, size)
        # Every pass of the prompt, and of decoding two in five: also those after an eviction and a turn of the buckets.
        if not decoding or done % 5 < 2:
            for _ in range(1 + done % 2):
                with failing(find(model), after=after), pytest.raises(BoomError):
                    spoiled.forward([row], new)
        assert torch.equal(spoiled.forward([row], new), untouched.forward([twin], new))
        assert_same_state(row, twin)
        done += size
    assert row.epoch > 3


def test_a_batch_that_failed_can_be_stepped_row_by_row():
    # As an engine does to find out whose fault it was. The rows are in two pools, and one of them never gets through.
    model = tiny_model("llama_grouped")
    spoiled, untouched = EnginePath(model), EnginePath(model)
    rules = [RULES["default"], RULES["h2o"], RULES["default"]]
    rows, twins = ([engine.add(rule) for rule in rules] for engine in (spoiled, untouched))
    tokens = [random_tokens(150, seed=seed) for seed in range(3)]
    for engine, its_rows in ((spoiled, rows), (untouched, twins)):
        for row, own in zip(its_rows, tokens, strict=True):
            engine.read(row, own[:PROMPT])
    for step in range(PROMPT, 100):
        new = torch.stack([own[step] for own in tokens])
        with failing(model.model.layers[1], rows=3), pytest.raises(BoomError):
            spoiled.decode(rows, new)
        for index, row in enumerate(rows):
            alone = spoiled.decode([row], new[index : index + 1])
            assert_close(alone, untouched.decode([twins[index]], new[index : index + 1]))
    for row, twin in zip(rows, twins, strict=True):
        assert_same_state(row, twin)


def test_rows_that_got_differently_far_are_told_apart():
    # One of two neighbors in a pool failed in a later layer than the other; together they are repeated rightly.
    model = tiny_model("llama_grouped")
    spoiled, untouched = EnginePath(model), EnginePath(model)
    rows, twins = ([engine.add(RULES["default"]) for _ in range(2)] for engine in (spoiled, untouched))
    tokens = random_tokens(60, seed=2)
    for engine, its_rows in ((spoiled, rows), (untouched, twins)):
        for row in its_rows:
            engine.read(row, tokens[:PROMPT])
    with failing(model.model.layers[1]), pytest.raises(BoomError):
        spoiled.decode(rows[:1], tokens[PROMPT : PROMPT + 1])
    new = tokens[PROMPT : PROMPT + 1].repeat(2)
    assert_close(spoiled.decode(rows, new), untouched.decode(twins, new))
    for row, twin in zip(rows, twins, strict=True):
        assert_same_state(row, twin)


def test_a_view_used_for_several_passes_places_each_anew():
    model = tiny_model("llama_grouped")
    engine, other = EnginePath(model), EnginePath(model)
    row, twin = engine.add(RULES["default"]), other.add(RULES["default"])
    tokens = random_tokens(130, seed=5)
    engine.read(row, tokens[:PROMPT])
    other.read(twin, tokens[:PROMPT])
    view = StepView([row])
    for step in range(PROMPT, 130):
        engine.cache.prepare_decode(row)
        with torch.inference_mode():
            logits = model(
                input_ids=tokens[None, step : step + 1], position_ids=torch.tensor([[step]]), cache=view, use_cache=True
            ).logits[:, 0]
        view.commit(1)
        assert torch.equal(logits, other.decode([twin], tokens[step : step + 1]))
    # The same slot has been filled more than once by now, each time by another token.
    assert row.epoch > 3
    assert kept_positions(row) == kept_positions(twin)


def test_a_view_tells_transformers_about_tokens_seen_and_never_about_slots():
    engine = EnginePath(tiny_model("llama_grouped"))
    rows = [engine.add(RULES["default"]) for _ in range(2)]
    assert StepView([]).get_seq_length() == 0
    assert StepView([]).batch_size == -1
    assert not StepView([]).is_initialized
    assert len(StepView([])) == 0
    engine.read(rows[0], random_tokens(90, seed=1))
    engine.read(rows[1], random_tokens(20, seed=2))
    view = StepView(rows)
    assert rows[0].lengths[0] < 90
    assert view.get_seq_length() == view.get_seq_length(1) == 90
    assert view.get_mask_sizes(1, 0) == (91, 0)
    assert view.get_max_length() == -1
    assert view.batch_size == 2
    assert view.is_initialized
    assert not view.is_compileable
    assert not view.is_croppable
    assert len(view) == 2


@pytest.mark.parametrize(
    ("method", "argument", "field"),
    [
        ("reorder_cache", torch.tensor([0]), "num_beams"),
        ("crop", -1, "crop"),
        ("batch_repeat_interleave", 2, "batch"),
        ("batch_select_indices", torch.tensor([0]), "batch"),
    ],
)
def test_what_an_evicting_cache_cannot_do_is_refused(method, argument, field):
    with pytest.raises(InvalidRequestError) as caught:
        getattr(StepView([]), method)(argument)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("places", "runs"),
    [
        ([], []),
        ([(7, 0)], [(0, 1)]),
        ([(7, 0), (7, 1), (7, 2)], [(0, 3)]),
        ([(7, 0), (7, 2)], [(0, 1), (1, 2)]),
        ([(7, 1), (7, 0)], [(0, 1), (1, 2)]),
        ([(7, 0), (8, 1), (8, 2), (7, 3)], [(0, 1), (1, 3), (3, 4)]),
    ],
)
def test_runs_are_adjacent_rows_of_one_pool(places, runs):
    assert adjacent_runs(places) == runs


class TestAttentionFunction:
    """What transformers calls."""

    states = torch.zeros(1, 2, 1, 4)

    def test_without_our_cache_it_says_what_to_do(self):
        with pytest.raises(UnsupportedModelError, match=r"without a scissorhands cache.*set_attn_implementation"):
            attention_forward(torch.nn.Linear(1, 1), self.states, self.states, self.states, None)

    @pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"head_mask": 1}])
    def test_what_it_does_not_compute_is_refused(self, asked):
        tagged, values = StepView([]).update(self.states, self.states, 0)
        with pytest.raises(UnsupportedModelError, match=f"Linear asks .* not supported: .*{next(iter(asked))}"):
            attention_forward(torch.nn.Linear(1, 1), self.states, tagged, values, None, **asked)

    def test_dropout_is_refused(self):
        tagged, values = StepView([]).update(self.states, self.states, 0)
        with pytest.raises(UnsupportedModelError, match="dropout"):
            attention_forward(torch.nn.Linear(1, 1), self.states, tagged, values, None, dropout=0.1)

    def test_a_window_that_the_configuration_does_not_say_is_refused(self):
        mask = padding_mask(1, 1, 1, attention_mask=torch.ones(1, 1), local_size=8)
        tagged, values = StepView([]).update(self.states, self.states, 0)
        for told in ({"attention_mask": mask}, {"attention_mask": None, "sliding_window": 8}):
            with pytest.raises(UnsupportedModelError, match=r"Linear attends within 8 tokens, .* says all"):
                attention_forward(torch.nn.Linear(1, 1), self.states, tagged, values, **told)

    def test_the_tag_leaves_the_models_own_tensor_alone(self):
        turned = torch.arange(24.0).view(1, 3, 2, 4).transpose(1, 2)
        for keys in (self.states, turned):
            tagged, values = StepView([]).update(keys, self.states, 1)
            assert torch.equal(tagged, keys)
            assert values is self.states
            with pytest.raises(UnsupportedModelError, match="without a scissorhands cache"):
                attention_forward(torch.nn.Linear(1, 1), keys, keys, keys, None)


def assert_same_state(row, twin):
    __tracebackhide__ = True
    assert (row.lengths, row.step, row.epoch, row.observed_layers) == (
        twin.lengths,
        twin.step,
        twin.epoch,
        twin.observed_layers,
    )
    for pool, other, n in zip(row.pool.layers, twin.pool.layers, row.lengths, strict=True):
        evidence, expected = pool.evidence(row.index, n, row.step), other.evidence(twin.index, n, twin.step)
        assert np.array_equal(evidence.positions, expected.positions)
        for name, signal in evidence.signals.items():
            np.testing.assert_allclose(signal, expected.signals[name], rtol=1e-6, atol=1e-7)
        assert_close(pool.keys[row.index, :, :n], other.keys[twin.index, :, :n])
        assert_close(pool.values[row.index, :, :n], other.values[twin.index, :, :n])
