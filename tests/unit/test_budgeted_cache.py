"""The cache inside a transformers program: ``model.generate`` with a hard budget."""

import pytest
import torch
from support.dense_reference import DenseSequence
from support.engine_path import policy_of
from support.oracle import RULES, assert_close, assert_kept, forward
from support.tiny_models import TINY_MODELS, random_tokens, tiny_model

from scissorhands.attention import NAME
from scissorhands.budget import BudgetRequest
from scissorhands.budgeted import BudgetedCache
from scissorhands.errors import BudgetTooSmallError, InvalidRequestError
from scissorhands.grant import PolicyRequest

NEW = 40
# No end-of-sequence: every row runs to the end.
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LENGTHS = (50, 37, 1)


def padded_batch():
    """Return left-padded ids and their mask."""
    ids, mask = torch.zeros(2, len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, -length:] = random_tokens(length, seed=row)
        mask[row, -length:] = 1
    return ids, mask


def plain_generate(model, ids, **options):
    model.set_attn_implementation("eager")
    return model.generate(ids, **{**GREEDY, **options})


class TestBudgetAtTheLength:
    """Nothing is evicted, so the tokens are exactly transformers' own."""

    @pytest.mark.parametrize("name", TINY_MODELS)
    def test_solo(self, name):
        model = tiny_model(name)
        ids = random_tokens(50, seed=1).unsqueeze(0)
        expected = plain_generate(model, ids)
        cache = BudgetedCache(model, BudgetRequest.tokens(50 + NEW))
        assert torch.equal(model.generate(ids, cache=cache, **GREEDY), expected)
        assert cache.evicted_slots == 0
        assert cache.mass_dropped_share() == 0

    @pytest.mark.parametrize("name", TINY_MODELS)
    def test_left_padded_batch(self, name):
        model = tiny_model(name)
        ids, mask = padded_batch()
        expected = plain_generate(model, ids, attention_mask=mask)
        cache = BudgetedCache(model, BudgetRequest.tokens(50 + NEW))
        assert torch.equal(model.generate(ids, attention_mask=mask, cache=cache, **GREEDY), expected)
        assert [row.step for row in cache.rows] == [length + NEW - 1 for length in LENGTHS]

    @pytest.mark.parametrize("budget", [BudgetRequest.fraction(1.0), BudgetRequest.tokens(10**6)], ids=str)
    def test_a_length_that_is_known_bounds_what_is_allocated(self, budget):
        model = tiny_model("llama_grouped")
        ids = random_tokens(20, seed=1).unsqueeze(0)
        expected = plain_generate(model, ids)
        cache = BudgetedCache(model, budget, PolicyRequest("full"), total_tokens=20 + NEW)
        assert torch.equal(model.generate(ids, cache=cache, **GREEDY), expected)
        assert cache.grant.layer_slots == (20 + NEW,) * 2

    def test_rows_that_end_early_do_not_disturb_the_others(self):
        model = tiny_model("llama_grouped")
        ids, mask = padded_batch()
        free = plain_generate(model, ids, attention_mask=mask)
        ending = {"attention_mask": mask, "eos_token_id": int(free[0, 50 + 7])}
        expected = plain_generate(model, ids, **ending)
        assert (expected[0, 50 + 8 :] == 0).all()
        cache = BudgetedCache(model, BudgetRequest.tokens(50 + NEW))
        assert torch.equal(model.generate(ids, cache=cache, **{**GREEDY, **ending}), expected)


class TestSmallBudget:
    """What is kept, and what is allocated."""

    @pytest.mark.parametrize("policy", RULES)
    def test_greedy_tokens_are_the_references_solo_and_batched(self, policy):
        model, rules = tiny_model("llama_grouped"), RULES[policy]
        ids, mask = padded_batch()
        budget, request = BudgetRequest.tokens(rules.B), policy_of(rules)
        cache = BudgetedCache(model, budget, request)
        batched = model.generate(ids, attention_mask=mask, cache=cache, **GREEDY)
        for row, length in enumerate(LENGTHS):
            prompt = ids[row, -length:]
            expected = reference_greedy(DenseSequence(model, rules, 200), prompt, NEW)
            assert batched[row, -NEW:].tolist() == expected
            solo = BudgetedCache(model, budget, request)
            assert model.generate(prompt.unsqueeze(0), cache=solo, **GREEDY)[0, -NEW:].tolist() == expected
        assert cache.evicted_slots > 0
        assert 0 < cache.mass_dropped_share() < 1

    @pytest.mark.parametrize("policy", [*RULES, "full"])
    @pytest.mark.parametrize("name", ["llama_grouped", "gpt_neox"])
    def test_what_is_allocated_is_what_was_granted_in_every_layer_of_every_step(self, name, policy):
        model = tiny_model(name)
        if policy == "full":
            cache = BudgetedCache(model, BudgetRequest.tokens(100), PolicyRequest("full"))
        else:
            cache = BudgetedCache(model, BudgetRequest.tokens(RULES[policy].B), policy_of(RULES[policy]))
        measured = []
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                module.register_forward_hook(lambda *_: measured.append(storage_bytes(cache)))
        ids, mask = padded_batch()
        model.generate(ids, attention_mask=mask, cache=cache, **GREEDY)
        assert len(measured) == 2 * NEW
        assert set(measured) == {len(LENGTHS) * cache.grant.bytes} == {cache.allocated_bytes()}
        slots = cache.grant.layer_slots[0]
        assert all(n <= slots for row in cache.rows for n in row.lengths)

    def test_a_fifth_of_the_length_takes_a_fifth_of_the_bytes(self):
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.fraction(0.2), total_tokens=400)
        assert cache.grant.layer_slots == (80, 80)
        forward(model, cache, random_tokens(300, seed=1))
        keys_and_values = sum(
            tensor.untyped_storage().nbytes()
            for layer in cache.rows[0].pool.layers
            for tensor in (layer.keys, layer.values)
        )
        assert keys_and_values * 5 == 2 * 2 * 400 * 2 * 8 * 4, "two layers of two heads of keys and values of 8 float32"
        assert cache.allocated_bytes() == cache.grant.bytes

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_takes_half_the_bytes_for_keys_and_values(self, dtype):
        model = tiny_model("llama_grouped").to(dtype)
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        logits = forward(model, cache, random_tokens(90, seed=1))
        assert bool(torch.isfinite(logits).all())
        assert cache.allocated_bytes() == cache.grant.bytes == 2 * 2 * 40 * (2 * 8 * 2 + 8)

    def test_sampling_several_answers_makes_rows_of_them(self):
        model = tiny_model("llama_grouped")
        ids = random_tokens(30, seed=3).unsqueeze(0)
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        torch.manual_seed(0)
        options = {**GREEDY, "do_sample": True, "num_return_sequences": 3}
        assert model.generate(ids, cache=cache, **options).shape == (3, 30 + NEW)
        assert len(cache.rows) == 3


class TestSeveralTurns:
    """A second ``generate`` goes on with the same cache."""

    @pytest.mark.parametrize("policy", [*RULES, "full"])
    def test_the_second_turn_continues_the_first(self, policy):
        model = tiny_model("llama_grouped")
        turns = [random_tokens(30, seed=1), random_tokens(22, seed=2), random_tokens(1, seed=3)]
        if policy == "full":
            cache = BudgetedCache(model, BudgetRequest.tokens(200), PolicyRequest("full"))
            reference = None
        else:
            cache = BudgetedCache(model, BudgetRequest.tokens(RULES[policy].B), policy_of(RULES[policy]))
            reference = DenseSequence(model, RULES[policy], 300)
        text, unread = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        for turn in turns:
            text, unread = torch.cat([text, turn]), torch.cat([unread, turn])
            # An answer may contain the padding's token; without a mask transformers would take that for padding.
            options = {"attention_mask": torch.ones(1, len(text), dtype=torch.long)}
            full = plain_generate(model, text.unsqueeze(0), **options) if reference is None else None
            model.set_attn_implementation(NAME)
            answer = model.generate(text.unsqueeze(0), cache=cache, **options, **GREEDY)[0]
            expected = full[0, -NEW:].tolist() if reference is None else reference_greedy(reference, unread, NEW)
            assert answer[-NEW:].tolist() == expected
            assert cache.get_seq_length() == len(text) + NEW - 1
            text, unread = answer, answer[-1:]  # The last token has been chosen, but not read.
        if reference:
            assert_kept(cache.rows[0], reference)

    def test_a_batchs_second_turn_continues_each_row(self):
        model = tiny_model("llama_grouped")
        rules = RULES["default"]
        cache = BudgetedCache(model, BudgetRequest.tokens(rules.B), policy_of(rules))
        ids, mask = padded_batch()
        turns = torch.stack([random_tokens(22, seed=9 + row) for row in range(3)])
        text = torch.cat([model.generate(ids, attention_mask=mask, cache=cache, **GREEDY), turns], dim=1)
        mask = torch.cat([mask, torch.ones(3, NEW + 22, dtype=torch.long)], dim=1)
        answers = model.generate(text, attention_mask=mask, cache=cache, **GREEDY)
        for row, length in enumerate(LENGTHS):
            reference = DenseSequence(model, rules, 300)
            first = reference_greedy(reference, ids[row, -length:], NEW)
            assert text[row, 50 : 50 + NEW].tolist() == first
            second = reference_greedy(reference, torch.cat([torch.tensor(first[-1:]), turns[row]]), NEW)
            assert answers[row, -NEW:].tolist() == second

    def test_a_batchs_second_turn_cannot_be_padded(self):
        # The last token of the first answer is still unread, and would stand before the padding.
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        ids, mask = padded_batch()
        text = torch.cat([model.generate(ids, attention_mask=mask, cache=cache, **GREEDY), ids], dim=1)
        mask = torch.cat([mask, torch.ones(3, NEW, dtype=torch.long), mask], dim=1)
        with pytest.raises(InvalidRequestError, match="padding must be on the left"):
            model.generate(text, attention_mask=mask, cache=cache, **GREEDY)

    def test_a_prompt_read_in_parts_along_the_grid_is_as_if_read_at_once(self):
        model = tiny_model("llama_grouped")
        ids = random_tokens(75, seed=4).unsqueeze(0)
        whole, parts = (BudgetedCache(model, BudgetRequest.tokens(40)) for _ in range(2))
        expected = model.generate(ids, cache=whole, **GREEDY)
        size = 2 * whole.grant.parameters.chunk
        assert torch.equal(model.generate(ids, cache=parts, prefill_chunk_size=size, **GREEDY), expected)

    def test_reset_forgets_everything_and_frees_the_memory(self):
        model = tiny_model("llama_grouped")
        ids, mask = padded_batch()
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        assert cache.allocated_bytes() == 0
        first = model.generate(ids, attention_mask=mask, cache=cache, **GREEDY)
        evicted, share = cache.evicted_slots, cache.mass_dropped_share()
        cache.reset()
        assert cache.allocated_bytes() == 0
        assert (cache.evicted_slots, cache.mass_dropped_share(), cache.get_seq_length()) == (0, 0, 0)
        assert torch.equal(model.generate(ids, attention_mask=mask, cache=cache, **GREEDY), first)
        assert (cache.evicted_slots, cache.mass_dropped_share()) == (evicted, share)
        cache.reset()
        # Also for another number of rows.
        assert model.generate(ids[:1], cache=cache, **GREEDY)[0].tolist() == first[0].tolist()


class TestRefusals:
    """What cannot be done rightly is refused, with what to do instead."""

    def test_beam_search(self):
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        with pytest.raises(InvalidRequestError, match=r"num_beams: beam search is not supported .* use num_beams=1"):
            model.generate(random_tokens(30, seed=1).unsqueeze(0), cache=cache, num_beams=2, **GREEDY)

    def test_assisted_generation(self):
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        with pytest.raises(ValueError, match="requires a cache that can be cropped"):
            model.generate(
                random_tokens(30, seed=1).unsqueeze(0),
                cache=cache,
                assistant_model=tiny_model("llama_grouped"),
                **GREEDY,
            )

    def test_prompt_lookup(self):
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        with pytest.raises(ValueError, match="requires a cache that can be cropped"):
            model.generate(random_tokens(30, seed=1).unsqueeze(0), cache=cache, prompt_lookup_num_tokens=3, **GREEDY)

    def test_right_padding(self):
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        ids, mask = padded_batch()
        with pytest.raises(
            InvalidRequestError, match=r"attention_mask: padding must be on the left: .*padding_side='left'"
        ):
            model.generate(ids.flip(1), attention_mask=mask.flip(1), cache=cache, **GREEDY)

    def test_padding_in_the_middle(self):
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        mask = torch.ones(1, 30, dtype=torch.long)
        mask[0, 10:12] = 0
        with pytest.raises(InvalidRequestError, match="padding must be on the left"):
            model.generate(random_tokens(30, seed=1).unsqueeze(0), attention_mask=mask, cache=cache, **GREEDY)

    def test_another_number_of_rows(self):
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        ids, mask = padded_batch()
        model.generate(ids, attention_mask=mask, cache=cache, **GREEDY)
        with pytest.raises(InvalidRequestError, match="batch: the cache was made for 3 rows, got 1"):
            forward(model, cache, ids[0])

    def test_a_budget_below_the_smallest(self):
        with pytest.raises(
            BudgetTooSmallError, match=r"budget\.tokens: too small .* the smallest is 6 tokens"
        ) as caught:
            BudgetedCache(tiny_model("llama_grouped"), BudgetRequest.tokens(5))
        assert caught.value.smallest == 6

    def test_a_fraction_of_an_unknown_length(self):
        with pytest.raises(InvalidRequestError, match=r"budget\.fraction: needs the length"):
            BudgetedCache(tiny_model("llama_grouped"), BudgetRequest.fraction(0.5))

    def test_a_policy_that_keeps_all_outgrown(self):
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40), PolicyRequest("full"))
        with pytest.raises(InvalidRequestError, match="budget: policy full keeps every token"):
            model.generate(random_tokens(30, seed=1).unsqueeze(0), cache=cache, **GREEDY)


class TestFailures:
    """A forward pass that fails halfway."""

    def test_a_prompt_that_failed_halfway_is_not_continued_but_can_be_started_again(self):
        model = tiny_model("llama_grouped")
        tokens = random_tokens(60, seed=1)
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        expected = forward(model, BudgetedCache(model, BudgetRequest.tokens(40)), tokens)
        handle = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="boom"):
            forward(model, cache, tokens)
        handle.remove()
        with pytest.raises(InvalidRequestError, match=r"cache: the last forward pass failed halfway; call reset\(\)"):
            forward(model, cache, tokens)
        cache.reset()
        assert torch.equal(forward(model, cache, tokens), expected)

    def test_a_single_token_that_failed_can_be_repeated(self):
        model = tiny_model("llama_grouped")
        tokens = random_tokens(130, seed=1)
        cache, untouched = (BudgetedCache(model, BudgetRequest.tokens(40)) for _ in range(2))
        forward(model, cache, tokens[:60])
        forward(model, untouched, tokens[:60])
        for step in range(60, 130):
            handle = model.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="boom"):
                forward(model, cache, tokens[step : step + 1])
            handle.remove()
            assert_close(
                forward(model, cache, tokens[step : step + 1]), forward(model, untouched, tokens[step : step + 1])
            )
        assert cache.evicted_slots == untouched.evicted_slots
        assert cache.mass_dropped_share() == pytest.approx(untouched.mass_dropped_share())

    def test_gradients_are_not_recorded(self):
        # Whoever forgets no_grad() must not fill the memory with the graphs of all passes.
        model = tiny_model("llama_grouped")
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        for part in random_tokens(90, seed=1).split(45):
            model(input_ids=part.unsqueeze(0), cache=cache, use_cache=True)
        tensors = [tensor for layer in cache.rows[0].pool.layers for tensor in layer.tensors()]
        assert not any(tensor.requires_grad for tensor in tensors)

    def test_passes_in_and_out_of_inference_mode_mix(self):
        model = tiny_model("llama_grouped")
        tokens = random_tokens(90, seed=1)
        cache = BudgetedCache(model, BudgetRequest.tokens(40))
        forward(model, cache, tokens[:45])
        with torch.no_grad():
            mixed = model(input_ids=tokens[None, 45:], cache=cache, use_cache=True).logits[0]
        untouched = BudgetedCache(model, BudgetRequest.tokens(40))
        forward(model, untouched, tokens[:45])
        assert torch.equal(mixed, forward(model, untouched, tokens[45:]))


def fail(*args):
    raise RuntimeError("boom")


def reference_greedy(reference, prompt, new):
    """Return the greedy tokens of the dense reference; the last is chosen, but not read."""
    token = reference.read(prompt)[-1].argmax()
    chosen = [int(token)]
    while len(chosen) < new:
        token = reference.decode(token).argmax()
        chosen.append(int(token))
    return chosen


def storage_bytes(cache):
    """Return the bytes of all storages of a cache's rows, each counted once."""
    pools = {id(row.pool): row.pool for row in cache.rows}.values()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for pool in pools
        for layer in pool.layers
        for tensor in layer.tensors()
    }
    return sum(storages.values())
